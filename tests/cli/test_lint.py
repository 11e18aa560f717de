"""The checks that run no code: commits, scripts/test.sh and the hosted workflow all call the same ones."""

import re
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

CHECKS = re.search(r'CHECKS="(.*)"', (ROOT / "scripts/lint.sh").read_text())[1].split()


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
