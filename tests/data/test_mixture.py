"""Mixtures of data sets as LLaVA-NeXT's YAML files say them, with shares of an epoch."""

import json
import math
import zipfile
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml
from data_files import BYTES, TURNS
from training import losses, run, same, stopped

from llava.conversation import get_template
from llava.data import preflight as command
from llava.data.errors import DataError
from llava.data.images import ImageStore
from llava.data.mixture import Entry, _strategy
from llava.data.preflight import Rules, preflight, usable_records
from llava.data.records import load_records, source_lines
from llava.train.arguments import DataArguments
from llava.train.checks import checked_eval_records

RULES = Rules(get_template("chatml"), "assistant")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with `cats.jsonl` (20 records), `dogs.jsonl` (50) and eight pictures in `images`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for number, content in enumerate(BYTES):
        (tmp_path / f"images/{number}.png").write_bytes(content)
    for name, count in (("cats", 20), ("dogs", 50)):
        lines = [{"id": f"{name}-{i}", "image": f"{i % 8}.png", "conversations": TURNS} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def mixture(place, *entries, name="mix.yaml", **more) -> str:
    path = place / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"datasets": list(entries)} | more))
    return str(path)


def ids(table) -> list[str]:
    return [record["id"] for record in table]


# --- which records ----------------------------------------------------------------------------------------------------

CATS, DOGS = {"json_path": "cats.jsonl"}, {"json_path": "dogs.jsonl"}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("all", range(20)), ("first:11%", range(3)), ("end:4", range(16, 20)), ("end:1000", range(20))],
)  # fmt: skip
def test_sampling_takes_what_llava_next_takes(place, strategy, expected):
    table = load_records(mixture(place, CATS | {"sampling_strategy": strategy}, DOGS))
    assert ids(table) == [f"cats-{i}" for i in expected] + [f"dogs-{i}" for i in range(50)]


def test_a_percentage_is_of_the_number_as_it_is_written():
    for percentage, total, expected in (("1.1", 3_000, 33), ("10.63", 40_000_000, 4_252_000)):
        entry = Entry("cats.jsonl", "cats", _strategy(f"first:{percentage}%"), None, None)
        assert len(entry.chosen(total, [])) == expected


def test_random_sampling_follows_the_seed_and_keeps_the_files_order(place):
    path = mixture(place, CATS | {"sampling_strategy": "random:25%"}, DOGS | {"sampling_strategy": "random:7"})
    tables = [load_records(path, seed=seed) for seed in (1, 1, 2)]
    assert ids(tables[0]) == ids(tables[1]) != ids(tables[2]) and tables[0].key == tables[1].key != tables[2].key
    found = tables[0].selected.tolist()
    assert found == sorted(set(found)) and [sum(i < 20 for i in found), len(found)] == [5, 12]


@pytest.mark.parametrize("epoch_samples", [None, 64, 100_003])
def test_weights_are_shares_of_an_epoch_within_a_hundredth(place, epoch_samples):
    more = {} if epoch_samples is None else {"epoch_samples": epoch_samples}
    path = mixture(place, CATS | {"weight": 0.9}, DOGS | {"weight": 2.1, "sampling_strategy": "first:30"}, **more)
    table = load_records(path)
    total = epoch_samples or 50
    samples = [found["samples"] for found in table.source_counts()]
    assert samples == [round(0.3 * total), round(0.7 * total)] and len(table) == total
    assert (table.selected < 20).sum() == samples[0]
    repeated = Counter(table.selected.tolist())
    for number, (count, size, start) in enumerate(zip(samples, (20, 30), (0, 20), strict=True)):
        times = {repeated[i] for i in range(start, start + size)}
        assert times <= {count // size, math.ceil(count / size)}, number  # whole passes, and a part of one
    assert table.selected[table.selected >= 20].max() < 50  # what the sampling left out stays out
    assert (
        load_records(path).selected.tolist() == table.selected.tolist() != load_records(path, seed=1).selected.tolist()
    )


def test_an_epoch_has_exactly_its_samples_and_no_share_is_one_off(place):
    for weights, total in (((1, 1, 1), 101), ((0.1, 0.2, 0.7), 1_000_003), ((1, 1, 1), 1_000_003)):
        entries = [CATS | {"name": str(i), "weight": weight} for i, weight in enumerate(weights)]
        table = load_records(mixture(place, *entries, epoch_samples=total))
        samples = [found["samples"] for found in table.source_counts()]
        assert sum(samples) == len(table) == total
        assert all(abs(n - w / sum(weights) * total) < 1 for n, w in zip(samples, weights, strict=True))
    assert samples == [333335, 333334, 333334]  # of equal remainders the first


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_data_set_may_have_its_own_folder_or_zip_file(place):
    with zipfile.ZipFile(place / "dogs.zip", "w") as archive:
        for number, content in enumerate(reversed(BYTES)):
            archive.writestr(f"{number}.png", content)
    path = mixture(place, CATS, DOGS | {"image_folder": "dogs.zip"})
    table = load_records(path)
    store = ImageStore("images", others=table.image_folders)
    found, _ = preflight(load_records(path, check=False), store, RULES, show_progress=False)
    assert not found.faults and found.counts["images"] == 70
    cat, dog = (store.open(table[i]["image"] if i == 0 else table[i]["image"][0]) for i in (0, 20))
    plain = ImageStore("images")
    assert cat.tobytes() == plain.open("0.png").tobytes() and dog.tobytes() == plain.open("7.png").tobytes()


# --- the preflight ----------------------------------------------------------------------------------------------------


def test_only_sampled_records_are_checked_and_faults_leave_the_shares(place, capsys):
    lines = (place / "cats.jsonl").read_text().splitlines()
    lines[0], lines[19] = '{"id": "bad", "conversations": []}', "{"
    (place / "cats.jsonl").write_text("\n".join(lines))
    path = mixture(place, CATS | {"sampling_strategy": "end:19", "weight": 1}, DOGS | {"weight": 3}, epoch_samples=200)
    with pytest.raises(ValueError, match=r"1 of 69 records are malformed:\n  cats.jsonl: record 19: line 20, column 2"):
        load_records(path)
    assert command.main(["--data_path", path, "--image_folder", "images", "--version", "chatml"]) == 1
    shown = capsys.readouterr().out
    assert "sources\n  cats: 18 of 20 records, 50 samples of an epoch (25.0%)\n  dogs: 50 of 50 records, 150 s" in shown
    table = load_records(path, check=False)
    found, _ = preflight(table, ImageStore("images"), RULES, show_progress=False)
    kept = usable_records(table, found, "skip", "")
    assert (len(kept), kept.left_out) == (200, 1) and not {0, 19} & set(kept.selected.tolist())
    assert source_lines(kept)[0].startswith("cats: 18 of 20 records, 50 samples")


@pytest.mark.parametrize(("trained", "shared"), [("first:50%", ""), ("first:80%", "6 of 10")])
def test_held_out_records_that_are_trained_on_are_counted_record_by_record(place, caplog, trained, shared):
    training = SimpleNamespace(process_index=0, seed=1, data_seed=None)
    data = DataArguments(image_folder="images", eval_data_path=mixture(place, CATS | {"sampling_strategy": "end:50%"}))
    records = load_records(mixture(place, DOGS, CATS | {"sampling_strategy": trained}, name="train.yaml"))
    checked_eval_records("chatml", data, training, records)
    assert ("also training records" in caplog.text) == bool(shared)
    assert not shared or f"{shared} records are also training records (6 of {place}/cats.jsonl)" in caplog.text


# --- faults -----------------------------------------------------------------------------------------------------------

ENTRIES = {
    "missing": ([CATS, {"json_path": "c.json"}], r"entry 1 \(c\): json_path c.json: no such file \(from "),
    "key": ([CATS | {"repeat_time": 2}], r"entry 0 \(cats.jsonl\): unknown key 'repeat_time'; expected json_path, sam"),
    "some weights": ([CATS | {"weight": 1}, DOGS], r"entry 1 .dogs.jsonl.: some entries have a .weight., and others"),
    "share": ([CATS | {"weight": 1}, DOGS | {"weight": 1e-9}], r"entry 1 \(dogs\): has no sample of an epoch of 70"),
}


@pytest.mark.parametrize("fault", ENTRIES)
def test_a_fault_of_an_entry_names_file_and_entry(place, fault):
    entries, message = ENTRIES[fault]
    mixture(place, *entries)
    with pytest.raises(DataError, match=f"^mix.yaml: .*{message}"):
        load_records("mix.yaml")


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_epoch_has_the_shares_and_a_resumed_run_the_same_samples(tiny, place, caplog):
    scenes = {"json_path": str(tiny / "data/finetune.json"), "image_folder": str(tiny / "data/images"), "weight": 0.3}
    path = mixture(
        place, scenes | {"name": "scenes"}, CATS | {"image_folder": "images", "weight": 0.7}, epoch_samples=40
    )
    options = {"data_path": path, "max_steps": None, "num_train_epochs": 1, "per_device_train_batch_size": 4}
    options |= {"save_strategy": "steps", "save_steps": 4, "seed": 7, "telemetry_steps": 0}
    with caplog.at_level("INFO"):
        whole, _ = run(tiny, place / "whole", 2, **options)
    assert "scenes: 12 of 24 records, 12 samples of an epoch (30.0%)" in caplog.text
    assert len(losses(place / "whole")) == 10

    stopped(place / "whole", 4, place / "resumed")
    resumed, _ = run(tiny, place / "resumed", 2, **options)
    assert same(whole, resumed) and losses(place / "resumed") == losses(place / "whole")
