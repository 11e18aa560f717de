"""benchmarks/gpu_check.sh on the CPU, and benchmarks/train_step.py, which measures most of its figures."""

import argparse
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from paths import ROOT
from warm_python import warm_python

from benchmarks import common, gpu_check, gpu_parts, shapes, train_step
from benchmarks.gpu_parts import FAILED, MEASURED, PartRun

# --- one step ---------------------------------------------------------------------------------------------------------


def step_rows(monkeypatch, tmp_path, *arms: str) -> tuple[int, dict[str, dict]]:
    """The exit status of train_step with tiny micro-batches, and its rows by arm."""
    words = ["--preset", "tiny", "--steps", "2", "--repeats", "1", "--micro-batches", "2", "--stages", "2"]
    words += ["--output-dir", str(tmp_path), "--micro-batch-tokens", "100", "--arms", *arms]
    monkeypatch.setattr(sys, "argv", ["train_step", *words])
    status = train_step.main()
    return status, {row["arm"]: row for row in json.loads((tmp_path / "train_step.json").read_text())["rows"]}


@pytest.mark.slow
def test_a_step_is_measured_and_its_arms_agree(monkeypatch, tmp_path):
    status, rows = step_rows(monkeypatch, tmp_path, "packed", "padded")
    assert status == 0 and not any("failed" in row for row in rows.values())
    assert rows["packed"]["loss"] == pytest.approx(rows["padded"]["loss"], rel=1e-4)
    assert all(row["tokens_per_second"] > 0 for row in rows.values())


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "billions"), [("llama-3.2-3b", 3.21), ("qwen2.5-7b", 7.62)])
def test_shapes_have_the_published_number_of_parameters(preset, billions):
    model = shapes.build_llava(shapes.PRESETS[preset], torch.device("meta"), torch.bfloat16)
    model.get_model().vision_tower = model.get_model().mm_projector = None
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_part_that_runs_into_its_limit_keeps_the_rows_that_it_wrote(monkeypatch, tmp_path):
    name, file = "zero3_3b", "rows.json"
    args = argparse.Namespace(output_dir=tmp_path, cpu=True, limit=2.0)
    work = PartRun(name, tmp_path, cpu=True).work
    work.mkdir(parents=True)
    program = tmp_path / "python"
    program.write_text(f"""#!/bin/sh\necho '{{"rows": [{{"arm": "packed"}}]}}' >{work}/{file}\nsleep 97\n""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    gpu_check.run_part(name, args, limit=2.0)
    result = gpu_check.read(tmp_path, name, cpu=True)
    assert result["status"] == FAILED and result["reason"].startswith("it took longer than 2 s (--limit), see ")
    assert result["rows"] == [{"arm": "packed"}] and not work.exists()
    program.write_text("#!/bin/sh\nsleep 97 &\nkill -9 $$\n")  # a part that is killed leaves nothing running
    gpu_check.run_part(name, args, limit=30.0)
    assert "it ended and left no result" in gpu_check.read(tmp_path, name, cpu=True)["reason"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "97"]]


def test_a_run_that_saves_nothing_is_ended_with_all_it_started_at_its_last_step(tmp_path):
    log = tmp_path / "steps"
    command = ["sh", "-c", f"sleep 98 & echo loss >{log}; wait"]
    began = time.monotonic()
    printed = common.run_logged(command, tmp_path / "log", enough=lambda: log.is_file() and "loss" in log.read_text())
    assert time.monotonic() - began < 30 and printed == ""
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98"]]


def test_a_resumed_run_with_other_losses_fails_and_keeps_the_row(monkeypatch, tmp_path):
    def train(part, stage, variables, *flags, name=""):
        (part.work / f"stage{stage}/checkpoint-2").mkdir(parents=True, exist_ok=True)
        assert variables["DEEPSPEED_CONFIG"].endswith("zero2.json") and variables["MAX_STEPS"] == 4
        return [{"loss": 1.5 if name == "resumed" else 1.0, "peak_memory_gib": 1.0}] * 2, ""

    monkeypatch.setattr(gpu_parts, "train", train)
    monkeypatch.setattr(gpu_parts, "run_logged", lambda *_: "")
    PartRun("resume_zero2", tmp_path, cpu=True).execute()
    result = gpu_check.read(tmp_path, "resume_zero2", cpu=True)
    assert result["status"] == FAILED and result["rows"][0]["last_loss"] == 1.0
    assert result["reason"].startswith("the losses after checkpoint-2 are [1.5, 1.5] when resumed, and were [1.0, 1.0]")


def test_calls_of_ten_minutes_run_what_fits_and_measure_all_in_the_end(monkeypatch, tmp_path, capsys):
    """Parts take their estimated time on a clock of their own."""

    def run_part(name, args, limit):
        limits.append(limit)
        clock[0] += gpu_parts.PARTS[name].seconds
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
            first = ["step_3b", "tests", "zero2_3b", "zero3_3b"]
            assert sorted(path.stem.removeprefix("gpu_") for path in tmp_path.glob("gpu_*")) == first
            text = "zero3_7b     open: takes about 190 s, 35 are left of --minutes 10; rerun the same command"
            assert text in capsys.readouterr().out
    assert {path.stem for path in tmp_path.glob("gpu_*")} == {f"gpu_{name}" for name in gpu_parts.PARTS}
    assert all(50 < limit < 600 for limit in limits)


def test_a_comparison_that_fails_in_stage_2_keeps_stage_1(monkeypatch, tmp_path):
    def run_logged(part, *_):
        (part.work / "vs_upstream_3b_pretrain.json").write_text('{"rows": [{"stage": "pretrain"}]}')
        raise common.Failed("ended with 1")

    (tmp_path / "transformers").mkdir()
    monkeypatch.setenv("UPSTREAM_PACKAGES", str(tmp_path))
    monkeypatch.setattr(gpu_parts, "run_logged", run_logged)
    PartRun("vs_upstream", tmp_path, cpu=True).execute()
    result = gpu_check.read(tmp_path, "vs_upstream", cpu=True)
    assert result["status"] == FAILED and result["rows"] == [{"stage": "pretrain"}]


def test_a_step_waits_for_the_package_that_its_arms_need(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_parts, "run_logged", lambda *_: pytest.fail("ran without some of its arms"))
    PartRun("step_3b", tmp_path, cpu=False).execute()
    result = json.loads((tmp_path / "gpu_step_3b.json").read_text())
    assert (result["status"], result["reason"]) == (gpu_parts.NOT_RUN, "liger_kernel is not installed")


@pytest.mark.slow
def test_a_part_that_trains_runs_on_a_cpu(tmp_path):
    command = ["bash", "benchmarks/gpu_check.sh", "--cpu", "--parts", "zero3_7b", "--output-dir", tmp_path]
    env = os.environ | {"LLAVA_PYTHON": str(warm_python())}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_zero3_7b.json").read_text())["rows"]
    assert [row["stage"] for row in rows] == [1, 2] and all(row["estimate_gib"] > 0 for row in rows)
