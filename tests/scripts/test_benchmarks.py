"""What the benchmarks share, and that each of them runs on inputs of a few records."""

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import (
    common,
    data_pipeline,
    data_preflight,
    inputs,
    run_all,
    scaling,
    shapes,
    startup,
    vs_peers,
    vs_upstream,
)
from benchmarks.peers import profiled, recording
from benchmarks.upstream import data_arm
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data import lengths
from llava.data.preprocess import preprocess
from llava.data.records import load_records
from llava.mm_utils import load_tokenizer


def test_a_result_says_machine_versions_and_commit(tmp_path):
    path = common.write_result("speed", [{"arm": "a", "seconds": 1.5}], folder=tmp_path, flags={"quick": True})
    result = json.loads(path.read_text())
    assert result["rows"] == [{"arm": "a", "seconds": 1.5}] and result["flags"] == {"quick": True}
    assert set(result["environment"]) == {"machine", "threads", "versions", "commit"}
    assert result["environment"]["versions"]["torch"] and result["environment"]["machine"]["cores"] >= 1


def test_quick_runs_never_replace_the_figures_of_the_page():
    parser = argparse.ArgumentParser()
    common.add_result_flags(parser, quick="one run")
    folders = [common.result_folder(parser.parse_args(words)) for words in ([], ["--quick"])]
    assert folders == [common.RESULTS, common.QUICK_RESULTS]
    assert common.result_folder(parser.parse_args(["--quick", "--output-dir", "here"])) == Path("here")


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


def test_only_what_a_benchmark_left_is_removed(tmp_path):
    made = common.emptied(tmp_path / "new/work")
    (made / "model").touch()
    assert [path.name for path in common.emptied(made).iterdir()] == [".made-by-a-benchmark"]
    (tmp_path / "photo").touch()
    for folder in (tmp_path, tmp_path / "photo"):
        with pytest.raises(SystemExit, match=f"{folder} holds what no benchmark wrote"):
            common.emptied(folder)
    assert (tmp_path / "photo").is_file() and made.is_dir()


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_upstreams_simulated_epoch_has_each_sample_once_by_modality():
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
def test_every_sample_of_a_step_is_assigned_once(micro):
    lengths = np.random.default_rng(0).integers(1, 900, 64)
    step = np.random.default_rng(1).permutation(64)[:32]
    for assign in (scaling.of_each_rank, scaling.assigned_by_position):
        assigned = assign(step, lengths, 8, micro)
        assert len(assigned) == 8 and sorted(np.concatenate(assigned)) == sorted(step)


def test_a_larger_window_makes_ranks_more_even(monkeypatch):
    some = scaling.lengths_779k(np.random.default_rng(0))[::13]
    monkeypatch.setitem(scaling.DISTRIBUTIONS, "779K", (lambda rng: some, 128))
    args = argparse.Namespace(windows=[1, 16], steps=100)
    even = {row["sampler"]: row["slowest_over_mean"] for row in scaling.simulated("779K", 64, args)}
    assert even["--length_group_window 16"] < 1.1 < even["--length_group_window 1"] < even["upstream, one micro-batch"]


@pytest.mark.slow
def test_the_recipes_fill_their_micro_batches_and_keep_ranks_even(monkeypatch):
    monkeypatch.setattr(scaling, "RECIPE_RANKS", (8, 64))
    rows = [row for row in scaling.recipe_rows(steps=150) if row["rule"] == "after"]
    assert len(rows) == 4 and all(row["slowest_over_mean"] <= 1.05 for row in rows)
    assert all(row["fill"] >= 0.9 for row in rows if row["ranks"] == 8)
    assert all(
        row["micro_batches_per_step"] == 1 for row in rows if row["ranks"] == 64
    )  # two samples: fill has no room


def test_pairing_batches_by_length_mixes_more_kinds_than_sorting():
    sorted_alone, paired = scaling.order_rows([1, 16])
    assert paired["kinds_of_records_in_a_batch"] > 0.85 * sorted_alone["kinds_of_records_in_a_batch"]
    assert (
        sorted_alone["variance_of_lengths_between_batches"] < 0.01 < paired["variance_of_lengths_between_batches"] < 0.2
    )


def test_every_kind_of_work_of_the_data_benchmark_runs(tiny, tmp_path):
    inputs.write_photo(tmp_path / "photo.jpg")
    for name, image in (("text.json", None), ("image.json", "photo.jpg")):
        inputs.write_json(tmp_path / name, inputs.conversation_records(2, image))
    functions = data_arm.this_tree(tmp_path, str(tiny / "qwen"))
    assert set(functions) == set(data_pipeline.KINDS)
    assert all(data_arm.rate(function, count=2, seconds=0) > 0 for function in functions.values())


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_peers_are_given_our_model_with_the_template_that_marks_targets(tiny, tmp_path, stage):
    ours = tiny_models.make(tiny, tower="clip", norm="none")
    vs_peers.write_hf_model(ours, tiny / "clip", tiny / "llama", stage, tmp_path / "hf")
    _, loading = LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values())
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    assert processor.chat_template == vs_peers.CHAT_TEMPLATES[stage]
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("stage", "shown"), [("pretrain", True), ("finetune", True), ("finetune", False)])
def test_the_peers_chat_template_writes_and_marks_what_our_template_does(stage, shown):
    question = ("<image>" if shown else "") + ("" if stage == "pretrain" else ("\n" if shown else "") + "the cat on")
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "a dog near the house"}]
    tokenizer = load_tokenizer(str(shapes.TOKENIZER))
    ours = preprocess(turns, tokenizer, vs_peers.TEMPLATES[stage], has_image=shown)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    contents = [{"type": "image"}] * shown + [{"type": "text", "text": question.replace("<image>", "").lstrip("\n")}]
    messages = [{"role": "user", "content": contents}, {"role": "assistant", "content": turns[1]["value"]}]
    theirs = tokenizer.apply_chat_template(
        messages, chat_template=vs_peers.CHAT_TEMPLATES[stage], return_dict=True, return_assistant_tokens_mask=True
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert [IMAGE_TOKEN_INDEX if i == image else i for i in theirs["input_ids"]] == ours.input_ids.tolist()
    assert theirs["assistant_masks"] == (ours.labels != IGNORE_INDEX).int().tolist()


def test_grouped_batches_have_every_sample_once_and_less_padding():
    tokens = np.random.default_rng(0).integers(8, 700, 160).tolist()
    order = vs_peers.grouped(tokens, 16)
    assert sorted(order) == list(range(160))

    def padded(order):
        return sum(16 * max(tokens[i] for i in order[start : start + 16]) for start in range(0, 160, 16))

    assert padded(order) < 0.7 * padded(list(range(160)))


def test_steps_of_batch_rebalance_have_the_samples_of_the_order_given():
    lengths = [record["length"] for record in recording.laid_out([{"length": n, "step": n // 16} for n in range(64)])]
    batches = iter(BatchRebalanceSampler(lengths, effective_batch_size=16, dp_size=1, grad_accum=4))
    steps = [[lengths[i] for _ in range(4) for i in next(batches)] for _ in range(4)]
    assert [sorted(step) for step in steps] == [list(range(start, start + 16)) for start in range(0, 64, 16)]


def test_a_steps_loss_is_the_mean_over_its_targets_in_every_trainer():
    by_targets = [(3.0 * 2 / 8, 2, True), (1.0 * 6 / 8, 6, True)]  # means of 3 and 1 over 2 and 6 targets
    by_micro_batches = [(3.0 / 2, 2, False), (1.0 / 2, 6, False)]
    assert recording.step_loss(by_targets) == recording.step_loss(by_micro_batches) == 1.5


def peers_run(rate, first_loss, later=6.0):
    return {"losses": [first_loss, later], "rate": rate, "tokens_rate": 100 * rate, "peak_mib": 500.0}


def test_a_row_has_no_speed_where_the_first_losses_differ():
    peer, setting, ours = vs_peers.Peer("trl"), vs_peers.Setting("2 x 8", 2), [peers_run(12.0, 7.0)]
    line = vs_peers.row("finetune", peer, setting, [peers_run(4.0, 7.00001, later=6.1)], ours, None, False)
    assert line["ratio"] == 3 and line["samples_per_second"] == 4 and not line["note"]
    line = vs_peers.row("finetune", peer, setting, [peers_run(4.0, 7.01)], ours, None, False)
    assert line["ratio"] is None and line["samples_per_second"] is None and "losses of the first step" in line["note"]
    assert vs_peers.row("finetune", peer, setting, [peers_run(4.0, 7.01)], ours, None, True)["ratio"] == 3


def test_a_run_of_fewer_samples_than_its_steps_take_has_no_speed(tmp_path):
    args, setting = argparse.Namespace(steps=2, warmup_steps=1), vs_peers.Setting("2 x 8", 2)
    (tmp_path / "finetune").mkdir()
    (tmp_path / "result.json").write_text(json.dumps({"losses": [7.0, 6.0], "ends": [5.0, 13.0], "versions": {}}))
    records = tmp_path / "finetune" / f"{setting.order}.jsonl"
    records.write_text('{"length": 100}\n' * 32)
    run = vs_peers.read_run(args, tmp_path, "finetune", setting, tmp_path)
    assert (run["rate"], run["tokens_rate"]) == (2.0, 200.0)
    records.write_text('{"length": 100}\n' * 16)
    with pytest.raises(RuntimeError, match="expected 16 samples for each of 2 steps, found 16"):
        vs_peers.read_run(args, tmp_path, "finetune", setting, tmp_path)


def test_a_peer_that_fails_is_a_row_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "train_trl.py").write_text("raise SystemExit('no such attention')")
    monkeypatch.setattr(vs_peers, "PEERS_FOLDER", tmp_path)
    monkeypatch.setattr(vs_peers.Peer, "python", sys.executable)
    args, peer = argparse.Namespace(steps=2, threads=1), vs_peers.Peer("trl")
    setting = vs_peers.Setting("2 x 8", 2)
    with pytest.raises(RuntimeError, match="^ended with 1: no such attention$") as failure:
        vs_peers.measure(args, tmp_path, "finetune", peer, setting)
    line = vs_peers.row("finetune", peer, setting, [], [peers_run(12.0, 7.0)], str(failure.value), False)
    assert "no such attention" in line["note"] and line["ratio"] is None


def test_an_environment_that_cannot_be_made_is_not_taken_for_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERS_VENV", str(tmp_path))
    monkeypatch.setattr(vs_peers.subprocess, "run", lambda command, check: argparse.Namespace(returncode=1))
    for _ in range(2):
        with pytest.raises(
            SystemExit, match=r"error: trl: .*could not be made.*--peers llamafactory lmms-engine ms-swift"
        ):
            vs_peers.ensure_environment(vs_peers.PEERS[0])


@pytest.mark.parametrize("benchmark", [vs_peers, vs_upstream])
def test_steps_that_are_all_left_out_of_the_time_are_refused(monkeypatch, capsys, benchmark):
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--size", "tiny", "--steps", "3"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "--steps 3: expected more than --warmup-steps (3)" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [vs_peers, vs_upstream])
def test_a_size_gives_the_flags_that_the_command_line_leaves_open(monkeypatch, benchmark):
    def chosen(*words):
        monkeypatch.setattr(sys, "argv", [benchmark.__name__, *words])
        args = benchmark.parse_arguments()
        return args.size, args.hidden, args.kv_heads, args.image_size, args.steps, args.repeats

    assert chosen() == ("demo", 576, 3, 64, 5, 5)
    assert chosen("--steps", "9", "--repeats", "1") == ("demo", 576, 3, 64, 9, 1)
    assert chosen("--quick")[:4] == ("tiny", 256, 4, 56)
    assert chosen("--size", "demo", "--quick")[:2] == ("demo", 576)


def test_the_demos_records_have_scenes_and_the_lengths_of_its_data(tmp_path):
    sizes = argparse.Namespace(**vs_upstream.SIZES["demo"], size="demo", batch=4)
    vs_upstream.make_data(sizes, tmp_path, "pretrain")
    records = json.loads((tmp_path / "pretrain.json").read_text())
    words = [len(record["conversations"][1]["value"].split()) for record in records]
    picture = Image.open(tmp_path / "images" / records[0]["image"])
    assert len(records) == 60 and picture.size == (64, 64) and max(words) <= 60
    llama = load_tokenizer(str(vs_upstream.TOKENIZER))
    texts = [record["conversations"][1]["value"] for record in records]
    assert min(len(llama(text, add_special_tokens=False).input_ids) for text in texts) >= 10


def test_only_a_setting_that_says_so_gives_a_peer_what_this_tree_preloads(tmp_path, monkeypatch):
    preloaded = {"LD_PRELOAD": "libkeeps.so"}
    monkeypatch.setattr(vs_peers, "preloads", lambda environment: preloaded)
    monkeypatch.setattr(vs_peers, "read_run", lambda *_: {})
    monkeypatch.setattr(vs_peers, "peak_mib", lambda process: process.wait())
    environments = []
    start = subprocess.Popen

    def started(command, env, **options):
        environments.append(env.get("LD_PRELOAD"))
        return start(["true"], **options)

    monkeypatch.setattr(vs_peers.subprocess, "Popen", started)
    monkeypatch.setattr(vs_peers, "peer_job", lambda *_: ["python"])
    monkeypatch.setattr(vs_peers, "ours_job", lambda *_: ["python"])
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    peer, setting = vs_peers.Peer("trl"), vs_peers.Setting("2 x 8", 2)
    for who, how in ((None, setting), (peer, setting), (peer, vs_peers.in_our_environment(setting))):
        vs_peers.measure(argparse.Namespace(threads=1), tmp_path, "finetune", who, how)
    assert environments == ["libkeeps.so", None, "libkeeps.so"]


def event(name, seconds, parent=None):
    return SimpleNamespace(
        name=name, self_cpu_time_total=seconds * 1e6, cpu_time_total=seconds * 1e6, cpu_parent=parent
    )


def test_the_pieces_of_a_profiled_step_add_up_to_it():
    reading = event(profiled.READING, 3.0)
    inner = event("aten::stack", 0.5, reading)
    events = [
        reading,
        inner,
        event("aten::copy_", 1.0, inner),  # part of reading
        event("aten::addmm", 4.0),
        event("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 2.0),
        event("aten::_log_softmax", 0.25),
        event("aten::copy_", 0.5),
        event("aten::_fused_adamw_", 0.75),
        event("aten::silu", 1.5),
        event("Optimizer.step#AdamW.step", 9.0),  # a range; its own time is the host's
    ]
    seconds = profiled.seconds_by_piece(events, wall=20.0)
    assert seconds == {
        "attention": 2.0, "loss": 0.25, "matrix products": 4.0, "optimizer": 0.75, "copies and casts": 0.5,
        "elementwise": 1.5, "reading data": 3.0, "host": 8.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_is_profiled_from_the_end_of_its_first_steps(tmp_path, monkeypatch):
    words = ["--size", "tiny", "--quick", "--profile", "--peers", "lmms-engine", "--stages", "pretrain"]
    folders = ["--work", str(tmp_path / "work"), "--output-dir", str(tmp_path)]
    # No peer's environment is needed: this tree runs in a peer's place.
    monkeypatch.setattr(vs_peers, "ways_of", lambda *_: [(None, vs_peers.Setting("shuffled", 32))])
    monkeypatch.setattr(sys, "argv", ["vs_peers", *words, *folders, "--steps", "6"])
    assert vs_peers.main() == 0
    (row,) = json.loads((tmp_path / "vs_peers_tiny_profile_pretrain.json").read_text())["rows"]
    pieces = {name: value for name, value in row.items() if name.endswith("_s") and name != "step_s"}
    assert row["tool"] == "this tree" and len(pieces) == 8 and min(pieces.values()) >= 0
    assert sum(pieces.values()) == pytest.approx(row["step_s"])
    assert pieces["matrix_products_s"] > 0 and pieces["optimizer_s"] > 0


def test_every_peer_has_its_script_and_versions_or_says_why_not():
    for peer in vs_peers.PEERS:
        assert bool(peer.cannot) != bool(peer.settings)
        if not peer.cannot:
            assert peer.name in vs_peers.version_of(peer)
            assert all(len(peer.settings[stage]) >= 2 for stage in vs_peers.STAGES)


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_synthetic_records_are_repeatable_and_pass_every_check(tmp_path):
    inputs.write_json(tmp_path / "a.json", inputs.conversation_records(50, "a.jpg", text_only=0.3))
    table = load_records(str(tmp_path / "a.json"))
    assert list(table) == list(inputs.conversation_records(50, "a.jpg", text_only=0.3))
    assert 0 < sum("image" in record for record in table) < 50


@pytest.mark.parametrize("name", ["data_pipeline", "data_preflight", "startup", "scaling", "vs_peers"])
def test_each_benchmark_explains_itself(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--quick" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("repeating", [0, 40])
def test_a_start_is_timed_and_leaves_a_cache(tmp_path, tokenizer, monkeypatch, repeating):
    monkeypatch.setattr(lengths, "_counted", lengths._counted)  # `startup` replaces it; this puts it back
    monkeypatch.setattr("llava.mm_utils.load_tokenizer", lambda *_, **__: tokenizer)
    inputs.write_photo(tmp_path / "photo.jpg", 64, 64)
    inputs.write_json(tmp_path / "a.json", inputs.conversation_records(160, "photo.jpg", text_only=0.3))
    result = startup.started(tmp_path / "a.json", "", workers=1, repeating=repeating)
    assert result["first_batch_s"] >= result["records_s"] + result["lengths_s"] - 0.02 and result["worker_mib"] > 0
    (counts,) = map(np.load, (tmp_path / ".llava_cache").glob("*.counts.npy"))
    assert len(counts) == 160 and (not repeating or (counts[repeating:] == counts[:-repeating]).all())


@pytest.mark.slow
def test_preparation_and_preflight_are_timed_with_all_processes_memory(tmp_path):
    rows = data_preflight.measured(tmp_path, records=60, rows=90, distinct=7)
    assert [(row["input"], row["cache"]) for row in rows[::2]] == [
        ("json and zip", "cold"), ("parquet", "cold"), ("parquet, index only", "cold")
    ]  # fmt: skip
    assert [row["records"] for row in rows] == [60] * 4 + [90] * 2
    assert all(row["peak_mib"] > 10 for row in rows) and rows[0]["records_per_s_headers"] > 0
    assert rows[0].keys() == rows[2].keys() and rows[1]["index_s"] < rows[0]["index_s"] + 0.1


@pytest.mark.slow
def test_estimated_states_equal_deepspeeds_where_everything_is_trained():
    scale = pytest.importorskip("benchmarks.scale")
    model = scale.build("llama-3.2-3b", 2)
    model.get_vision_tower().requires_grad_(True)  # DeepSpeed's estimator knows no frozen weight
    arguments = scale.arguments("zero2", 8)
    del arguments.hf_deepspeed_config.config["data_types"]  # nor gradients in more than 16 bits
    estimate = scale.estimate_memory(model, arguments, 1024)
    states = (estimate.parameters + estimate.gradients + estimate.optimizer + estimate.step) / scale.GIB
    assert states == pytest.approx(scale.deepspeed_estimate(model, 2, 8, False), rel=1e-3)


@pytest.mark.slow
def test_the_page_on_scale_is_what_the_command_prints(capsys, monkeypatch):
    scale = pytest.importorskip("benchmarks.scale")
    monkeypatch.setattr(sys, "argv", ["scale"])
    scale.main()
    assert capsys.readouterr().out == (common.ROOT / "docs/scale.md").read_text()


@pytest.mark.slow
def test_tables_of_traffic_and_pieces_are_what_the_command_prints():
    scale = pytest.importorskip("benchmarks.scale")
    assert "\n\n".join(scale.piece_tables()) in (common.ROOT / "docs/performance.md").read_text()


@pytest.mark.slow
def test_a_recipes_zero_sends_the_fewest_bytes_of_those_that_fit():
    """On 8 GPUs of 80 GB, without recomputing."""
    scale = pytest.importorskip("benchmarks.scale")
    for (name, stage), run in scale.RUNS.items():
        model, sent = scale.build(name, stage), {}
        for layout in ("zero2", "zero3"):
            arguments = scale.arguments(layout, 8)
            scale.fit_zero(model, arguments)
            estimate = scale.estimate_memory(model, arguments, scale.CAPS[name, stage])
            if estimate.total() <= 0.9 * 79 * scale.GIB:
                _, micro_batches = scale.step_work(name, stage, 8)
                sent[layout] = scale.step_traffic(model, scale.zero_section(layout), 8, micro_batches).everywhere
        assert run["flags"]["deepspeed"] == f"deepspeed_configs/{min(sent, key=sent.get)}.json", (name, stage)


@pytest.mark.slow
def test_measured_seconds_are_laid_beside_the_estimate(tmp_path, capsys, monkeypatch):
    scale = pytest.importorskip("benchmarks.scale")
    estimated = scale.pieces("llama-3.2-3b", 2, 989.0)
    assert (*estimated, "other") == scale.PIECES
    file = tmp_path / "measured.json"
    words = ["scale", "--print", "pieces", "--preset", "llama-3.2-3b", "--stage", "2", "--measured", str(file)]

    def printed(seconds):
        file.write_text(json.dumps(seconds))
        monkeypatch.setattr(sys, "argv", words)
        scale.main()
        return capsys.readouterr().out

    page = printed(estimated | {"tower": estimated["tower"] + 0.030, "other": 0.0125})
    assert "largest gap: tower, +30.0 ms" in page
    assert f"| tower | {1e3 * estimated['tower']:.1f} | {1e3 * estimated['tower'] + 30:.1f} | +30.0 |" in page
    assert "| other |  | 12.5 | +12.5 |" in page
    for wrong, found in (({"towers": 1.0}, "towers"), ([1], "[1]"), ({"tower": "1"}, '{"tower": "1"}')):
        with pytest.raises(SystemExit, match="2"):
            printed(wrong)
        assert (
            f'expected {{"piece": seconds}} with pieces from LLM products, attention, tower, head, elementwise, '
            f"communication, other, found {found}" in capsys.readouterr().err
        )
    monkeypatch.setattr(sys, "argv", [*words[:3], *words[-2:]])
    with pytest.raises(SystemExit, match="2"):
        scale.main()
    assert "--measured: only with --print pieces, --preset and --stage" in capsys.readouterr().err


def test_every_figure_of_the_page_is_of_a_known_machine_and_commit():
    assert (common.ROOT / "docs/performance.md").read_text() == run_all.page()
    for path in common.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["name"] == path.stem and result["environment"]["machine"]["cpu"]
        assert result["environment"]["commit"]


def test_every_section_and_column_of_the_page_of_results_has_a_title():
    page = (common.ROOT / "docs/performance.md").read_text()
    titles = re.findall(r"^## (.*)", page, re.MULTILINE)
    heads = re.findall(r"^\|(.*)\|\n\|-", page, re.MULTILINE)
    assert {run_all.title_of(path.stem) for path in common.RESULTS.glob("*.json")} <= set(titles)
    assert not [title for title in titles if "_" in title] and len(set(titles)) == len(titles)
    assert not [head for head in heads if "_" in head or not all(map(str.strip, head.split("|")))]
    origins = re.findall(r"^`python -m benchmarks.*?`, (.*)", page, re.MULTILINE)
    assert len(origins) > 8 and not [text for text in origins if re.search(r"_|[0-9a-f]{30}|torch\.|True|False", text)]
    assert run_all.title_of("gpu_mfu").startswith("GPU: MFU") and run_all.title_of("loss_head_fp32").endswith(", fp32")
