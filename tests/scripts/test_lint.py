"""The checks that run no code: commits, scripts/test.sh and the hosted workflow all call the same ones."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from paths import ROOT

CHECKS = re.search(r'CHECKS="(.*)"', (ROOT / "scripts/lint.sh").read_text())[1].split()
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


@pytest.fixture
def lint(tmp_path):
    """A function that runs scripts/lint.sh in a new git repository that holds a few scripts and nothing else."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("lint", "lib", "setup"):
        shutil.copy(ROOT / f"scripts/{name}.sh", scripts)
    (tmp_path / "llava").symlink_to(ROOT / "llava")
    (tmp_path / ".gitignore").write_text("llava\n")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def run(*words):
        command = ["env", f"LLAVA_PYTHON={sys.executable}", "bash", scripts / "lint.sh", *words]
        return subprocess.run(command, capture_output=True, text=True)

    run.tree = tmp_path
    return run


def test_every_hook_of_a_commit_is_one_of_the_checks():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    calls = [hook["entry"].removeprefix("env FIX=1 ") for hook in repository["hooks"]]
    assert calls == [f"bash scripts/lint.sh {check}" for check in CHECKS]
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_the_whole_test_runs_all_checks():
    assert "\nbash scripts/lint.sh\n" in (ROOT / "scripts/test.sh").read_text()


def test_the_workflow_calls_the_same_scripts_as_everyone():
    jobs = WORKFLOW["jobs"]
    text = {name: " ".join(str(step.get("run", "")) for step in job["steps"]) for name, job in jobs.items()}
    assert "bash .ci/run" in text["test"] and "bash benchmarks/gpu_check.sh" in text["gpu"]
    oldest = re.search(r'requires-python = ">=([\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    assert jobs["test"]["strategy"]["matrix"]["python"][0] == oldest
    uses = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in uses)


def test_a_file_without_its_last_line_end_is_mended_and_refused(lint):
    file = lint.tree / "notes.txt"
    file.write_text("one \ntwo")
    assert lint("files").returncode == 1
    assert file.read_text() == "one\ntwo\n"
    assert lint("files").returncode == 0


def test_a_large_file_is_refused_by_name(lint):
    (lint.tree / "weights.bin").write_bytes(b"0" * 300_000)
    done = lint("files")
    assert done.returncode == 1 and "weights.bin (293 KB) exceeds 200 KB" in done.stdout


def test_a_faulty_shell_script_is_refused(lint):
    assert lint("shell").returncode == 0
    (lint.tree / "scripts/new.sh").write_text("#!/usr/bin/env bash\nrm -rf $1\n")
    done = lint("shell")
    assert done.returncode != 0 and "SC2086" in done.stdout


def test_an_unknown_check_is_refused_before_any_runs(lint):
    done = lint("files", "spelling")
    assert (done.returncode, done.stderr) == (2, f"error: spelling is not one of: {' '.join(CHECKS)}\n")


def test_outside_a_git_checkout_one_line_says_so(lint):
    shutil.rmtree(lint.tree / ".git")
    done = lint("files")
    assert done.returncode == 2 and "is not a git checkout" in done.stderr and done.stderr.count("\n") == 1
