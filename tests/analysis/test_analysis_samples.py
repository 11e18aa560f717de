"""Samples from pictures, records and Parquet tables, and the messages about data that cannot be used."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from analysis_commands import arguments
from data_files import encoded
from PIL import Image

from llava.analysis import output
from llava.analysis.samples import choose


@pytest.fixture
def data(tiny):
    return str(tiny / "data/finetune.json")  # 24 records, every third without a picture


def chosen(*flags):
    return choose(arguments("layer-norms", *flags))


def png(colour) -> bytes:
    return encoded(Image.new("RGB", (4, 3), colour))


def test_records_are_drawn_by_the_seed_and_have_one_picture(data):
    samples = chosen("--data", data, "--samples", 100)
    assert len(samples) == 16 and all(sample.image is not None for sample in samples)
    assert {sample.prompt for sample in samples} == {"Which colour?"} and samples[0].answer
    names = [s.name for s in chosen("--data", data, "--samples", 5)]
    assert names == [s.name for s in samples][:5]
    assert names != [s.name for s in chosen("--data", data, "--samples", 5, "--seed", 1)]


def test_a_folder_of_pictures_takes_the_prompt(tiny):
    samples = chosen("--data", tiny / "data/images", "--samples", 3, "--prompt", "Say it.")
    assert [sample.prompt for sample in samples] == ["Say it."] * 3
    assert samples[0].image.mode == "RGB" and samples[0].answer is None


def test_benchmarks_and_llava_nexts_parquet(tmp_path):
    images = [
        {"bytes": png(colour), "path": None if colour == "red" else f"{colour}.png"} for colour in ("red", "blue")
    ]
    star = {"question": ["Which?\nOptions: A: one", "What?"], "image": images, "answer": ["A", "B"]}
    bench = star | {"hint": ["Look.", None], "A": ["one", "cat"], "B": ["two", None], "answer": [0, 1]}
    turns = [{"from": "human", "value": "<image>\nSee?"}, {"from": "gpt", "value": "Yes"}]
    following = {"id": ["a", "b"], "image": [images[0], None], "conversations": [turns, turns[1:]]}
    for name, table in (("star", star), ("bench", bench), ("next", following)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(table), tmp_path / name / "data-00000.parquet", row_group_size=1)

    def read(name):
        samples = chosen("--data", tmp_path / name)
        return sorted((s.prompt, s.answer, s.image.getpixel((0, 0))) for s in samples)

    red, blue = (255, 0, 0), (0, 0, 255)
    assert read("star") == [("What?", "B", blue), ("Which?\nOptions: A: one", "A", red)]
    first = ("Look.\nWhich?\nOptions: A: one\nA. one\nB. two", "0", red)
    assert read("bench") == [first, ("What?\nA. cat", "1", blue)]
    assert read("next") == [("See?", "Yes", red)]
    both = chosen("--data", f"{tmp_path / 'star/data-00000.parquet'},{tmp_path / 'next'}")
    assert len(both) == 3 and {s.prompt for s in both} >= {"What?", "See?"}


def records(folder, *images):
    """Records about these pictures, each a name, a list of names or nothing; returns their file."""
    folder.mkdir(exist_ok=True)
    elements = []
    for image in images:
        names = [image] if isinstance(image, str) else image
        turns = [{"from": "human", "value": "<image>" * len(names) + "\nSee?"}, {"from": "gpt", "value": "Yes"}]
        elements.append({"id": "x", "conversations": turns} | ({"image": image} if image != () else {}))
    (folder / "records.json").write_text(json.dumps(elements))
    return folder / "records.json"


def test_samples_are_known_by_their_pictures_and_not_by_their_folder(tmp_path):
    def content(name: str, colour: str) -> list[str]:
        """Of records, of a folder of pictures, and of a benchmark's table."""
        place = tmp_path / name
        (place / "images").mkdir(parents=True, exist_ok=True)
        (place / "images/a.png").write_bytes(png(colour))
        pq.write_table(pa.table({"question": ["What?"], "image": [png(colour)]}), place / "test.parquet")
        path = records(place, "a.png")
        chosen_from = (path, place / "images", place / "test.parquet")
        return [chosen("--data", data).content() for data in chosen_from]

    first, moved, grey = content("one", "red"), content("two", "red"), content("one", "grey")
    assert first == moved and all(a != b for a, b in zip(first, grey, strict=True))


def test_malformed_records_are_named_and_left_out(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(png("red"))
    path = records(tmp_path, "a.png", "a.png")
    path.write_text(json.dumps([*json.loads(path.read_text()), {"image": "a.png"}, {"conversations": 7}]))
    assert len(chosen("--data", path)) == 2
    message = capsys.readouterr().err
    assert "left out: 2 malformed\n" in message
    assert f"--data {path}: record 2: " in message and f"--data {path}: record 3: " in message


def test_a_row_without_exactly_one_picture_is_left_out_and_counted(tmp_path, capsys):
    red, blue = ({"bytes": png(colour), "path": None} for colour in ("red", "blue"))
    images = [[red, blue], [], None, [blue]]
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    bench = {"question": ["two?", "none?", "null?", "one?"]}
    turns = [
        [{"from": "human", "value": "<image>" * n + "\none?"}, {"from": "gpt", "value": "1"}] for n in (2, 0, 0, 1)
    ]
    for name, columns in (("bench", bench), ("llava", {"conversations": turns})):
        table = pa.table(columns | {"images": pa.array(images, kind)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
        args = arguments("layer-norms", "--data", tmp_path / f"{name}.parquet")
        (sample,) = choose(args)
        assert (sample.prompt, sample.image.getpixel((0, 0))) == ("one?", (0, 0, 255))
        assert args.left_out == output.provenance(args)["left out"] == "2 without a picture, 1 with several"
        assert "left out: 2 without a picture, 1 with several\n" in capsys.readouterr().err


def test_unusable_data_is_refused_with_what_is_expected(tmp_path, monkeypatch):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    pq.write_table(pa.table({"image": [b"no picture"], "question": ["?"]}), tmp_path / "bad.parquet")
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("cut.parquet", "cut.parquet: cannot be read as Parquet"),
        ("text.parquet", "expected columns .* question and image or images; found text"),
        ("bad.parquet", "bad.parquet, record 0 .*row 0'.*: image in row 0 of .* cannot be decoded"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen("--data", name)
    with pytest.raises(ValueError, match="run python -m playground scenes"):
        chosen()
