"""What the benchmarks share, and that each of them runs on inputs of a few records."""

import argparse
import importlib
import json
import sys

import numpy as np
import pytest

from benchmarks import common, data_preflight, inputs, scaling, startup
from llava.data import lengths
from llava.data.records import load_records


def test_a_result_says_machine_versions_and_commit(tmp_path):
    path = common.write_result("speed", [{"arm": "a", "seconds": 1.5}], folder=tmp_path, flags={"quick": True})
    result = json.loads(path.read_text())
    assert result["rows"] == [{"arm": "a", "seconds": 1.5}] and result["flags"] == {"quick": True}
    assert set(result["environment"]) == {"machine", "threads", "versions", "commit"}
    assert result["environment"]["versions"]["torch"] and result["environment"]["machine"]["cores"] >= 1


def test_arms_take_turns_and_the_warmup_is_dropped():
    calls = []
    arms = {name: (lambda name=name: calls.append(name) or len(calls)) for name in "ab"}
    assert common.alternate(arms, repeats=2, warmup=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert calls == list("ababab")


def test_a_ratio_pairs_the_values_of_a_round():
    assert common.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_command_that_fails_is_shown_with_what_it_printed():
    assert common.run_json([sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"]) == {"a": 1}
    with pytest.raises(RuntimeError, match="boom"):
        common.run_json([sys.executable, "-c", "raise SystemExit('boom')"])


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_the_simulated_epoch_of_upstreams_sampler_has_every_sample_once_and_one_modality_per_full_batch():
    text = np.random.default_rng(0).integers(1, 500, 203) * np.random.default_rng(1).choice([1, 1, -1], 203)
    order = list(scaling.upstream_order(text, ranks=4, batch_size=2, accumulation=2))
    assert sorted(order) == list(range(203))
    full = (text > 0).sum() // 16 + (text < 0).sum() // 16
    assert all(len({text[i] > 0 for i in order[start : start + 16]}) == 1 for start in range(0, 16 * full, 16))


def test_the_simulated_chunks_fill_like_upstreams():
    """Longest first, each sample to the chunk with the fewest tokens that has room, done by hand."""
    lengths = np.array([1, 9, 5, 8, 3, 6])
    assert lengths[scaling.grouped(np.arange(6), lengths, chunks=3)].tolist() == [9, 1, 8, 3, 6, 5]


@pytest.mark.parametrize("micro", [1, 2])
def test_every_sample_of_a_step_is_dealt_once(micro):
    lengths = np.random.default_rng(0).integers(1, 900, 64)
    step = np.random.default_rng(1).permutation(64)[:32]
    for deal in (scaling.of_each_rank, scaling.dealt_by_position):
        dealt = deal(step, lengths, 8, micro)
        assert len(dealt) == 8 and sorted(np.concatenate(dealt)) == sorted(step)


def test_a_larger_window_makes_ranks_more_even(monkeypatch):
    some = scaling.lengths_779k(np.random.default_rng(0))[::13]
    monkeypatch.setitem(scaling.DISTRIBUTIONS, "779K", (lambda rng: some, 128))
    args = argparse.Namespace(windows=[1, 16], steps=100)
    even = {row["sampler"]: row["slowest_over_mean"] for row in scaling.simulated("779K", 64, args)}
    assert even["--length_group_window 16"] < 1.1 < even["--length_group_window 1"] < even["upstream, one micro-batch"]


def test_the_recipes_fill_their_micro_batches_and_keep_ranks_even(monkeypatch):
    monkeypatch.setattr(scaling, "RECIPE_RANKS", (8, 64))
    rows = [row for row in scaling.recipe_rows(steps=150) if row["rule"] == "after"]
    assert len(rows) == 4 and all(row["slowest_over_mean"] <= 1.05 for row in rows)
    assert all(row["fill"] >= 0.9 for row in rows if row["ranks"] == 8)
    assert all(
        row["micro_batches_per_step"] == 1 for row in rows if row["ranks"] == 64
    )  # two samples: fill has no room


def test_pairing_batches_by_length_leaves_more_kinds_of_records_in_them_than_sorting_would():
    one, paired = scaling.order_rows([1, 16])
    assert paired["kinds_of_records_in_a_batch"] > 0.85 * one["kinds_of_records_in_a_batch"]
    assert one["variance_of_lengths_between_batches"] < 0.01 < paired["variance_of_lengths_between_batches"] < 0.2


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_synthetic_records_are_repeatable_and_pass_every_check(tmp_path):
    inputs.write_json(tmp_path / "a.json", inputs.conversation_records(50, "a.jpg", text_only=0.3))
    table = load_records(str(tmp_path / "a.json"))
    assert list(table) == list(inputs.conversation_records(50, "a.jpg", text_only=0.3))
    assert 0 < sum("image" in record for record in table) < 50


@pytest.mark.parametrize("name", ["data_pipeline", "data_preflight", "startup", "scaling"])
def test_each_benchmark_explains_itself(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize("repeating", [0, 40])
def test_a_start_is_timed_and_leaves_a_cache(tmp_path, tokenizer, monkeypatch, repeating):
    monkeypatch.setattr(lengths, "_counted", lengths._counted)  # so that it is put back
    monkeypatch.setattr("llava.mm_utils.load_tokenizer", lambda *_, **__: tokenizer)
    inputs.write_photo(tmp_path / "photo.jpg", 64, 64)
    inputs.write_json(tmp_path / "a.json", inputs.conversation_records(160, "photo.jpg", text_only=0.3))
    result = startup.started(tmp_path / "a.json", "", workers=1, repeating=repeating)
    assert result["first_batch_s"] >= result["records_s"] + result["lengths_s"] - 0.02 and result["worker_mib"] > 0
    (counts,) = map(np.load, (tmp_path / ".llava_cache").glob("*.counts.npy"))
    assert len(counts) == 160 and (not repeating or (counts[repeating:] == counts[:-repeating]).all())


def test_preparing_and_preflighting_is_timed_with_the_memory_of_all_processes(tmp_path):
    rows = data_preflight.measured(tmp_path, records=60, rows=90, distinct=7)
    assert [(row["input"], row["cache"]) for row in rows[::2]] == [
        ("json and zip", "cold"), ("parquet", "cold"), ("parquet, index only", "cold")
    ]  # fmt: skip
    assert [row["records"] for row in rows] == [60] * 4 + [90] * 2
    assert all(row["peak_mib"] > 10 for row in rows) and rows[0]["records_per_s_headers"] > 0
    assert rows[0].keys() == rows[2].keys() and rows[1]["index_s"] < rows[0]["index_s"] + 0.1


def test_estimated_states_of_scale_equal_deepspeeds_where_everything_is_trained():
    scale = pytest.importorskip("benchmarks.scale")
    model = scale.build("llama-3.2-3b", 2)
    model.get_vision_tower().requires_grad_(True)  # DeepSpeed's estimator knows no frozen weight
    arguments = scale.arguments("zero2", 8)
    del arguments.hf_deepspeed_config.config["data_types"]  # nor gradients in more than 16 bits
    estimate = scale.estimate_memory(model, arguments, 1024)
    states = (estimate.parameters + estimate.gradients + estimate.optimizer) / scale.GIB
    assert states == pytest.approx(scale.deepspeed_estimate(model, 2, 8, False), rel=1e-3)
