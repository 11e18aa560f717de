"""Held-out questions in training: which are asked, and what is right."""

import json

import pytest
import torch
from data_files import turns
from PIL import Image
from training import LORA, build, flags

from llava.asking import load_assistant
from llava.train import train as train_module
from llava.train.heldout import Questions, accuracy, can_be_asked
from llava.train.telemetry import LOG_FILE
from llava.utils.intervals import share_interval

EXPECTED, ANSWERS = ["Yes", "the left one", "2"], ["yes.", "The left  one!", "3"]


def record(answer: str, question: str = "<image>\nIs it warm?", **fields) -> dict:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "a", "image": "a.png", "conversations": turns} | fields


def test_an_answer_is_right_by_its_words():
    right = [accuracy([a], [e])["eval_accuracy"] for a, e in zip(ANSWERS, EXPECTED, strict=True)]
    assert right == [1, 1, 0]


def test_questions_have_short_answers_and_the_pictures_that_they_show():
    assert can_be_asked(record("Yes."))
    assert can_be_asked({k: v for k, v in record("Yes", "Is it?").items() if k != "image"})
    for unfit in (record("one two three four five six"), record("..."), record("Yes", "Is it?")):
        assert not can_be_asked(unfit)
    assert not can_be_asked({"conversations": [{"from": "human", "value": "Hello"}]})


def test_a_question_that_does_not_fit_is_not_asked(tiny, tmp_path):
    records = [
        {"id": name, "conversations": turns(question, "yes")}
        for name, question in (("long", "why? " * 200), ("short", "why?"))
    ]
    (tmp_path / "held.json").write_text(json.dumps(records))
    asked = {"eval_data_path": tmp_path / "held.json", "eval_generate": 2, "eval_strategy": "steps", "eval_steps": 1}
    _, trainer = build(flags(tiny, tmp_path / "run", 2, model_max_length=128, **asked))
    assert trainer.heldout.questions.indices == [1]
    (tmp_path / "held.json").write_text(json.dumps(records[:1]))
    with pytest.raises(ValueError, match=r"no held-out record of at most 128 tokens \(--model_max_length,"):
        build(flags(tiny, tmp_path / "run", 2, model_max_length=128, **asked))


def test_accuracy_comes_with_wilsons_interval():
    low, high = share_interval(2, 3)
    found = accuracy(ANSWERS, EXPECTED)
    assert found == {
        "eval_accuracy": 2 / 3, "eval_accuracy_low": low, "eval_accuracy_high": high, "eval_questions": 3
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bf16": True}, LORA])
def test_a_run_logs_what_its_model_answers_and_keeps_its_weights(tiny, tmp_path, trained, options, monkeypatch):
    """The answers are those of the saved model, asked on its own."""
    start = trained("gwc_layernorm")
    options = {"model_name_or_path": start, "vision_tower": None, "version": "qwen_1_5", **options}
    options |= {"data_path": tiny / "data/colours.json", "learning_rate": 1e-3}
    asked = {"eval_data_path": tiny / "data/colours.json", "eval_generate": 6, "eval_strategy": "steps"}
    asked |= {"eval_steps": 1, "per_device_eval_batch_size": 4}
    ask, rounds = Questions.ask, []
    monkeypatch.setattr(Questions, "ask", lambda *args: rounds.append(ask(*args)) or rounds[-1])
    train_module.train(flags(tiny, tmp_path / "with", 2, **options, **asked))
    train_module.train(flags(tiny, tmp_path / "without", 2, **options))
    for file in [*(tmp_path / "without").glob("*.safetensors"), *(tmp_path / "without").glob("non_lora*")]:
        assert file.read_bytes() == (tmp_path / "with" / file.name).read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "with" / LOG_FILE).read_text().splitlines()]
    last = [line for line in lines if "eval/accuracy" in line][-1]
    assert last["step"] == 2 and last["eval/questions"] == 6 and last["eval/accuracy"] > 0.5

    records = json.loads((tiny / "data/colours.json").read_text())
    chosen = [records[i * len(records) // 6] for i in range(6)]
    if "bf16" not in options:
        assistant = load_assistant(str(tmp_path / "with"), device="cpu", torch_dtype=torch.float32)
        images = [Image.open(tiny / "data/images" / r["image"]) for r in chosen]
        said = assistant.answer([r["conversations"][:1] for r in chosen], images, do_sample=False, max_new_tokens=20)
        assert rounds[-1] == said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"version": "plain", "data_path": "pretrain"},
            "--eval_generate 2: a captioner.s template",
        ),
        ({"data_path": "long"}, "--eval_generate 2: no held-out record of at most .* begins with a question"),
        ({"eval_generate": -1}, "--eval_generate: expected a number of at least 0, found -1"),
        ({"eval_data_path": None}, "--eval_generate needs held-out records"),
        ({"metric_for_best_model": "acuracy"}, "acuracy is not measured; expected one of loss, .*accuracy"),
    ],
)
def test_what_cannot_be_asked_is_refused(tiny, tmp_path, options, message):
    path = tiny / "data" / f"{options.pop('data_path', 'finetune')}.json"
    if path.stem == "long":
        path = tmp_path / "long.json"
        path.write_text(json.dumps([record("one two three four five six", "Is it?") | {"image": None}]))
    values = {"eval_data_path": path, "eval_strategy": "epoch", "eval_generate": 2} | options
    if values["eval_data_path"] is None:
        values.pop("eval_strategy")
    data = {"data_path": tiny / "data/pretrain.json"} if options.get("version") == "plain" else {}
    with pytest.raises(ValueError, match=message):
        train_module.train(flags(tiny, tmp_path / "run", 2, **data, **values))
