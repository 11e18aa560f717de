"""`llava.analysis all` and its script: which commands run on which checkpoints, and that a failure stops no other."""

import json

import pytest
from shell import bash

from llava.analysis import all as every
from llava.analysis.__main__ import main
from llava.analysis.commands import COMMANDS

ALL = list(COMMANDS)


@pytest.fixture
def analyze(tmp_path, monkeypatch, capfd):
    """Runs the command with a stand-in for Python; returns status, output, and the command lines by command."""
    calls, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\necho "$@" >>{calls}\n[ "$1" != "$FAILING" ] || exit $STATUS\n')
    python.chmod(0o755)
    monkeypatch.setattr(every.sys, "executable", str(python))

    def run(*words, failing="", status=1):
        calls.write_text("")
        monkeypatch.setenv("FAILING", failing)
        monkeypatch.setenv("STATUS", str(status))
        code = main(["all", *map(str, words), "--output-dir", "out"])
        lines = [line.split() for line in calls.read_text().splitlines()]
        return code, capfd.readouterr(), {line[0]: line[1:] for line in lines}

    return run


def checkpoint(folder, model_type="llava_llama", norm="none"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "mm_projector_norm": norm}, indent=2))
    return folder


def models(words):
    return [words[i + 1] for i, word in enumerate(words) if word == "--model"]


@pytest.mark.parametrize("norm", ["gwc_rmsnorm", "clip", "of_a_plug_in"])
def test_every_command_runs_on_the_checkpoints_it_is_about(tmp_path, analyze, norm):
    paths = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", "llava_qwen", norm), checkpoint(tmp_path / "c", "x")
    named = [f"{name}={path}" for name, path in zip(("plain", "aligned", "other"), paths, strict=True)]
    status, output, calls = analyze(*named, "--samples", 7, "--data", "x.json")
    assert status == 0, output.err
    assert list(calls) == ALL
    for command, words in calls.items():
        assert models(words) == {"norm-params": named[1:2], "gradients": named[:2]}.get(command, named)
        assert words[-2:] == ["--output-dir", "out"]
        assert ("--samples 7" in " ".join(words)) == (command not in ("embedding-norms", "norm-params", "gradients"))
        assert ("--data x.json" in " ".join(words)) == (command not in ("embedding-norms", "norm-params"))


def test_a_failure_stops_no_other_and_what_does_not_apply_is_reported(tmp_path, analyze):
    path = checkpoint(tmp_path / "a", "llava")
    status, output, calls = analyze(path, failing="layer-norms")
    assert status == 2 and output.err == "llava.analysis all: failed: layer-norms\n"
    assert list(calls) == [name for name in ALL if name not in ("norm-params", "gradients")]
    assert "skipped: no checkpoint has a norm" in output.out
    status, _, calls = analyze(path, "--commands", "theory attention")
    assert status == 0 and list(calls) == ["theory", "attention"]


def test_an_interrupted_command_is_the_last(tmp_path, analyze):
    status, output, calls = analyze(checkpoint(tmp_path / "a"), failing="layer-norms", status=130)
    assert status == 130 and list(calls) == ALL[:3] and "rerun the same command to resume" in output.err


def test_wrong_input_is_refused_before_any_command_runs(tmp_path, analyze):
    path = checkpoint(tmp_path / "a")
    for words, message in (
        ((tmp_path / "nowhere",), "no usable config.json"),
        ((path, path), "names two models"),
        ((path, "--commands", "theory,atention"), "found atention"),
    ):
        status, output, calls = analyze(*words)
        assert status == 2 and not calls
        assert message in output.err and output.err.count("\n") == 1


def test_the_script_passes_its_variables_and_flags_on(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "<%s> " "$@"\n')
    python.chmod(0o755)
    env = {"LLAVA_PYTHON": python, "OUTPUT_DIR": "my out", "DATA": "", "SAMPLES": 7, "COMMANDS": "theory attention"}
    done = bash("scripts/analyze.sh", "a=CKPT", "--samples", "8", **env)
    words = "<all> <--output-dir> <my out> <--samples> <7> <--commands> <theory attention> <a=CKPT> <--samples> <8>"
    assert done.stdout.strip().endswith(words)
