"""Answers of two words by a model that was trained in full and then by LoRA, one at a time and in padded batches.

This is what a new release of a library must pass before it is taken in (CONTRIBUTING.md).
"""

import json

import pytest
from data_files import COLOURS, turns
from pairwise import pairwise
from PIL import Image
from training import LORA, flags

from llava.asking import Asked, batch_answers, load_assistant
from llava.train.train import train

pytestmark = pytest.mark.slow

# Only the second word needs the picture, so a model that loses the prompt after its first token is wrong.
ANSWERS = {"red": "some tea", "yellow": "some day", "blue": "some tea", "green": "some day"}
QUESTIONS = ("What?", "What is it?", "Say in two words what it is.")  # of different length, so that batches are padded


def write_records(folder, answers):
    """Twelve records in `folder`, and their pictures."""
    folder.mkdir()
    records = []
    for colour, answer in answers.items():
        Image.new("RGB", (20, 16), COLOURS[colour]).save(folder / f"{colour}.png")
        for question in QUESTIONS:
            record = {"id": f"{colour} {question}", "image": f"{colour}.png"}
            records.append(record | {"conversations": turns(f"<image>\n{question}", answer)})
    (folder / "data.json").write_text(json.dumps(records))
    return records


def trained_on(tiny, folder, **options):
    """Trains on the records of a folder until the model knows them; returns the run's folder."""
    options |= {"version": "qwen_1_5", "data_path": folder / "data.json", "image_folder": folder, "max_steps": 60}
    options |= {"per_device_train_batch_size": 12, "lr_scheduler_type": "constant", "telemetry_steps": 100}
    train(flags(tiny, folder / "run", 2, **options))
    return folder / "run"


@pytest.fixture(scope="module")
def full(tiny, tmp_path_factory):
    """(folder, records, None) of a model that was trained in full."""
    folder = tmp_path_factory.mktemp("answers") / "full"
    records = write_records(folder, ANSWERS)
    return trained_on(tiny, folder, learning_rate=1e-2), records, None


@pytest.fixture(scope="module")
def lora(tiny, full, tmp_path_factory):
    """(folder, records, base) of adapters that teach the model the other pictures' answers."""
    folder = tmp_path_factory.mktemp("answers") / "lora"
    records = write_records(folder, dict(zip(ANSWERS, reversed(ANSWERS.values()), strict=True)))
    options = LORA | {"model_name_or_path": full[0], "vision_tower": None, "lora_r": 16, "lora_alpha": 32}
    return trained_on(tiny, folder, learning_rate=1e-2, **options), records, str(full[0])


@pytest.mark.parametrize(("run", "batch_size", "use_cache"), pairwise(("full", "lora"), (1, 12), (True, False)))
def test_both_words_of_every_answer_are_right(request, run, batch_size, use_cache):
    folder, records, base = request.getfixturevalue(run)
    assistant = load_assistant(str(folder), base, device="cpu")
    asked = [Asked(record["conversations"][:1], [record["image"]]) for record in records]
    options = {"do_sample": False, "max_new_tokens": 12, "use_cache": use_cache}
    said = {}
    for batch in batch_answers(assistant, asked, lambda name: Image.open(folder.parent / name), batch_size, **options):
        said |= batch
    assert [said[i] for i in range(12)] == [record["conversations"][1]["value"] for record in records]
