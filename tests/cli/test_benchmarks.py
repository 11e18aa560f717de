"""What the benchmarks share, and that each of them runs on inputs of a few records."""

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from transformers import AutoProcessor, LlavaForConditionalGeneration
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import common, page, scale, scaling, shapes, startup, vs_peers
from benchmarks.peers import recording
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import get_template
from llava.data.preprocess import preprocess
from llava.data.records import load_records
from llava.export.chat_template import chat_template
from llava.mm_utils import load_tokenizer
from llava.train.memory import estimate_memory


def test_a_result_says_machine_versions_and_commit(tmp_path):
    path = common.write_result("speed", [{"arm": "a", "seconds": 1.5}], folder=tmp_path, flags={"quick": True})
    result = json.loads(path.read_text())
    assert result["rows"] == [{"arm": "a", "seconds": 1.5}] and result["flags"] == {"quick": True}
    assert set(result["environment"]) == {"machine", "threads", "versions", "commit"}
    assert result["environment"]["versions"]["torch"] and result["environment"]["machine"]["cores"] >= 1


def test_quick_runs_never_replace_the_figures_of_the_page():
    parser = argparse.ArgumentParser()
    common.add_result_flags(parser, quick="one run")
    folders = [common.result_folder(parser.parse_args(words)) for words in ([], ["--quick"])]
    assert folders == [common.RESULTS, common.QUICK_RESULTS]
    assert common.result_folder(parser.parse_args(["--quick", "--output-dir", "here"])) == Path("here")


def test_arms_take_turns_and_the_warmup_is_dropped():
    calls = []
    arms = {name: (lambda name=name: calls.append(name) or len(calls)) for name in "ab"}
    assert common.alternate(arms, repeats=2, warmup=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert calls == list("ababab")


def test_a_ratio_pairs_the_values_of_a_round():
    assert common.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


# --- scaling ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipes_fill_their_micro_batches_and_a_window_keeps_ranks_even(monkeypatch):
    monkeypatch.setattr(scaling, "RANKS", (8, 64))
    signed = scaling.lengths_with_images(scaling.lengths_779k(np.random.default_rng(0)))
    rows = list(scaling.rank_rows(signed, steps=150))
    recipes = [row for row in rows if row["recipe"]]
    assert len(recipes) == 4 and all(row["slowest_over_mean"] <= 1.05 for row in recipes)
    assert all(row["fill"] >= 0.9 for row in recipes if row["ranks"] == 8)
    wide = [row for row in rows if row["ranks"] == 64]
    assert all(row["micro_batches_per_step"] == 1 for row in wide)  # two samples: fill has no room
    assert all((row["slowest_over_mean"] < 1.1) == (row["length_group_window"] == 16) for row in wide)


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_peers_are_given_our_model_with_the_template_that_marks_targets(tiny, tmp_path, stage):
    ours = tiny_models.make(tiny, tower="clip", norm="none")
    vs_peers.write_hf_model(ours, tiny / "clip", tiny / "llama", stage, tmp_path / "hf")
    _, loading = LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values())
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    assert (processor.chat_template == vs_peers.PLAIN_TEMPLATE) == (stage == "pretrain")
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("stage", "shown"), [("pretrain", True), ("finetune", True), ("finetune", False)])
def test_the_peers_chat_template_writes_and_marks_what_our_template_does(stage, shown):
    question = ("<image>" if shown else "") + ("" if stage == "pretrain" else ("\n" if shown else "") + "the cat on")
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "a dog near the house"}]
    tokenizer = load_tokenizer(str(shapes.TOKENIZER))
    ours = preprocess(turns, tokenizer, vs_peers.TEMPLATES[stage], has_image=shown)
    jinja = vs_peers.PLAIN_TEMPLATE if stage == "pretrain" else chat_template(get_template("qwen_2"), tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    contents = [{"type": "image"}] * shown + [{"type": "text", "text": question.replace("<image>", "").lstrip("\n")}]
    messages = [{"role": "user", "content": contents}, {"role": "assistant", "content": turns[1]["value"]}]
    theirs = tokenizer.apply_chat_template(
        messages, chat_template=jinja, return_dict=True, return_assistant_tokens_mask=True
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert [IMAGE_TOKEN_INDEX if i == image else i for i in theirs["input_ids"]] == ours.input_ids.tolist()
    assert theirs["assistant_masks"] == (ours.labels != IGNORE_INDEX).int().tolist()


def test_grouped_batches_have_every_sample_once_and_less_padding():
    tokens = np.random.default_rng(0).integers(8, 700, 160).tolist()
    order = vs_peers.grouped(tokens, 16)
    assert sorted(order) == list(range(160))

    def padded(order):
        return sum(16 * max(tokens[i] for i in order[start : start + 16]) for start in range(0, 160, 16))

    assert padded(order) < 0.7 * padded(list(range(160)))


def test_steps_of_batch_rebalance_have_the_samples_of_the_order_given():
    lengths = [record["length"] for record in recording.laid_out([{"length": n, "step": n // 16} for n in range(64)])]
    batches = iter(BatchRebalanceSampler(lengths, effective_batch_size=16, dp_size=1, grad_accum=4))
    steps = [[lengths[i] for _ in range(4) for i in next(batches)] for _ in range(4)]
    assert [sorted(step) for step in steps] == [list(range(start, start + 16)) for start in range(0, 64, 16)]


def test_a_steps_loss_is_the_mean_over_its_targets_in_every_trainer():
    by_targets = [(3.0 * 2 / 8, 2, True), (1.0 * 6 / 8, 6, True)]  # means of 3 and 1 over 2 and 6 targets
    by_micro_batches = [(3.0 / 2, 2, False), (1.0 / 2, 6, False)]
    assert recording.step_loss(by_targets) == recording.step_loss(by_micro_batches) == 1.5


def peers_run(rate, first_loss, later=6.0):
    return {"losses": [first_loss, later], "rate": rate}


WAY = vs_peers.Way("trl", 2)


def test_a_row_has_no_speed_where_the_first_losses_differ():
    ours = [peers_run(12.0, 7.0)]
    line = vs_peers.row("finetune", WAY, [peers_run(4.0, 7.00001, later=6.1)], ours, "", 1e-4)
    assert line["ratio"] == 3 and line["samples_per_second"] == 4 and not line["note"]
    line = vs_peers.row("finetune", WAY, [peers_run(4.0, 7.01)], ours, "", 1e-4)
    assert line["ratio"] is None and line["samples_per_second"] is None and "losses of the first step" in line["note"]
    assert vs_peers.row("finetune", WAY, [peers_run(4.0, 7.01)], ours, "", 3e-2)["ratio"] == 3


@pytest.fixture
def one_run(tmp_path, monkeypatch):
    """Runs a stand-in for a peer's script, and returns what `measure` says of it."""
    (tmp_path / "finetune").mkdir()
    monkeypatch.setattr(vs_peers, "PEERS_FOLDER", tmp_path)
    monkeypatch.setattr(vs_peers.Way, "python", sys.executable)
    args = argparse.Namespace(steps=2, warmup_steps=1)

    def run(script: str, way: vs_peers.Way = WAY):
        (tmp_path / "train_trl.py").write_text(script)
        return vs_peers.measure(args, tmp_path, "finetune", way)

    return run


RECORDED = "open('record.json', 'w').write('{\"losses\": [7.0, 6.0], \"times\": [5.0, 13.0]}')"


def test_a_run_of_other_steps_than_it_should_have_has_no_speed(one_run):
    assert one_run(RECORDED)["rate"] == 2.0
    with pytest.raises(RuntimeError, match="expected 2 steps, found 1"):
        one_run(RECORDED.replace("5.0, ", ""))


def test_only_a_way_that_says_so_gives_a_peer_what_this_tree_preloads(one_run, monkeypatch):
    monkeypatch.setattr(vs_peers, "preloads", lambda environment: {"OURS": "loaded"})
    script = f"import os; assert os.environ.get('OURS') == None, 'preloaded'; {RECORDED}"
    assert one_run(script)["rate"] == 2.0
    with pytest.raises(RuntimeError, match="preloaded"):
        one_run(script, replace(WAY, options={"preloads": True}))


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_synthetic_records_are_repeatable_and_pass_every_check(tmp_path):
    common.write_records(tmp_path / "a.json", common.conversation_records(50, "a.jpg", text_only=0.3))
    table = load_records(str(tmp_path / "a.json"))
    assert list(table) == list(common.conversation_records(50, "a.jpg", text_only=0.3))
    assert 0 < sum("image" in record for record in table) < 50
    common.write_records(tmp_path / "b.json", common.caption_records(5, "a.jpg"))
    assert all(record["image"] == "a.jpg" for record in load_records(str(tmp_path / "b.json")))


@pytest.mark.slow
def test_a_start_is_timed_and_leaves_a_cache(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("llava.mm_utils.load_tokenizer", lambda *_, **__: tokenizer)
    common.write_photo(tmp_path / "photo.jpg", 64, 64)
    common.write_records(tmp_path / "a.json", common.conversation_records(160, "photo.jpg", text_only=0.3))
    result = startup.started(tmp_path / "a.json", "", workers=1)
    assert result["first_batch_s"] >= result["records_s"] + result["lengths_s"] - 0.02 and result["worker_mib"] > 0
    (counts,) = map(np.load, (tmp_path / ".llava_cache").glob("*.counts.npy"))
    assert len(counts) == 160


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_estimated_states_equal_deepspeeds_where_everything_is_trained():
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model = scale.build(scale.Recipe("llama-3.2-3b", 2, False), {})
    model.get_vision_tower().requires_grad_(True)  # DeepSpeed's estimator knows no frozen weight
    args = scale.arguments({"model_max_length": "1024"}, 8)
    args.use_liger_kernel, args.deepspeed = False, "zero2"
    args.hf_deepspeed_config = argparse.Namespace(config={"zero_optimization": {"stage": 2}})
    estimate = estimate_memory(model, args, 1024)
    elements = sum(p.numel() for p in model.parameters())
    copies = 4 * elements / 8  # of gradients in fp32 in the optimizer's step, when there are no activations
    states = estimate.parameters + estimate.gradients + estimate.optimizer + copies
    theirs = estimate_zero2_model_states_mem_needs(elements, num_gpus_per_node=8, num_nodes=1, cpu_offload=False)[1]
    assert states == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_the_page_on_scale_has_the_rows_that_the_command_prints(monkeypatch):
    monkeypatch.setattr(scale, "RECIPES", scale.RECIPES[:2])
    with (common.ROOT / "docs/data/scale.csv").open() as file:
        written = list(csv.reader(file))[1:]
    assert list(scale.rows()) == written[:2]
    page = (common.ROOT / "docs/scale.md").read_text()
    assert all("| " + " | ".join(row) + " |\n" in page for row in written if row[1] != "1")


def test_the_pages_tables_are_those_of_the_results():
    text = page.PAGE.read_text()
    assert text == page.with_tables(text)
    assert page.GPU_ROWS[0].value(common.RESULTS) == 0.517 and "| 0.494 | **missed** |" in text
    for path in common.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["name"] == path.stem and result["environment"]["commit"]


def test_a_part_that_was_cut_off_has_no_figure(tmp_path):
    row = page.Row("error", "<= 0.1", "zero", "error", "command")
    rows = [{"error": 0.05}, {"error": 0.2}]
    for status, line in (("measured", "0.2 | **missed** |"), ("failed", "not measured | open |")):
        (tmp_path / "zero.json").write_text(json.dumps({"rows": rows, "status": status}))
        assert line in row.line(tmp_path)
