"""LLaVA's and LLaVA-NeXT's own programs, unmodified, on this tree's checkpoints, against `llava.eval.answer`.

LLaVA comes from PyPI. LLaVA-NeXT is not there: `LLAVA_NEXT=FOLDER` names a clone.
"""

import ast
import base64
import importlib
import importlib.util
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from upstream_package import run_program, unpacked_package

from llava.eval import answer
from llava.mm_utils import load_image_from_base64

ASK, LETTER = QUESTIONS[0] + POPE_SUFFIX, "Answer with the option's letter from the given choices directly."


def expected(colours) -> list[str]:
    return ["Yes" if colour in WARM else "No" for colour in colours]


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """LLaVA's package."""
    return unpacked_package(tmp_path_factory.mktemp("upstream") / "tree")


@pytest.fixture(scope="module")
def upstream_next():
    """A clone of LLaVA-NeXT."""
    if not os.environ.get("LLAVA_NEXT"):
        pytest.skip("LLaVA-NeXT is not on PyPI: LLAVA_NEXT=FOLDER names a clone of it")
    return Path(os.environ["LLAVA_NEXT"])


@pytest.fixture(params=["none", "gwc_layernorm"])
def folder(request, trained):
    return str(trained(request.param))


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def our_answers(tmp_path, tiny, folder, records) -> list[dict]:
    """The lines that `llava.eval.answer` writes."""
    (tmp_path / "ours.json").write_text(json.dumps(records))
    command = ["--model-path", folder, "--data", tmp_path / "ours.json", "--image-folder", tiny / "data/images"]
    assert answer.main([*map(str, command), "--output", str(tmp_path / "ours.jsonl"), "--batch-size", "1"]) == 0
    return lines(tmp_path / "ours.jsonl")


def asked(text: str, colour: str | None, number: int = 0) -> dict:
    """A record that asks about a picture of one colour."""
    shown = "" if colour is None else "<image>\n"
    picture = {} if colour is None else {"image": f"{colour}.png"}
    turns = [{"from": "human", "value": shown + text}, {"from": "gpt", "value": "?"}]
    return {"id": str(number), "conversations": turns, **picture}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["model_vqa", "model_vqa_loader"])
def test_upstreams_question_programs_give_our_answers(monkeypatch, upstream, tiny, folder, tmp_path, program):
    rows = [{"question_id": i, "image": f"{colour}.png", "text": ASK} for i, colour in enumerate(COLOURS)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model-path", folder, "--image-folder", tiny / "data/images", "--temperature", 0]
    flags += ["--question-file", tmp_path / "questions.jsonl", "--answers-file", tmp_path / "theirs.jsonl"]
    run_program(monkeypatch, upstream / f"llava/eval/{program}.py", *flags, "--conv-mode", "qwen_1_5")
    theirs, ours = lines(tmp_path / "theirs.jsonl"), our_answers(tmp_path, tiny, folder, rows)
    assert [row["text"] for row in theirs] == expected(COLOURS)
    for field in ("question_id", "prompt", "text"):
        assert [row[field] for row in theirs] == [row[field] for row in ours]


@pytest.mark.slow
def test_upstreams_science_program_and_its_scorer_give_our_numbers(
    monkeypatch, upstream, tiny, folder, tmp_path, capsys
):
    records = [asked(ASK, colour, i) for i, colour in enumerate([*COLOURS, None])]
    ours = our_answers(tmp_path, tiny, folder, records)
    flags = ["--model-path", folder, "--image-folder", tiny / "data/images", "--temperature", 0]
    flags += ["--question-file", tmp_path / "ours.json", "--answers-file", tmp_path / "theirs.jsonl"]
    run_program(monkeypatch, upstream / "llava/eval/model_vqa_science.py", *flags, "--conv-mode", "qwen_1_5")
    for field in ("question_id", "prompt", "text"):
        assert [row[field] for row in lines(tmp_path / "theirs.jsonl")] == [row[field] for row in ours]
    # Every answer is made a letter, so that the scorer counts some right ones.
    lettered = [row | {"text": "A" if row["text"] == "Yes" else "B"} for row in ours]
    (tmp_path / "lettered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lettered))
    problems = {row["question_id"]: {"choices": ["Yes", "No"], "answer": 0} for row in ours}
    (tmp_path / "problems.json").write_text(json.dumps(problems))
    (tmp_path / "pid_splits.json").write_text(json.dumps({"test": list(problems)}))
    flags = ["--base-dir", tmp_path, "--result-file", tmp_path / "lettered.jsonl"]
    flags += ["--output-file", tmp_path / "o.json", "--output-result", tmp_path / "r.json"]
    run_program(monkeypatch, upstream / "llava/eval/eval_science_qa.py", *flags)
    right = 100 * expected(COLOURS).count("Yes") / len(COLOURS)
    assert f"Total: {len(records)}, " in (text := capsys.readouterr().out) and f"IMG-Accuracy: {right:.2f}%" in text


@pytest.mark.slow
def test_upstreams_mmbench_program_gives_our_answers(monkeypatch, upstream, tiny, folder, tmp_path):
    pytest.importorskip("pandas")
    table = ["index\tquestion\thint\timage\tA\tB\tC\tD"]
    for number, colour in enumerate(COLOURS):
        image = base64.b64encode((tiny / f"data/images/{colour}.png").read_bytes()).decode()
        table.append(f"{number}\t{QUESTIONS[0]}\t\t{image}\tYes\tNo\t\t")
    (tmp_path / "questions.tsv").write_text("\n".join(table) + "\n")
    flags = ["--model-path", folder, "--temperature", 0, "--single-pred-prompt", "--conv-mode", "qwen_1_5"]
    flags += ["--question-file", tmp_path / "questions.tsv", "--answers-file", tmp_path / "theirs.jsonl"]
    run_program(monkeypatch, upstream / "llava/eval/model_vqa_mmbench.py", *flags)
    text = f"{QUESTIONS[0]}\nA. Yes\nB. No\n{LETTER}"
    ours = our_answers(tmp_path, tiny, folder, [asked(text, colour, i) for i, colour in enumerate(COLOURS)])
    assert [row["text"] for row in lines(tmp_path / "theirs.jsonl")] == [row["text"] for row in ours]


@pytest.mark.slow
def test_upstreams_run_llava_and_cli_give_our_answers(monkeypatch, upstream, tiny, folder, tmp_path, capsys):
    flags = ["--model-path", folder, "--conv-mode", "qwen_1_5", "--temperature", 0]
    for colour in COLOURS:
        picture = ["--image-file", tiny / f"data/images/{colour}.png"]
        run_program(monkeypatch, upstream / "llava/eval/run_llava.py", *flags, *picture, "--query", ASK)
        assert capsys.readouterr().out.splitlines()[-1:] == expected([colour])
    run_program(monkeypatch, upstream / "llava/serve/cli.py", *flags, *picture, "--device", "cpu", typed=[ASK, "Sure?"])
    said = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if ": " in line]
    first = our_answers(tmp_path, tiny, folder, [record := asked(ASK, colour)])[0]["text"]
    record["conversations"][1]["value"] = first
    record["conversations"].append({"from": "human", "value": "Sure?"})
    (tmp_path / "ours.jsonl").unlink()
    assert said[-2:] == [first, our_answers(tmp_path, tiny, folder, [record])[0]["text"]]


@pytest.mark.slow
def test_upstreams_model_qa_asks_a_language_model(monkeypatch, upstream, tiny, tmp_path):
    row = {"question_id": 7, "text": "Spell red.", "category": "none"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row) + "\n")
    flags = ["--question-file", tmp_path / "questions.jsonl", "--answers-file", tmp_path / "theirs.jsonl"]
    run_program(monkeypatch, upstream / "llava/eval/model_qa.py", "--model-name", tiny / "llama", *flags)
    assert [found["question_id"] for found in lines(tmp_path / "theirs.jsonl")] == [7]


@pytest.mark.slow
def test_llava_nexts_programs_give_our_answers(monkeypatch, upstream_next, tiny, folder, tmp_path, capsys):
    records = [asked(ASK, colour, i) for i, colour in enumerate(COLOURS)]
    ours = our_answers(tmp_path, tiny, folder, records)
    more = {"metadata": {"question_type": "x", "dataset": "y"}}
    theirs = [record | more | {"sample_id": record["id"], "image": [record["image"]]} for record in records]
    (tmp_path / "questions.json").write_text(json.dumps(theirs))
    # The program wants the two markers as the tokenizer's only extra tokens, as Qwen1.5 has them.
    marked = Path(shutil.copytree(folder, tmp_path / "marked"))
    settings = json.loads((marked / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    (marked / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = ["--model-path", marked, "--image-folder", tiny / "data/images", "--temperature", 0]
    flags += ["--question-file", tmp_path / "questions.json", "--answers-file", tmp_path / "theirs.jsonl"]
    run_program(monkeypatch, upstream_next / "llava/eval/model_vqa.py", *flags)
    assert [row["pred_response"] for row in lines(tmp_path / "theirs.jsonl")] == [row["text"] for row in ours]
    flags = ["--model-path", folder, "--conv-mode", "qwen_1_5", "--image-file", tiny / "data/images/red.png"]
    torch.manual_seed(0)  # this program always samples
    run_program(monkeypatch, upstream_next / "llava/serve/cli.py", *flags, typed=[ASK])
    assert "Yes" in capsys.readouterr().out


def imports(program: Path) -> set[tuple[str, str]]:
    """Modules of `llava` and the names that a program imports from them."""
    found = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "llava":
            found |= {(node.module, alias.name) for alias in node.names if alias.name != "*"}
    return found


def test_every_name_that_upstreams_programs_import_exists(our_metrics, upstream):
    programs = [*(upstream / "llava/eval").glob("*.py"), upstream / "llava/serve/cli.py"]
    names = set().union(*map(imports, programs))
    assert len(names) > 10
    assert not [(module, name) for module, name in names if not hasattr(importlib.import_module(module), name)]


@pytest.mark.slow
def test_upstreams_text_vqa_scorer_reads_our_answers(
    monkeypatch, our_metrics, upstream, tiny, trained, tmp_path, capsys
):
    rows = [{"question_id": f"i{i}", "image": f"{colour}.png", "text": ASK} for i, colour in enumerate(COLOURS)]
    our_answers(tmp_path, tiny, str(trained("none")), rows)
    right = [{"image_id": row["question_id"], "question": QUESTIONS[0], "answers": ["yes"] * 10} for row in rows]
    (tmp_path / "right.json").write_text(json.dumps({"data": right}))
    flags = ["--annotation-file", tmp_path / "right.json", "--result-file", tmp_path / "ours.jsonl"]
    run_program(monkeypatch, upstream / "llava/eval/eval_textvqa.py", *flags)
    share = 100 * expected(COLOURS).count("Yes") / len(COLOURS)
    assert f"Samples: {len(rows)}\nAccuracy: {share:.2f}%" in capsys.readouterr().out


@pytest.fixture(scope="module")
def our_metrics():
    pytest.importorskip("lmms_eval", reason="EXTRAS=eval bash scripts/setup.sh")
    return importlib.import_module("llava.eval.m4c_evaluator")


@pytest.fixture(scope="module")
def their_metrics(upstream):
    spec = importlib.util.spec_from_file_location("their_metrics", upstream / "llava/eval/m4c_evaluator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORDS = ["a", "The", "none", "two", "1,000", "3.5", "x.", "cat's", "dont", "couldntve", "couldnt've", "yall'd've"]
LETTERS = st.sampled_from("abc")
SCORED = st.tuples(LETTERS, st.lists(LETTERS, min_size=10, max_size=10))
ANSWERS = st.lists(st.sampled_from([*WORDS, *';/[]"{}()=+\\_-><@`,?!. \n\t']), min_size=1, max_size=6).flatmap(
    lambda words: st.sampled_from(["", " "]).map(lambda space: space.join(words))
)


@given(text=ANSWERS)
def test_answers_are_normalised_as_upstream_normalises_them(our_metrics, their_metrics, text):
    assert our_metrics.EvalAIAnswerProcessor()(text) == their_metrics.EvalAIAnswerProcessor()(text)


def test_every_contraction_is_upstreams(our_metrics, their_metrics):
    ours, theirs = our_metrics.EvalAIAnswerProcessor(), their_metrics.EvalAIAnswerProcessor()
    for word in {*theirs.CONTRACTIONS, *theirs.CONTRACTIONS.values(), *theirs.NUMBER_MAP}:
        assert ours(word) == theirs(word)


@given(data=st.lists(SCORED, min_size=1, max_size=4))
def test_text_vqa_scores_equal_upstreams(our_metrics, their_metrics, data):
    entries = [{"pred_answer": said, "gt_answers": right} for said, right in data]
    ours, theirs = our_metrics.TextVQAAccuracyEvaluator(), their_metrics.TextVQAAccuracyEvaluator()
    assert ours.eval_pred_list(entries) == pytest.approx(theirs.eval_pred_list(entries))


def test_a_picture_in_base64_is_opened():
    file = io.BytesIO()
    Image.new("RGB", (2, 1), COLOURS["red"]).save(file, "PNG")
    opened = load_image_from_base64(base64.b64encode(file.getvalue()).decode())
    assert opened.size == (2, 1) and opened.getpixel((0, 0)) == COLOURS["red"]
