"""Samples from pictures, records and Parquet tables, and the messages about data that cannot be used."""

import io
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from analysis_commands import arguments
from PIL import Image

from llava.analysis import output
from llava.analysis.samples import choose


@pytest.fixture
def data(tiny):
    return str(tiny / "data/finetune.json")  # 24 records, every third without a picture


def chosen(*flags):
    return choose(arguments("layer-norms", *flags))


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


def test_pictures_of_records_may_be_in_a_zip_file(tmp_path, capsys):
    path = records(tmp_path, "images/red.png", "images/none.png")
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("images/red.png", png("red"))
    samples = chosen("--data", path, "--image-folder", tmp_path / "images.zip")
    (sample,) = samples[:]
    assert sample.image.getpixel((0, 0)) == (255, 0, 0) and sample.prompt == "See?"
    message = capsys.readouterr().err
    assert "record 1 (id 'x')" in message and "a member of the zip file is 'images/red.png'" in message


def test_a_mixture_takes_each_data_sets_pictures_from_its_own_folder(tmp_path):
    records(tmp_path / "a", "0.png")
    (tmp_path / "a/0.png").write_bytes(png("red"))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "See?"}]}]
    rows = {"messages": [[*messages, {"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}]]}
    pq.write_table(pa.table(rows | {"image": [{"bytes": png("blue"), "path": None}]}), tmp_path / "b.parquet")
    entries = [{"json_path": "a/records.json", "image_folder": "a"}, {"json_path": "b.parquet"}]
    (tmp_path / "mix.yaml").write_text(json.dumps({"datasets": entries}))  # JSON is YAML
    samples = chosen("--data", tmp_path / "mix.yaml")[:]
    read = sorted((s.prompt, s.answer, s.image.getpixel((0, 0))) for s in samples)
    assert read == [("See?", "Yes", (0, 0, 255)), ("See?", "Yes", (255, 0, 0))]
    assert len(chosen("--data", tmp_path / "b.parquet")) == 1
    with pytest.raises(ValueError, match="^--data .*mix.yaml: entry 0 .c.: json_path .*c.json: no such file"):
        (tmp_path / "mix.yaml").write_text(json.dumps({"datasets": [{"json_path": "c.json"}]}))
        chosen("--data", tmp_path / "mix.yaml")


def test_malformed_records_are_refused_or_left_out_by_the_rule_of_training(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(png("red"))
    path = records(tmp_path, "a.png", "a.png")
    path.write_text(json.dumps([*json.loads(path.read_text()), {"image": "a.png"}, {"conversations": 7}]))
    with pytest.raises(ValueError, match="2 of 4 records are malformed .--on_bad_record skip leaves them out.:\n.*2"):
        chosen("--data", path)
    assert len(chosen("--data", path, "--on_bad_record", "skip")) == 2
    assert "left out: 2 malformed\n" in capsys.readouterr().err


def test_records_without_one_picture_are_counted(tmp_path, tiny, capsys):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(png("red"))
    args = arguments("layer-norms", "--data", records(tmp_path, "a.png", ["a.png", "a.png"], (), []))
    assert len(choose(args)) == 1 and args.left_out == "2 without a picture, 1 with several"
    assert "left out: 2 without a picture, 1 with several\n" in capsys.readouterr().err
    assert output.provenance(args)["left out"] == args.left_out
    with pytest.raises(ValueError, match="none of its 1 samples has exactly one picture \\(1 with several\\)"):
        chosen("--data", records(tmp_path, ["a.png", "a.png"]))


def test_a_row_without_exactly_one_picture_is_left_out_and_counted(tmp_path):
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
        (sample,) = choose(args)[:]
        assert (sample.prompt, sample.image.getpixel((0, 0))) == ("one?", (0, 0, 255))
        assert args.left_out == "2 without a picture, 1 with several"


def test_a_row_is_called_by_its_place_in_its_own_file(tmp_path, capsys):
    for name in ("a", "b"):
        bad = {"image": [png("red")] * 2 + [b"no picture"], "question": ["?"] * 3}
        pq.write_table(pa.table(bad), tmp_path / f"{name}.parquet", row_group_size=2)
    assert len(chosen("--data", tmp_path)[:]) == 4
    error = capsys.readouterr().err
    assert "2 that cannot be read" in error
    assert all(f"--data {tmp_path}/{name}.parquet, row 2: " in error for name in ("a", "b"))


def test_a_missing_pictures_message_says_where_a_relative_path_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    path = records(tmp_path, "a.png").relative_to(tmp_path)
    with pytest.raises(ValueError, match="image images/a.png does not exist .from .*; check --image-folder"):
        chosen("--data", path)[0]
    with pytest.raises(ValueError, match="--image-folder gone: no such folder or zip file .from "):
        chosen("--data", path, "--image-folder", "gone")
    pq.write_table(pa.table({"image": ["b.png"], "question": ["?"]}), "p.parquet")
    with pytest.raises(ValueError, match=f"p.parquet, row 0: .*b.png.*from {tmp_path}"):
        chosen("--data", "p.parquet")[0]
    with pytest.raises(ValueError, match=f"found none of that name .from {tmp_path}"):
        chosen("--data", "gone.parquet")


def test_unusable_data_is_refused_with_what_is_expected(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    pq.write_table(
        pa.table({"image": [{"bytes": b"no picture", "path": "x"}], "question": ["?"]}), tmp_path / "bad.parquet"
    )
    for path, message in (
        (tmp_path / "nothing", "expected a folder, .json, .jsonl, .parquet, .yaml"),
        (tmp_path / "cut.parquet", "cut.parquet: cannot be read as Parquet"),
        (tmp_path / "empty", "neither pictures nor Parquet"),
        (tmp_path / "text.parquet", "expected columns .* question and image or images; found text"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen("--data", path)
    with pytest.raises(ValueError, match="bad.parquet, row 0: image in row 0 of .* cannot be decoded"):
        chosen("--data", tmp_path / "bad.parquet")[0]
    pq.write_table(pa.table({"image": [png("red")]}), tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match="expected columns conversations, or question and .*; found image"):
        chosen("--data", tmp_path / "bare.parquet")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run python -m playground scenes"):
        chosen()
