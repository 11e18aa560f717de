"""`scripts/analyze.sh`: which commands run on which checkpoints, and that a failure is reported after the others."""

import json

import pytest
from shell import bash

ALL = ["interface-norms", "embedding-norms", "layer-norms", "update-rates", "norm-params", "gradients"] + [
    "attention",
    "interventions",
    "theory",
]


@pytest.fixture
def analyze(tmp_path):
    """Runs the script with a stand-in for Python; returns its result and the command lines, by command."""
    calls, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\necho "$@" >>{calls}\n[ "$1" != "$FAILING" ]\n')
    python.chmod(0o755)

    def run(*checkpoints, **env):
        calls.write_text("")
        done = bash("scripts/analyze.sh", *map(str, checkpoints), LLAVA_PYTHON=python, OUTPUT_DIR="out", **env)
        lines = [line.split() for line in calls.read_text().splitlines()]
        return done, {line[0]: line[1:] for line in lines}

    return run


def checkpoint(folder, model_type="llava_llama", norm="none"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "mm_projector_norm": norm}, indent=2))
    return folder


def models(words):
    return [words[i + 1] for i, word in enumerate(words) if word == "--model"]


def test_every_command_runs_on_the_checkpoints_it_is_about(tmp_path, analyze):
    plain, normed = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", "llava_qwen", "gwc_rmsnorm")
    other = checkpoint(tmp_path / "c", "llava")
    done, calls = analyze(plain, f"aligned={normed}", other, SAMPLES=7, DATA="x.json")
    assert done.returncode == 0, done.stderr
    assert list(calls) == ALL
    everything = [str(plain), f"aligned={normed}", str(other)]
    for command, words in calls.items():
        expected = {"norm-params": everything[1:2], "gradients": everything[:2]}.get(command, everything)
        assert models(words) == expected
        assert words[-2:] == ["--output-dir", "out"]
        assert ("--samples 7" in " ".join(words)) == (command not in ("embedding-norms", "norm-params", "gradients"))
        assert ("--data x.json" in " ".join(words)) == (command not in ("embedding-norms", "norm-params"))


def test_a_failure_does_not_stop_the_others_and_what_does_not_apply_is_said(tmp_path, analyze):
    done, calls = analyze(checkpoint(tmp_path / "a", "llava"), FAILING="layer-norms")
    assert done.returncode == 2 and "failed: layer-norms" in done.stderr
    assert list(calls) == [name for name in ALL if name not in ("norm-params", "gradients")]
    assert "skipped: no checkpoint has a norm" in done.stdout
    done, calls = analyze(tmp_path / "a", COMMANDS="theory attention")
    assert done.returncode == 0 and list(calls) == ["theory", "attention"]
    assert analyze(tmp_path / "a", SAMPLES="many")[0].returncode == 2
