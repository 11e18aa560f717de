"""Samples from pictures, records and Parquet tables, and what is said of data that cannot be used."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from analysis_commands import arguments
from PIL import Image

from llava.analysis import inputs


@pytest.fixture
def data(tiny):
    return str(tiny / "data/finetune.json")  # 24 records, every third without a picture


def chosen(*flags):
    return inputs.choose(arguments("layer-norms", *flags))


def png(colour) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(stream, "PNG")
    return stream.getvalue()


def test_records_are_drawn_by_the_seed_and_have_one_picture(data):
    samples = chosen("--data", data, "--samples", 100)
    assert len(samples) == 16 and all(sample.image is not None for sample in samples)
    assert {sample.prompt for sample in samples} == {"Which colour?"} and samples[0].answer
    names = [s.name for s in chosen("--data", data, "--samples", 5)]
    assert names == [s.name for s in samples[:5]]
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
        found = chosen("--data", tmp_path / name)
        return sorted((s.prompt, s.answer, s.image.getpixel((0, 0))) for s in found)

    red, blue = (255, 0, 0), (0, 0, 255)
    assert read("star") == [("What?", "B", blue), ("Which?\nOptions: A: one", "A", red)]
    first = ("Look.\nWhich?\nOptions: A: one\nA. one\nB. two", "0", red)
    assert read("bench") == [first, ("What?\nA. cat", "1", blue)]
    assert read("next") == [("See?", "Yes", red)]
    both = chosen("--data", f"{tmp_path / 'star/data-00000.parquet'},{tmp_path / 'next'}")
    assert len(both) == 3 and {s.prompt for s in both} >= {"What?", "See?"}


def test_unusable_data_is_refused_with_what_is_expected(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    pq.write_table(
        pa.table({"image": [{"bytes": b"no picture", "path": "x"}], "question": ["?"]}), tmp_path / "bad.parquet"
    )
    for path, message in (
        (tmp_path / "nothing", "expected a folder, .json, .jsonl or .parquet"),
        (tmp_path / "empty", "neither pictures nor Parquet"),
        (tmp_path / "text.parquet", "without a column image or images; it has text"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen("--data", path)
    with pytest.raises(ValueError, match="bad.parquet, row 0: the picture cannot be read"):
        chosen("--data", tmp_path / "bad.parquet")[0]
    with pytest.raises(ValueError, match="none of 1 pictures can be read, the last because of .*bad.parquet, row 0"):
        chosen("--data", tmp_path / "bad.parquet")[:]
    with pytest.raises(ValueError, match="expected a column conversations or question, found image"):
        inputs.row_sample({"image": {"bytes": png("red")}}, "x, row 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run python -m playground scenes"):
        chosen()
