"""benchmarks/gpu_check.sh on the CPU, and benchmarks/train_step.py, which measures most of its figures."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM
from warm_python import warm_python

from benchmarks import common, gpu_check, gpu_parts, gpu_setting, gpu_training, shapes, train_step
from benchmarks.gpu_parts import FAILED, MEASURED, NOT_RUN
from benchmarks.gpu_setting import Setting
from llava.utils.processes import descendants, is_running

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_UPSTREAM = {"UPSTREAM_VENV": "/nowhere"}


# --- one step ---------------------------------------------------------------------------------------------------------


def step_rows(monkeypatch, tmp_path, *options: str) -> tuple[int, dict[tuple[int, str], dict]]:
    """The exit status of train_step with tiny micro-batches, and its rows by size and arm."""
    words = ["--preset", "tiny", "--quick", "--stages", "2", "--output-dir", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", ["train_step", *words])
    status = train_step.main()
    rows = json.loads((tmp_path / "train_step.json").read_text())["rows"]
    return status, {(row["micro_batch_tokens"], row["arm"]): row for row in rows}


@pytest.mark.slow
def test_a_step_is_measured_at_every_size_and_its_arms_agree(monkeypatch, tmp_path):
    options = ["--micro-batch-tokens", "100", "300", "--arms", "packed", "padded", "no_norm"]
    status, rows = step_rows(monkeypatch, tmp_path, *options)
    assert status == 0 and len(rows) == 6 and not any("failed" in row for row in rows.values())
    for tokens in (100, 300):
        assert rows[tokens, "packed"]["loss"] == pytest.approx(rows[tokens, "padded"]["loss"], rel=1e-4)
        assert rows[tokens, "padded"]["speed_over_padded"] == 1
        assert all(rows[tokens, arm]["tokens_per_second"] > 0 for arm in ("packed", "padded", "no_norm"))


@pytest.mark.slow
def test_an_arm_that_fails_says_why_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    backward = train_step.Bench.backward

    def backward_without_eager(bench, pieces):
        if bench.model.config._attn_implementation == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation")
        loss = backward(bench, pieces)
        return loss + 1 if bench.model.config._attn_implementation == "sdpa" else loss

    monkeypatch.setattr(train_step.Bench, "backward", backward_without_eager)
    options = ["--micro-batch-tokens", "100", "--arms", "packed", "packed_eager", "packed_sdpa", "no_norm"]
    status, rows = step_rows(monkeypatch, tmp_path, *options)
    assert status == 1
    assert rows[100, "packed_eager"]["failed"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert "expected" in rows[100, "packed_sdpa"]["failed"]
    assert rows[100, "packed"]["seconds"] > 0 and rows[100, "no_norm"]["seconds"] > 0
    assert "error: stage 2 packed_eager: OutOfMemoryError" in capsys.readouterr().err


@pytest.mark.slow
def test_a_padded_arm_splits_a_batch_that_does_not_fit(monkeypatch, tmp_path):
    """The budget is the estimate for a fifth more than the largest packed micro-batch."""
    seen = {}

    def budget(device, parameters):
        return seen.get("budget", 2**60)

    on_device = train_step.Bench.on_device

    def remember(bench, samples, padding_free):
        if padding_free:
            seen["budget"] = bench.estimate(int(1.2 * sum(train_step.expanded(s, 16) for s in samples)))
        return on_device(bench, samples, padding_free)

    monkeypatch.setattr(train_step, "memory_budget", budget)
    monkeypatch.setattr(train_step.Bench, "on_device", remember)
    status, rows = step_rows(monkeypatch, tmp_path, "--micro-batch-tokens", "800", "--arms", "packed", "padded")
    assert status == 0 and rows[800, "packed"]["pieces"] == 1 and rows[800, "padded"]["pieces"] > 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_killed_run_leaves_its_rows_but_no_part_of_the_results(monkeypatch, tmp_path, whole):
    def sizes(*_):
        yield [{"stage": 2, "arm": "packed", "micro_batch_tokens": 100, "norm": "none", "loss": 1.0, "seconds": 2.0}]
        if not whole:
            raise KeyboardInterrupt

    def written(*options: str) -> list[str]:
        words = ["train_step", "--preset", "tiny", "--stages", "2", "--arms", "packed", *options]
        monkeypatch.setattr(sys, "argv", words)
        with contextlib.nullcontext() if whole else pytest.raises(KeyboardInterrupt):
            train_step.main()
        files = list(tmp_path.rglob("train_step.json"))
        return [row["arm"] for file in files for row in json.loads(file.read_text())["rows"]]

    monkeypatch.setattr(train_step, "measure", sizes)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    assert written() == ["packed"] * whole
    assert written("--output-dir", str(tmp_path / "results")) == ["packed"]


def test_a_stage_for_which_no_size_fits_is_an_error_that_names_the_sizes(monkeypatch, tmp_path, capsys):
    def budget(device, parameters):
        return 2**60 if trained["projector"] else 0

    trained = {}
    set_trainable = train_step.set_trainable

    def remember(model, parts):
        trained["projector"] = parts == frozenset(train_step.STAGES[1])
        set_trainable(model, parts)

    monkeypatch.setattr(train_step, "memory_budget", budget)
    monkeypatch.setattr(train_step, "set_trainable", remember)
    words = ["--preset", "tiny", "--quick", "--arms", "packed", "--micro-batch-tokens", "100", "300"]
    for stages, measured in (("2",), []), (("1", "2"), [(1, 100), (1, 300)]):
        output = tmp_path / "".join(stages)
        monkeypatch.setattr(sys, "argv", ["train_step", *words, "--output-dir", str(output), "--stages", *stages])
        assert train_step.main() == 1
        error = capsys.readouterr().err
        assert error.startswith("error: stage 2, plain layers: no --micro-batch-tokens fits (100 tokens: 0.")
        assert " GiB estimated, 0.0 usable; 300 tokens: " in error
        rows = [row for file in output.glob("*.json") for row in json.loads(file.read_text())["rows"]]
        assert [(row["stage"], row["micro_batch_tokens"]) for row in rows] == measured


def test_micro_batches_fit_the_memory(capsys):
    def fits(tokens):
        return "80.1 GiB estimated, 71.0 usable" if tokens > 5000 else ""

    recipes = argparse.Namespace(micro_batch_tokens=None, preset="llama-3.2-3b")
    assert train_step.sizes(recipes, 2, CUDA, lambda tokens: "") == [train_step.recipe_tokens("llama-3.2-3b", 2)]
    (tokens,) = train_step.sizes(recipes, 2, CUDA, fits)
    assert train_step.LONGEST <= tokens <= 5000
    assert f"micro-batches of {tokens} tokens in place of" in capsys.readouterr().out
    asked = argparse.Namespace(micro_batch_tokens=[1024, 8192])
    assert train_step.sizes(asked, 1, CUDA, fits) == [1024]
    assert "8192 tokens are left out: 80.1 GiB estimated" in capsys.readouterr().out


@pytest.mark.parametrize("flash", [True, False])
def test_only_arms_that_run_are_listed(monkeypatch, flash):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(train_step, "is_flash_attn_2_available", lambda: flash)
    monkeypatch.setattr(train_step, "is_flash_attn_3_available", lambda: False)
    monkeypatch.setattr(train_step, "has_liger", lambda: flash)
    monkeypatch.setattr(train_step, "packed_attention", lambda *_: "sdpa")
    names = [arm.name for arm in train_step.runnable_arms(CUDA, torch.bfloat16)]
    assert names[0] == "packed" and "compiled" in names and len(set(names)) == len(names)
    assert ("packed_flash_attention_2" in names) == ("liger" in names) == flash
    assert "packed_flash_attention_3" not in names and "packed_eager" not in names and "packed_sdpa" not in names


def test_host_syncs_are_the_warnings_that_pytorch_gives(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def compute():
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert train_step.host_syncs(compute) == {"syncs": 2, "library_syncs": 2}
    assert modes == ["warn", "default"]


def test_host_syncs_count_calls_that_wait_which_pytorch_does_not_warn_of(monkeypatch):
    owners = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    for owner in owners:
        monkeypatch.setattr(owner, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    before = [owner.synchronize for owner in owners]

    def compute():
        torch.cuda.synchronize()
        torch.cuda.Stream.synchronize("a stream")
        torch.cuda.Event.synchronize("an event")

    assert train_step.host_syncs(compute)["syncs"] == 3
    assert [owner.synchronize for owner in owners] == before


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_folder_with_fewer_layers_is_the_models_beginning(tiny, tmp_path, name):
    whole = AutoModelForCausalLM.from_pretrained(tiny / name)
    cut = AutoModelForCausalLM.from_pretrained(shapes.with_fewer_layers(tiny / name, 1, tmp_path / "cut"))
    assert len(cut.model.layers) == 1
    whole.model.layers = whole.model.layers[:1]
    ids = torch.arange(5, 15)[None]
    assert torch.equal(whole(ids).logits, cut(ids).logits)


@pytest.mark.parametrize(("preset", "billions"), [("llama-3.2-3b", 3.21), ("qwen2.5-7b", 7.62)])
def test_shapes_have_the_published_number_of_parameters(preset, billions):
    model = shapes.build_llava(shapes.PRESETS[preset], torch.device("meta"), torch.bfloat16)
    model.get_model().vision_tower = model.get_model().mm_projector = None
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.slow
def test_layers_are_as_many_as_fit(monkeypatch):
    """80 GB hold a frozen 3B model whole; the states of a trained 3B hardly fit, those of a trained 7B do not."""
    monkeypatch.setattr(gpu_training, "run_json", lambda command: 79 * 2**30)
    assert gpu_training.layers_that_fit("llama-3.2-3b", 1, "zero3", 28) == 28
    assert 20 <= gpu_training.layers_that_fit("llama-3.2-3b", 2, "zero3", 28) <= 28
    assert 2 <= gpu_training.layers_that_fit("qwen2.5-7b", 2, "zero3", 28) < 20


def test_the_estimate_is_read_from_the_line_that_a_run_prints():
    line = "memory estimate: total with working space 3.25 of 14.40 GiB usable, micro-batches of up to 100 tokens"
    assert gpu_training.estimated_gib(f"12:00:00 llava: {line}\nmore") == 3.25
    with pytest.raises(gpu_setting.Failed, match="total with working space"):
        gpu_training.estimated_gib("nothing")


# --- the command ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return os.environ | NO_UPSTREAM | {"LLAVA_PYTHON": str(warm_python())}


def gpu_check_sh(*words: object, cpu: bool = True, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", "benchmarks/gpu_check.sh", *["--cpu"] * cpu, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True)


@pytest.mark.slow
def test_wrong_calls_are_refused(tmp_path):
    unknown = gpu_check_sh("--parts", "tests,zero9", "--output-dir", tmp_path)
    assert unknown.returncode == 2 and "--parts: unknown zero9; expected some of environment,demo," in unknown.stderr
    listed = gpu_check_sh("--help").stdout
    assert all(name in listed for name in gpu_parts.PARTS)
    if not torch.cuda.is_available():
        here = gpu_check_sh("--output-dir", tmp_path, cpu=False)
        assert here.returncode == 2 and here.stderr.startswith("error: no NVIDIA GPU") and "--cpu" in here.stderr
    nowhere = gpu_check_sh("--output-dir", tmp_path, LLAVA_PYTHON="/nowhere/python")
    assert (nowhere.returncode, nowhere.stderr) == (2, "error: LLAVA_PYTHON=/nowhere/python is not a program\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_failed_parts_are_repeated_measured_ones_kept_open_ones_explained(tmp_path):
    words = ("--parts", "environment,vs_upstream", "--output-dir", tmp_path)
    late = gpu_check_sh(*words, "--limit", "0.01")
    assert late.returncode == 1 and "failed in" in late.stdout and "longer than 0.01 s (--limit)" in late.stdout
    first = gpu_check_sh(*words)
    assert first.returncode == 0, first.stdout + first.stderr
    written = (tmp_path / "gpu_environment.json").stat().st_mtime_ns
    second = gpu_check_sh(*words)
    assert second.returncode == 0 and "environment  measured before" in second.stdout
    assert (tmp_path / "gpu_environment.json").stat().st_mtime_ns == written
    page = (tmp_path / "summary.md").read_text()
    assert "| open, upstream's environment nowhere is missing; PREPARE_ONLY=1 bash" in page
    assert "`bash benchmarks/gpu_check.sh --cpu --parts zero3_7b`" in page
    assert "attention over packed samples" in page
    assert not (tmp_path / "work/environment").exists()


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_keeps_nothing_of_the_part(tmp_path):
    words = ["--cpu", "--parts", "environment", "--output-dir", str(tmp_path)]
    command = [sys.executable, "-u", "-m", "benchmarks.gpu_check", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert "runs" in process.stdout.readline()
    busy = gpu_check_sh(*words[1:])
    assert busy.returncode == 2 and f"another gpu_check runs in {tmp_path}" in busy.stderr
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error
    assert started and not any(os.path.exists(f"/proc/{pid}") for pid in started)
    assert not (tmp_path / "gpu_environment.json").exists() and not (tmp_path / "work/environment").exists()


@pytest.mark.slow
def test_a_killed_call_ends_its_part_and_can_be_repeated(tmp_path):
    words = ["--cpu", "--parts", "environment", "--output-dir", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu_check", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    until(lambda: (tmp_path / "work/environment").exists())
    started = descendants(process.pid)
    process.kill()
    process.wait()
    until(lambda: not any(map(is_running, started)))
    assert started and (tmp_path / "work/environment").exists() and not (tmp_path / "gpu_environment.json").exists()
    again = gpu_check_sh(*words[1:])
    assert again.returncode == 0, again.stdout + again.stderr
    assert "environment  measured in" in again.stdout and not (tmp_path / "work/environment").exists()


def until(holds, seconds: float = 60.0) -> None:
    """Waits until `holds()`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("name", "file"), [("step2_3b", "train_step.json"), ("zero3_3b", "rows.json")])
def test_a_part_that_runs_into_its_limit_keeps_the_rows_that_it_wrote(monkeypatch, tmp_path, name, file):
    args = argparse.Namespace(output_dir=tmp_path, cpu=True, limit=2.0)
    work = Setting(name, tmp_path, cpu=True).work
    work.mkdir(parents=True)
    program = tmp_path / "python"
    program.write_text(f"""#!/bin/sh\necho '{{"rows": [{{"arm": "packed"}}]}}' >{work}/{file}\nsleep 60\n""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    gpu_check.run_part(name, args, limit=2.0)
    result = gpu_check.read(tmp_path, name, cpu=True)
    assert (result["status"], result["reason"]) == (FAILED, "it took longer than 2 s (--limit)")
    assert result["rows"] == [{"arm": "packed"}] and not work.exists()


@pytest.mark.parametrize("name", ["demo", "zero3_3b"])
def test_the_row_of_a_stage_is_written_before_the_next_stage_trains(monkeypatch, tmp_path, name):
    def train(setting, stage, variables, way=""):
        written.append([row["stage"] for row in setting.measured_rows()])
        return [{"loss": 1.0, "peak_memory_gib": 1.0}], "total with working space 1.0 of 2.0 GiB"

    written: list[list[int]] = []
    stubs = {"train": train, "run_logged": lambda *_: "", "write_records": lambda *_: None}
    for stubbed, stub in stubs.items():
        monkeypatch.setattr(gpu_training, stubbed, stub)
    gpu_parts.run(setting := Setting(name, tmp_path, cpu=True))
    result = gpu_check.read(tmp_path, name, cpu=True)
    assert written == [[], [1]] and [row["stage"] for row in setting.measured_rows()] == [1, 2]
    assert result["status"] == MEASURED and result["rows"] == setting.measured_rows()


@pytest.mark.parametrize("resumed", [1.0, 1.5])
def test_a_way_that_fails_is_named_and_the_others_have_rows(monkeypatch, tmp_path, resumed):
    def train(setting, stage, variables, way=""):
        (setting.work / way / f"stage{stage}/checkpoint-2").mkdir(parents=True, exist_ok=True)
        return [{"loss": resumed if way == "resumed" else 1.0, "peak_memory_gib": 1.0}] * 2, ""

    commands: list[str] = []
    monkeypatch.setattr(gpu_training, "train", train)
    monkeypatch.setattr(gpu_training, "run_logged", lambda setting, name, *_: commands.append(name) or "")
    gpu_parts.run(Setting("paths", tmp_path, cpu=True))
    result = gpu_check.read(tmp_path, "paths", cpu=True)
    ways = {row["way"] for row in result["rows"]}
    assert {"norm before the MLP", "LoRA, then answers", "answers, scores, analysis"} <= ways
    assert {"answer-lora", "answer-used", "score", "update-rates", "interventions"} <= set(commands)
    if resumed == 1.0:
        assert result["status"] == MEASURED and "ZeRO-3, resumed" in ways
    else:
        assert result["status"] == FAILED and "ZeRO-3, resumed" not in ways
        assert result["reason"].startswith("ZeRO-3, resumed: the losses after checkpoint-2 are [1.5, 1.5]")


class Calls:
    """Calls of gpu_check whose parts take their estimated time on a clock of their own."""

    def __init__(self, monkeypatch, folder: Path, *words: str):
        self.folder, self.words, self.now, self.limits = folder, words, 1e9, []
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(gpu_check, "run_part", self.run_part)

    def run_part(self, name, args, limit):
        self.limits.append(limit)
        seconds = 60 * gpu_parts.PARTS[name].minutes
        self.now += seconds
        Setting(name, args.output_dir, args.cpu).write(MEASURED, "", seconds)

    def call(self) -> set[str]:
        """Runs one call, which starts now, and returns the parts that it measured."""
        before = self.measured()
        words = ["gpu_check", "--cpu", "--output-dir", str(self.folder), "--started", str(self.now), *self.words]
        self.monkeypatch.setattr(sys, "argv", words)
        args = gpu_check.parse_arguments()
        gpu_check.run_parts(args, gpu_check.Clock(args, lambda: self.now))
        return self.measured() - before

    def measured(self) -> set[str]:
        return {path.stem.removeprefix("gpu_") for path in self.folder.glob("gpu_*.json")}


VALUABLE = {"environment", "demo", "tests", "paths", "step1_3b", "step2_3b", "zero3_3b", "zero2_3b"}


@pytest.mark.parametrize(("minutes", "more"), [(25, set()), (40, {"zero3_7b", "zero2_7b", "vs_upstream"})])
def test_the_total_over_calls_of_ten_minutes_holds(monkeypatch, tmp_path, capsys, minutes, more):
    calls = Calls(monkeypatch, tmp_path, "--minutes", str(minutes), "--call-minutes", "10")
    first = calls.now
    while True:
        before = calls.now
        if not calls.call():
            break
        assert calls.now - before < 600
    assert calls.measured() == VALUABLE | more and calls.now - first <= 60 * minutes
    assert all(60 < limit < 600 for limit in calls.limits)
    out = capsys.readouterr().out
    skipped = gpu_parts.PARTS.keys() - VALUABLE - more
    assert all(f"{name:12} skipped: takes about {gpu_parts.PARTS[name].minutes:g} min, " in out for name in skipped)
    assert f"are left of --minutes {minutes}" in out and "rerun the same command to continue" in out


def test_a_killed_part_counts_with_its_estimate(monkeypatch, tmp_path):
    calls = Calls(monkeypatch, tmp_path, "--minutes", "4", "--parts", "demo,tests")

    def killed(*_):
        left.append((tmp_path / "seconds").read_text())
        raise SystemExit

    left: list[str] = []
    monkeypatch.setattr(gpu_check, "run_part", killed)
    with pytest.raises(SystemExit):
        calls.call()
    assert float(left[0]) == 60 * gpu_parts.PARTS["demo"].minutes
    (tmp_path / "seconds").write_text(left[0])
    monkeypatch.setattr(gpu_check, "run_part", calls.run_part)
    assert calls.call() == set()  # one of four minutes is left, less what ending takes


def test_results_and_logs_are_copied_after_every_part(monkeypatch, tmp_path):
    calls = Calls(monkeypatch, tmp_path / "out", "--parts", "environment,demo", "--copy-to", str(tmp_path / "copy"))
    (tmp_path / "out/logs").mkdir(parents=True)
    (tmp_path / "out/logs/demo.log").write_text("step 1")
    (tmp_path / "out/work").mkdir()
    (tmp_path / "out/work/model.safetensors").write_text("large")
    run_part, copies = calls.run_part, []

    def look(*words):
        copies.append(sorted(path.name for path in (tmp_path / "copy").glob("*")))
        run_part(*words)

    monkeypatch.setattr(gpu_check, "run_part", look)
    calls.call()
    assert copies == [[], [gpu_check.ARCHIVE]]
    with tarfile.open(tmp_path / "copy" / gpu_check.ARCHIVE) as archive:
        names = ["summary.md", "seconds", "gpu_demo.json", "gpu_environment.json", "logs/demo.log"]
        assert archive.getnames() == names


# --- tables and logs --------------------------------------------------------------------------------------------------


def test_the_table_has_every_state_and_the_targets(tmp_path):
    rows = [{"stage": stage, "layers": "28 of 28", "estimate_error": 0.02 * stage} for stage in (1, 2)]
    Setting("zero3_3b", tmp_path, False, rows=rows).write(MEASURED, "", 90)
    Setting("zero2_3b", tmp_path, False, rows=rows[:1]).write(FAILED, "it took longer than 600 s (--limit)", 600)
    arms = [
        {"stage": 1, "arm": "packed", "mfu": 0.41, "syncs": 0},
        {"stage": 1, "arm": "liger_compiled_tower", "mfu": 0.52, "syncs": 0},
        {"stage": 1, "arm": "no_norm", "mfu": 0.6, "syncs": 0},
    ]
    Setting("step1_3b", tmp_path, False, rows=arms).write(MEASURED, "", 60)
    failed = [{"stage": 2, "arm": "packed", "failed": "out of memory"}]
    reason = "train_step ended with 1: error: stage 2\npacked"
    Setting("step2_3b", tmp_path, False, rows=failed).write(FAILED, reason, 3)
    Setting("tests", tmp_path, False).write(NOT_RUN, "pytest is not installed", 0)
    Setting("demo", tmp_path, cpu=True).write(MEASURED, "", 5)  # of a CPU, so not what the GPU's table wants
    page = gpu_check.summary(tmp_path, cpu=False)
    assert "| measured | 90" in page and "| failed: train_step ended with 1: error: stage 2 packed | 3" in page
    assert "| open, pytest is not installed: `bash benchmarks/gpu_check.sh --parts tests` |" in page
    assert "| demo | the demo preset, both stages | open: `bash" in page
    assert "stage 1, MFU | >= 0.5 | 0.52 | met |" in page
    assert "stage 1, host syncs of a micro-batch | <= 0 | 0 | met |" in page
    assert "stage 2, MFU | >= 0.5 | not measured | open: `bash benchmarks/gpu_check.sh --parts step2_3b` |" in page
    assert "3B shapes, ZeRO-3, memory estimate off by | <= 0.1 | 0.04 | met |" in page and "out of memory" in page
    assert "3B shapes, ZeRO-2, memory estimate off by | <= 0.1 | not measured | open: " in page  # stage 1 alone


@pytest.mark.parametrize(("name", "package"), [("zero2_3b", "deepspeed"), ("tests", "pytest")])
def test_a_part_whose_package_is_missing_stays_open(tmp_path, monkeypatch, name, package):
    monkeypatch.setattr(gpu_setting, "find_spec", lambda module: None)
    gpu_parts.run(Setting(name, tmp_path, cpu=True))
    assert f"| open, {package} is not installed: `bash" in gpu_check.part_table(tmp_path, cpu=True)


def test_the_error_that_a_log_ends_with_is_found():
    log = "step 1\nTraceback:\nValueError: --deepspeed x: no such file\n[INFO] Killing subprocess 7\n\n"
    assert gpu_setting.last_error(log) == "ValueError: --deepspeed x: no such file"
    assert gpu_setting.last_error("rank 0: error: out of memory\nbye") == "rank 0: error: out of memory"
    assert gpu_setting.last_error("") == "it printed nothing"


def test_a_figure_is_drawn_of_what_did_not_fail(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"stage": 1, "arm": "packed", "micro_batch_tokens": n, "mfu": 0.3, "tflops": 1} for n in (512, 1024)]
    gpu_parts.draw([*rows, {"stage": 1, "arm": "liger", "micro_batch_tokens": 512, "failed": "x"}], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_junit_reports_become_a_row_per_test(tmp_path):
    cases = '<testcase classname="m" name="a[1]"/><testcase classname="m" name="a[2]"><failure message="x"/></testcase>'
    cases += '<testcase classname="m" name="b"><skipped message="no GPU"/></testcase>'
    (tmp_path / "r.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert gpu_parts.test_rows(tmp_path / "r.xml") == [
        {"test": "a", "passed": 1, "failed": 1, "skipped": 0, "why": ""},
        {"test": "b", "passed": 0, "failed": 0, "skipped": 1, "why": "no GPU"},
    ]


@pytest.mark.slow
def test_parts_that_train_run_on_a_cpu(tmp_path):
    words = ("--parts", "demo,zero3_7b,mfu", "--output-dir", tmp_path)
    done = gpu_check_sh(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: json.loads((tmp_path / f"gpu_{name}.json").read_text())["rows"] for name in ("demo", "zero3_7b")}
    assert [row["stage"] for row in rows["demo"]] == [1, 2] and rows["zero3_7b"][0]["estimate_gib"] > 0
    assert (tmp_path / "gpu_mfu.png").is_file() and "![mfu](gpu_mfu.png)" in (tmp_path / "summary.md").read_text()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"logs", "work"}
