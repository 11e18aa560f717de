"""The pages of results: what is read from run folders, and the refusal of what is missing, doubled or edited."""

import json
import re
import shlex
import shutil
from functools import cache

import pytest
from comparison_runs import change, write_run, write_scores
from paths import ROOT

from llava.compare import commands, results_folders
from llava.compare.arms import parse_arm
from llava.compare.paper import ARMS
from llava.compare.results_folders import EvaluatedRun, entry_of
from llava.compare.results_page import OPEN, page_text, publish
from llava.compare.results_record import (
    RECIPES,
    check_study,
    digest_of,
    read_entries,
    row_commands,
    with_entries,
    write_entries,
)
from llava.eval.results import PAPER_COLUMNS
from llava.launch.recipe import STAGES, resolved_run
from llava.utils.intervals import share_interval
from llava.utils.provenance import RUN_FILE

DOCS = ROOT / "docs"
NINE = dict.fromkeys(PAPER_COLUMNS.values(), 40)

recipe_of = cache(resolved_run)


@pytest.fixture(autouse=True)
def recipes_are_read_once(monkeypatch):
    monkeypatch.setattr(results_folders, "resolved_run", recipe_of)


def trained(root, seed, arm, preset="llama-3.2-3b", right=0.5, tasks=NINE, more=(), data=""):
    """A finished run by a preset, with the preset's own flags and `more`."""
    recipes = {stage: recipe_of(stage, PRESET=preset, NORM=arm) for stage in STAGES}
    model = recipes[STAGES[0]]["flags"]["model_name_or_path"]
    run = write_run(root, seed, arm, right, tasks=tasks, model=model)
    for stage, recipe in recipes.items():
        flags = recipe["flags"] | ({"data_path": f"{data}/{stage}.json"} if data else {})
        change(run, stage, "training.per_device_train_batch_size", recipe["batch"]["global"])
        change(run, stage, "data.data_path", flags["data_path"])
        path = run.folder(stage) / RUN_FILE
        record = json.loads(path.read_text())
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        record["starts"][0]["provenance"] |= {"command": shlex.join(["train", *words, *more]), "machine": "a machine"}
        path.write_text(json.dumps(record))
        (run.folder(stage) / "manifest.json").write_text('{"step": 5}')
    write_scores(run, right, "wrong", tasks)  # of the folder as it is now
    return run


@pytest.fixture
def comparison(tmp_path):
    """A folder with two arms of a recipe, one seed."""
    folder = tmp_path / "comparison"
    for arm, right in (("none", 0.5), ("gwc_layernorm", 0.8)):
        trained(folder, 42, arm, right=right)
    return folder


@pytest.fixture
def docs(tmp_path):
    """A folder for the pages, without a result."""
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs"


def quickstart(folder, seed=42):
    """A finished quickstart of two arms."""
    page = {"chance_percent": {}, "arms": {}, "differences": {}, "records": []}
    for arm in ("none", "gwc_layernorm"):
        run = trained(folder / "made", seed, arm, "demo", tasks={"color": 80, "shape": 40})
        results = run.results
        kinds = {kind: [sample.score for sample in task.samples] for kind, task in results.tasks.items()}
        kinds["all questions"] = kinds["color"] + kinds["shape"]
        page["arms"][arm] = {
            "accuracy_percent": {kind: 100 * sum(scores) / len(scores) for kind, scores in kinds.items()},
            "accuracy_interval": {
                kind: [100 * end for end in share_interval(int(sum(scores)), len(scores))]
                for kind, scores in kinds.items()
            },
        }
        shutil.copytree(run.folder("finetune").parent, folder / arm)
        shutil.move(folder / arm / "eval", folder / "answers" / arm / "untouched")
    shown = {"points": 0.0, "interval": [-1.0, 1.0], "verdict": "unchanged", "won": 0, "lost": 0, "p": 1.0}
    page["differences"] = {"gwc_layernorm": dict.fromkeys(("color", "shape", "all questions"), shown)}
    shutil.rmtree(folder / "made")
    (folder / "results.json").write_text(json.dumps(page))
    return folder


# --- the committed pages ----------------------------------------------------------------------------------------------


def test_the_page_in_docs_is_written_from_the_committed_results():
    entries = read_entries(DOCS)
    assert (DOCS / "results.md").read_text() == page_text(entries), "run: python -m llava.compare page --docs"
    for entry in entries:
        if entry["kind"] == "study":
            check_study(entry, DOCS / "study.json")


def test_every_preset_but_the_demo_has_rows():
    assert {path.stem for path in (ROOT / "scripts/presets").glob("*.sh")} == {"demo", *RECIPES}


def test_the_quickstarts_tables_on_other_pages_are_its_result():
    (entry,) = [entry for entry in read_entries(DOCS) if entry["kind"] == "quickstart"]
    overall = [entry["scores"][arm]["all questions"] for arm in ("none", "gwc_layernorm")]
    cells = [f"{score:.1f} ({low:.0f} to {high:.0f})" for score, low, high in overall]
    norms = [f"{entry['norms'][arm]['visual']:.3g}" for arm in ("none", "gwc_layernorm")]
    for page in ("README.md", "README.zh-CN.md", "docs/first-hour.md", "docs/first-hour.zh-CN.md"):
        rows = [re.split(r"\s*\|\s*", line) for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
        for shown in (cells, norms):
            assert any([cell.replace(" 至 ", " to ") for cell in row[2:4]] == shown for row in rows), page


def test_an_open_row_has_the_commands_that_fill_it_and_the_papers_numbers():
    page = page_text([])
    for preset, rows in RECIPES.items():
        for arm in rows.arms:
            assert "\n".join(row_commands(preset, arm)) in page
            folder = recipe_of("finetune", *rows.flags, PRESET=preset, NORM=arm)["flags"]["output_dir"]
            assert row_commands(preset, arm)[2].endswith(f"bash scripts/evaluate.sh {folder}")
    assert page.count(f"| {OPEN} |") == sum(len(rows.arms) for rows in RECIPES.values())
    assert "| paper: w/ Norm, w/ GWC | 71.82 | 41.24 | 88.26 |" in page and "| 61.27 | +2.26 |" in page


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_comparison_fills_the_rows_of_its_arms(comparison, docs):
    publish([comparison], docs)
    (entry,) = read_entries(docs)
    scores = json.loads((comparison / "seed-42/gwc_layernorm/eval/results.json").read_text())["tasks"]
    assert entry["scores"]["gwc_layernorm"]["pope"][0] == pytest.approx(scores["pope"]["score"], abs=1e-3)
    mean = sum(task["score"] for task in scores.values()) / 9
    score, low, high = entry["scores"]["gwc_layernorm"]["mean"]
    assert score == pytest.approx(mean, abs=1e-3) and low < mean < high
    assert entry["machine"] == "a machine" and entry["commit"] == "c0ffee" and entry["date"] == "2026-01-01"
    assert entry["command"] == ["bash scripts/compare.sh --preset llama-3.2-3b --arms none,gwc_layernorm"]
    page = (docs / "results.md").read_text()
    assert f"{score:.1f} ({low:.0f} to {high:.0f})" in page and "improved" in page
    assert page.count(f"| {OPEN} |") == sum(len(rows.arms) for rows in RECIPES.values()) - 2
    assert "PRESET=llama-3.2-3b NORM=gwc_layernorm" not in page and "PRESET=llama-3.2-3b NORM=layernorm" in page


def test_an_evaluation_fills_its_row_by_the_commands_that_the_row_shows(comparison, docs):
    folder = comparison / "seed-42/gwc_layernorm/eval"
    (written, page) = publish([folder], docs)
    (entry,) = read_entries(docs)
    assert entry["arms"] == ["gwc_layernorm"] and entry["seeds"] == [42] and entry["differences"] == {}
    assert entry["command"] == row_commands("llama-3.2-3b", "gwc_layernorm")[:-1]
    assert (written, page) == (
        docs / "results.json",
        docs / "results.md",
    ) and "gwc\\_layernorm, seed 42" in page.read_text()


def test_flags_that_a_device_or_a_folder_decides_may_differ_and_others_are_named(tmp_path):
    more = ["--bf16", "False", "--deepspeed", "other.json", "--max_tokens_per_micro_batch", "1", "--image_folder", "/a"]
    more += ["--overwrite_output_dir", "True", "--eval_strategy", "steps", "--hang_timeout", "9"]
    trained(tmp_path / "fits", 42, "none", more=more, data="/elsewhere")
    message = r"recipe llama-3\.2-3b: {'pretrain': {'data_path'"
    with pytest.raises(ValueError, match=message):  # another name of the data, not another folder
        entry_of(tmp_path / "fits")
    trained(tmp_path / "other", 42, "none", more=[*more, "--learning_rate", "1", "--weight_decay", "0.1"])
    with pytest.raises(ValueError, match=r"'learning_rate': \['1e-3', '1'\], 'weight_decay': \['0\.0', '0\.1'\]"):
        entry_of(tmp_path / "other")
    trained(tmp_path / "same", 42, "none", more=more)
    assert entry_of(tmp_path / "same")["changed"] == {}


def test_llavas_row_takes_its_own_flags_and_tasks(tmp_path):
    tasks = dict.fromkeys(RECIPES["llava-1.5-7b"].tasks, 40)
    trained(tmp_path / "other", 42, "none", "llava-1.5-7b", tasks=tasks)
    with pytest.raises(ValueError, match=r"'loss_reduction': \['micro_batch_mean', '\(absent\)'\]"):
        entry_of(tmp_path / "other")
    trained(tmp_path / "llavas", 42, "none", "llava-1.5-7b", tasks=tasks, more=["--loss_reduction", "micro_batch_mean"])
    assert entry_of(tmp_path / "llavas")["tasks"].keys() == tasks.keys()


def test_the_demo_says_which_flags_are_not_its_presets(tmp_path):
    trained(tmp_path, 42, "none", "demo", tasks={"scenes": 40}, more=["--max_steps", "3"])
    entry = entry_of(tmp_path)
    assert entry["changed"] == {"pretrain": {"max_steps": ["68", "3"]}, "finetune": {"max_steps": ["70", "3"]}}
    assert "pretrain: max\\_steps 3, not 68" in page_text([entry])


def test_the_quickstart_keeps_the_scores_of_its_page(tmp_path):
    entry = entry_of(quickstart(tmp_path / "q"))
    page = json.loads((tmp_path / "q/results.json").read_text())["arms"]["none"]
    assert entry["scores"]["none"]["all questions"][0] == pytest.approx(page["accuracy_percent"]["all questions"])
    assert entry["command"] == ["bash scripts/quickstart.sh"] and entry["seeds"] == [42]


@pytest.mark.parametrize("arm", [*ARMS, "layernorm@default", "gwc_layernorm@4x", "scale-fixed", "vocab_mix_mlp2x_gelu"])
def test_the_name_of_an_arm_follows_from_its_flags(arm):
    settings = parse_arm(arm)
    model = {"mm_projector_norm": settings.norm, "mm_projector_norm_init": settings.init or "text_norm"}
    model |= {"mm_projector_norm_learnable": settings.learnable, "mm_projector_type": settings.projector}
    assert results_folders.arm_of(model) == arm


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_missing_result_is_refused_by_name(comparison, docs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no scores; expected the folder of a finished quickstart, comparison"):
        publish([tmp_path / "empty"], docs)
    checkpoint = comparison / "seed-42/none/finetune"
    with pytest.raises(ValueError, match="no scores; run bash scripts/evaluate.sh .*none/finetune"):
        publish([checkpoint], docs)
    (checkpoint / "manifest.json").rename(checkpoint / "manifest")
    with pytest.raises(ValueError, match="missing: none, seed 42: finetune; rerun"):  # training was stopped
        publish([checkpoint.with_name("eval")], docs)
    (checkpoint / "manifest").rename(checkpoint / "manifest.json")
    trained(comparison, 43, "none")
    with pytest.raises(ValueError, match="missing: gwc_layernorm, seed 43: pretrain; .*finetune; .*seed 43: scores; r"):
        publish([comparison], docs)
    shutil.rmtree(comparison / "seed-43")
    shutil.rmtree(comparison / "seed-42/none/eval")
    with pytest.raises(ValueError, match="missing: none, seed 42: scores; rerun the command"):
        publish([comparison], docs)
    assert list(docs.iterdir()) == []


def test_a_row_takes_all_tasks_on_all_questions(tmp_path):
    run = trained(tmp_path, 42, "none", tasks=dict.fromkeys(list(NINE)[:-1], 40))
    with pytest.raises(ValueError, match="missing: none, seed 42: scores of mmlu; run: bash scripts/evaluate.sh"):
        entry_of(tmp_path)
    write_scores(run, 0.5, "wrong", NINE)
    path = run.folder("eval") / "results.json"
    content = json.loads(path.read_text())
    content["settings"]["limit"] = 20
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="scored on the first 20 questions of each task"):
        entry_of(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("mmlu_fewshot", 0), ("conv_template", "vicuna_v1")])
def test_a_row_takes_scores_by_its_own_command_alone(tmp_path, name, value):
    path = trained(tmp_path, 42, "none").folder("eval") / "results.json"
    content = json.loads(path.read_text())
    usual, content["settings"][name] = content["settings"][name], value
    path.write_text(json.dumps(content))
    message = re.escape(f"none, seed 42 was scored with other settings: {{'{name}': ({usual!r}, {value!r})}}")
    with pytest.raises(ValueError, match=message):
        entry_of(tmp_path)


def test_a_doubled_result_is_refused_with_both_names(comparison, docs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(comparison, copy)
    with pytest.raises(
        ValueError, match="comparison and .*copy have the same result: .*gwc_layernorm, seed 42; .*none"
    ):
        publish([comparison, copy], docs)
    with pytest.raises(ValueError, match="comparison: named twice"):
        publish([comparison, comparison], docs)
    assert list(docs.iterdir()) == []
    publish([comparison], docs)
    with pytest.raises(
        ValueError, match="is already in the result comparison, llama-3.2-3b on .*, which has others too"
    ):
        publish([comparison / "seed-42/none/eval"], docs)
    (entry,) = read_entries(docs)
    write_entries([entry, entry], docs)
    with pytest.raises(ValueError, match="none, seed 42 is in comparison, .* and in comparison, .*; restore"):
        publish([], docs)


def test_the_same_files_under_another_name_are_doubled(comparison):
    entry = entry_of(comparison)
    other = entry | {"preset": "qwen2.5-7b"}
    with pytest.raises(ValueError, match="have the same result: .*none, seed 42/finetune/run.json"):
        with_entries([], {"one": entry, "other": other})


@pytest.mark.parametrize("part", ["scores", "commit", "files"])
def test_an_edited_entry_is_refused_by_its_digest(comparison, docs, part, monkeypatch, capsys):
    publish([comparison], docs)
    before = (docs / "results.md").read_text()
    old = {"scores": '"pope":[', "commit": '"c0ffee"', "files": '"results.json":"'}[part]
    new = {"scores": '"pope":[9', "commit": '"c0ffef"', "files": '"results.json":"0'}[part]
    text = (docs / "results.json").read_text()
    assert old in text
    (docs / "results.json").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(commands, "ROOT", docs.parent)
    assert commands.main(["page", "--docs"]) == 2
    assert "none, gwc_layernorm was edited: digest" in capsys.readouterr().err
    assert (docs / "results.md").read_text() == before


def test_a_study_that_was_edited_after_its_result_is_refused(docs):
    shutil.copy(DOCS / "study.json", docs)
    study = entry_of(docs / "study.json")
    write_entries([study], docs)
    publish([], docs)
    (docs / "study.json").write_text((docs / "study.json").read_text().replace("62.037", "72.037", 1))
    with pytest.raises(ValueError, match=f"study.json: digest .*was read from {study['files']['study']['study.json']}"):
        publish([], docs)


def test_a_score_that_its_answers_do_not_give_is_refused(comparison, tmp_path):
    path = comparison / "seed-42/none/eval/results.json"
    content = json.loads(path.read_text())
    content["tasks"]["pope"]["score"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="pope, none: score .* but its samples give"):
        entry_of(comparison)
    folder = quickstart(tmp_path / "q")
    page = json.loads((folder / "results.json").read_text())
    page["arms"]["none"]["accuracy_percent"]["color"] += 1
    (folder / "results.json").write_text(json.dumps(page))
    with pytest.raises(ValueError, match="none has .*but its answers give .*rerun the quickstart"):
        entry_of(folder)


def test_scores_of_other_weights_are_refused(comparison):
    (comparison / "seed-42/none/finetune/mm_projector.bin").write_text("other")
    with pytest.raises(ValueError, match="used different weights"):
        entry_of(comparison)


# --- replacing --------------------------------------------------------------------------------------------------------


def test_a_result_is_replaced_in_its_place_by_the_same_runs_and_by_more(comparison, docs, tmp_path):
    first = quickstart(tmp_path / "q")
    publish([first, comparison], docs)
    again = quickstart(tmp_path / "again")
    publish([again], docs)
    assert [entry["kind"] for entry in read_entries(docs)] == ["quickstart", "comparison"]
    trained(comparison, 43, "none")
    trained(comparison, 43, "gwc_layernorm")
    publish([comparison], docs)
    entries = read_entries(docs)
    assert [entry["seeds"] for entry in entries] == [[42], [42, 43]]
    assert "--seeds 42,43" in entries[1]["command"][0]


def test_an_entrys_digest_is_that_of_its_content_in_any_order():
    entry = read_entries(DOCS)[0]
    assert digest_of(dict(reversed(entry.items()))) == entry["digest"]


def test_an_evaluated_runs_stages_may_be_anywhere(tmp_path):
    run = EvaluatedRun(tmp_path / "eval", 42, "none", (tmp_path / "a", tmp_path / "b"))
    assert [run.folder(part).name for part in (*STAGES, "eval")] == ["a", "b", "eval"]
