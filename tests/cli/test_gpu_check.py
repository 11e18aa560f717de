"""benchmarks/gpu_check.sh on the CPU, and benchmarks/train_step.py, which measures most of its figures."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM
from warm_python import warm_python

from benchmarks import common, gpu_check, gpu_parts, shapes, train_step
from benchmarks.gpu_parts import FAILED, MEASURED, NOT_RUN, PartRun
from llava.utils.processes import descendants

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
    options = ["--micro-batch-tokens", "100", "300", "--arms", "packed", "padded"]
    status, rows = step_rows(monkeypatch, tmp_path, *options)
    assert status == 0 and len(rows) == 4 and not any("failed" in row for row in rows.values())
    for tokens in (100, 300):
        assert rows[tokens, "packed"]["loss"] == pytest.approx(rows[tokens, "padded"]["loss"], rel=1e-4)
        assert all(rows[tokens, arm]["tokens_per_second"] > 0 for arm in ("packed", "padded"))


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


@pytest.mark.parametrize("flash", [True, False])
def test_only_arms_that_run_are_listed(monkeypatch, flash):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(train_step, "runnable_flash", lambda: ["flash_attention_2"] if flash else [])
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

    assert train_step.host_syncs(compute) == 2
    assert modes == ["warn", "default"]


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "billions"), [("llama-3.2-3b", 3.21), ("qwen2.5-7b", 7.62)])
def test_shapes_have_the_published_number_of_parameters(preset, billions):
    model = shapes.build_llava(shapes.PRESETS[preset], torch.device("meta"), torch.bfloat16)
    model.get_model().vision_tower = model.get_model().mm_projector = None
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_model_with_fewer_layers_is_written(tmp_path):
    folder = shapes.write_language_model("tiny", tmp_path / "model", CPU, torch.float32, layers=2)
    assert len(AutoModelForCausalLM.from_pretrained(folder).model.layers) == 2


def test_the_estimate_is_read_from_the_line_that_a_run_prints():
    line = "memory estimate: total with working space 3.25 of 14.40 GiB usable, micro-batches of up to 100 tokens"
    assert gpu_parts.estimated_gib(f"12:00:00 llava: {line}\nmore") == 3.25
    with pytest.raises(gpu_parts.Failed, match="total with working space"):
        gpu_parts.estimated_gib("nothing")


# --- the command ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return os.environ | NO_UPSTREAM | {"LLAVA_PYTHON": str(warm_python())}


def gpu_check_sh(*words: object, cpu: bool = True, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", "benchmarks/gpu_check.sh", *["--cpu"] * cpu, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environment() | variables, capture_output=True, text=True)


@pytest.mark.slow
def test_wrong_calls_are_refused(tmp_path):
    unknown = gpu_check_sh("--parts", "tests,zero9", "--output-dir", tmp_path)
    assert unknown.returncode == 2 and "--parts: unknown zero9; expected some of step_3b,tests," in unknown.stderr
    listed = gpu_check_sh("--help").stdout
    assert all(name in listed for name in gpu_parts.PARTS)
    if not torch.cuda.is_available():
        here = gpu_check_sh("--output-dir", tmp_path, cpu=False)
        assert here.returncode == 2 and here.stderr.startswith("error: no NVIDIA GPU") and "--cpu" in here.stderr
    nowhere = gpu_check_sh("--output-dir", tmp_path, LLAVA_PYTHON="/nowhere/python")
    assert (nowhere.returncode, nowhere.stderr) == (2, "error: LLAVA_PYTHON=/nowhere/python is not a program\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_measured_parts_are_kept_and_open_ones_explained(tmp_path):
    words = ("--parts", "step_3b,vs_upstream", "--output-dir", tmp_path)
    first = gpu_check_sh(*words)
    assert first.returncode == 0, first.stdout + first.stderr
    written = (tmp_path / "gpu_step_3b.json").stat().st_mtime_ns
    second = gpu_check_sh(*words)
    assert second.returncode == 0 and "step_3b      measured before" in second.stdout
    assert (tmp_path / "gpu_step_3b.json").stat().st_mtime_ns == written
    page = (tmp_path / "summary.md").read_text()
    assert "| open, upstream's environment nowhere is missing; PREPARE_ONLY=1 bash" in page
    assert "`bash benchmarks/gpu_check.sh --cpu --parts zero3_7b`" in page
    assert not (tmp_path / "work/step_3b").exists()


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_keeps_nothing_of_the_part(tmp_path):
    words = ["--cpu", "--parts", "step_3b", "--output-dir", str(tmp_path)]
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
    assert not (tmp_path / "gpu_step_3b.json").exists() and not (tmp_path / "work/step_3b").exists()


def test_a_part_that_runs_into_its_limit_keeps_the_rows_that_it_wrote(monkeypatch, tmp_path):
    name, file = "zero3_3b", "rows.json"
    args = argparse.Namespace(output_dir=tmp_path, cpu=True, limit=2.0)
    work = PartRun(name, tmp_path, cpu=True).work
    work.mkdir(parents=True)
    program = tmp_path / "python"
    program.write_text(f"""#!/bin/sh\necho '{{"rows": [{{"arm": "packed"}}]}}' >{work}/{file}\nsleep 60\n""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    gpu_check.run_part(name, args, limit=2.0)
    result = gpu_check.read(tmp_path, name, cpu=True)
    assert result["status"] == FAILED and result["reason"].startswith("it took longer than 2 s (--limit), see ")
    assert result["rows"] == [{"arm": "packed"}] and not work.exists()


def test_the_row_of_a_stage_is_written_before_the_next_stage_trains(monkeypatch, tmp_path):
    def train(part, stage, variables, way=""):
        written.append([row["stage"] for row in part.measured_rows()])
        return [{"loss": 1.0, "peak_memory_gib": 1.0}], "total with working space 1.0 of 2.0 GiB"

    written: list[list[int]] = []
    monkeypatch.setattr(gpu_parts, "train", train)
    monkeypatch.setattr(gpu_parts, "run_logged", lambda *_: "")
    (part := PartRun("zero3_3b", tmp_path, cpu=True)).execute()
    result = gpu_check.read(tmp_path, "zero3_3b", cpu=True)
    assert written == [[], [1]] and [row["stage"] for row in part.measured_rows()] == [1, 2]
    assert result["status"] == MEASURED and result["rows"] == part.measured_rows()


def test_a_way_that_fails_is_named_and_the_others_have_rows(monkeypatch, tmp_path):
    def train(part, stage, variables, way=""):
        (part.work / way / f"stage{stage}/checkpoint-2").mkdir(parents=True, exist_ok=True)
        return [{"loss": 1.5 if way == "LoRA-resumed" else 1.0, "peak_memory_gib": 1.0}] * 2, ""

    commands: list[str] = []
    monkeypatch.setattr(gpu_parts, "train", train)
    monkeypatch.setattr(gpu_parts, "run_logged", lambda part, name, *_: commands.append(name) or "")
    PartRun("demo", tmp_path, cpu=False).execute()
    result = gpu_check.read(tmp_path, "demo", cpu=False)
    ways = {row["way"] for row in result["rows"]}
    assert {"as it is", "norm before the MLP"} <= ways and "LoRA" not in ways
    assert result["status"] == FAILED
    assert result["reason"].startswith("LoRA: the losses after checkpoint-2 are [1.5, 1.5]")
    assert {"as-it-is-answers", "norm-before-the-MLP-answers"} <= set(commands)


def test_calls_of_ten_minutes_run_what_fits_and_measure_all_in_the_end(monkeypatch, tmp_path, capsys):
    """Parts take their estimated time on a clock of their own."""

    def run_part(name, args, limit):
        limits.append(limit)
        clock[0] += 60 * gpu_parts.PARTS[name].minutes
        PartRun(name, args.output_dir, args.cpu).write(MEASURED, "", 1)

    clock, limits = [1e9], []
    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(gpu_check.time, "time", lambda: clock[0])
    for call in range(9):
        started = clock[0]
        words = ["--cpu", "--output-dir", str(tmp_path), "--minutes", "10", "--started", str(started)]
        monkeypatch.setattr(sys, "argv", ["gpu_check", *words])
        gpu_check.run_parts(gpu_check.parse_arguments())
        assert clock[0] - started < 600
        if call == 0:
            assert {path.stem for path in tmp_path.glob("gpu_*")} == {"gpu_step_3b", "gpu_tests", "gpu_demo"}
            text = "zero3_3b     open: takes about 4 min, 1.8 are left of --minutes 10; rerun the same command"
            assert text in capsys.readouterr().out
    assert {path.stem for path in tmp_path.glob("gpu_*")} == {f"gpu_{name}" for name in gpu_parts.PARTS}
    assert all(60 < limit < 600 for limit in limits)


# --- tables and logs --------------------------------------------------------------------------------------------------


def test_the_table_has_every_state_and_the_targets(tmp_path):
    rows = [{"stage": stage, "layers": "all", "estimate_error": 0.02 * stage} for stage in (1, 2)]
    PartRun("zero3_3b", tmp_path, False, rows=rows).write(MEASURED, "", 90)
    PartRun("zero2_3b", tmp_path, False, rows=rows[:1]).write(FAILED, "it took longer than 600 s (--limit)", 600)
    arms = [
        {"stage": 1, "arm": "packed", "mfu": 0.41, "syncs": 0},
        {"stage": 1, "arm": "liger_compiled_tower", "mfu": 0.52, "syncs": 0},
        {"stage": 2, "arm": "liger_compiled_tower", "mfu": 0.42, "syncs": 1},
    ]
    PartRun("step_3b", tmp_path, False, rows=arms).write(MEASURED, "", 60)
    failed = [{"stage": 2, "arm": "packed", "failed": "out of memory"}]
    reason = "train_step ended with 1: error: stage 2\npacked"
    PartRun("arms_3b", tmp_path, False, rows=failed).write(FAILED, reason, 3)
    PartRun("tests", tmp_path, False).write(NOT_RUN, "pytest is not installed", 0)
    PartRun("demo", tmp_path, cpu=True).write(MEASURED, "", 5)  # of a CPU, so not what the GPU's table wants
    page = gpu_check.summary(tmp_path, cpu=False)
    assert "| measured | 90" in page and "| failed: train_step ended with 1: error: stage 2 packed | 3" in page
    assert "| open, pytest is not installed: `bash benchmarks/gpu_check.sh --parts tests` |" in page
    assert "under ZeRO-3 | open: `bash" in page
    assert "stage 1, MFU | >= 0.5 | 0.52 | met |" in page and "stage 2, MFU | >= 0.5 | 0.42 | **missed** |" in page
    assert "stage 1, waits of the host in a micro-batch | <= 0 | 0 | met |" in page
    assert "3B shapes, ZeRO-3, memory estimate off by | <= 0.1 | 0.04 | met |" in page
    assert "3B shapes, ZeRO-2, memory estimate off by | <= 0.1 | not measured | open |" in page  # stage 1 alone


def test_a_part_whose_package_is_missing_stays_open(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_parts, "find_spec", lambda module: None)
    PartRun("zero2_3b", tmp_path, cpu=True).execute()
    assert "| open, deepspeed is not installed: `bash" in gpu_check.part_table(tmp_path, cpu=True)


def test_the_error_that_a_log_ends_with_is_found():
    log = "step 1\nTraceback:\nValueError: --deepspeed x: no such file\n[INFO] Killing subprocess 7\n\n"
    assert common.last_error(log) == "ValueError: --deepspeed x: no such file"
    assert common.last_error("rank 0: error: out of memory\nbye") == "rank 0: error: out of memory"
    assert common.last_error("") == "it printed nothing"


@pytest.mark.slow
def test_a_part_that_trains_runs_on_a_cpu(tmp_path):
    done = gpu_check_sh("--parts", "zero3_7b", "--output-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_zero3_7b.json").read_text())["rows"]
    assert [row["stage"] for row in rows] == [1, 2] and all(row["estimate_gib"] > 0 for row in rows)
