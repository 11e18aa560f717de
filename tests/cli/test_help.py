"""Every program has a help that comes at once, and a dry run's command is the one that runs."""

import json
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from paths import ROOT
from shell import bash, only

WITHOUT_HELP = {"settings", "record", "harness"}  # hands all further words to a harness
PROGRAMS = sorted(
    path
    for folder in ("llava", "playground", "benchmarks", "patches")
    for path in (ROOT / folder).rglob("*.py")
    if path.stem not in WITHOUT_HELP and path.parent.name != "peers" and '__name__ == "__main__"' in path.read_text()
)
_COMMAND = re.compile(r"^ {2,4}([a-z][a-z0-9-]+)(?: {2,}|$)", re.MULTILINE)


def words_of(command: str) -> list[str]:
    """The words that a shell makes of a command of several lines."""
    printed = subprocess.run(["bash", "-c", f'printf "%s\\0" {command}'], capture_output=True, text=True, check=True)
    return printed.stdout.split("\0")[:-1]


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def help_of(monkeypatch, capsys):
    """What a program prints for `--help`, run within this process."""

    def told(path, *words):
        monkeypatch.setattr(sys, "argv", [str(path), *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
            sys.exit()
        assert not ended.value.code
        return capsys.readouterr().out

    return told


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_program_and_its_commands_have_a_help(path, help_of):
    text = help_of(path)
    assert len(text) > 100
    for command in _COMMAND.findall(text.partition("\n  command\n")[2].partition("\noptions:")[0]):
        assert len(help_of(path, command)) > 100


@pytest.mark.parametrize("script", ["pretrain", "finetune", "compare", "quickstart", "evaluate"])
def test_the_help_of_a_script_is_its_python_commands_and_makes_no_environment(script, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "llava").symlink_to(ROOT / "llava")
    told = bash(str(tmp_path / f"scripts/{script}.sh"), "--help", cwd=tmp_path, LLAVA_PYTHON=sys.executable)
    assert told.returncode == 0 and told.stdout.startswith("usage: "), told.stderr
    assert not (tmp_path / ".venv").exists()


def test_help_without_an_environment_says_how_to_make_one(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    told = bash(str(tmp_path / "scripts/compare.sh"), "--help", cwd=tmp_path, LLAVA_PYTHON="")
    assert told.returncode == 2 and "bash scripts/setup.sh" in told.stderr and "Traceback" not in told.stderr


# --- dry runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_the_command_of_a_dry_run_is_the_one_that_runs(stage):
    flags = ["--run_name", "it's a name", "--mm_projector_lr=1e-4", "--lr_scheduler_kwargs", '{"a": [1, 2], "b": "$x"}']
    settings = {"NUM_GPUS": 0, "LLAVA_PYTHON": "false", "MASTER_PORT": 29500}
    shown = bash(f"scripts/{stage}.sh", *flags, DRY_RUN=1, **settings).stdout
    command = shown.partition("command\n")[2].partition("\ninputs\n")[0]
    data = json.loads(bash(f"scripts/{stage}.sh", *flags, DRY_RUN="json", **settings).stdout)
    assert words_of(command) == data["command"]


LISTED = """
import atexit, runpy, sys
atexit.register(lambda: print(*(name for name, module in sys.modules.items() if module), file=sys.stderr))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def imported_by(module: str, *words: str, **variables: str) -> set[str]:
    """The modules that `python -m module words` has imported when it ends; it must succeed."""
    command = [sys.executable, "-c", LISTED, module, *words]
    run = subprocess.run(command, cwd=ROOT, env=only(**variables), capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return set(run.stderr.splitlines()[-1].split())


def test_a_dry_run_imports_no_package_that_takes_time():
    flags = ["--output_dir", "x", "--per_device_train_batch_size", "1"]
    settings = {"DRY_RUN": "1", "NUM_GPUS": "0", "GLOBAL_BATCH": "1", "PYTHON_BIN": "no/python"}
    imported = imported_by("llava.launch", "llava/train/train_mem.py", *flags, **settings)
    assert "llava.launch.plan" in imported
    assert not imported & {"torch", "transformers", "deepspeed", "peft", "numpy", "yaml", "jinja2", "pyarrow"}


QUICK = ("llava.serve.web", "llava.serve.cli", "llava.eval.evaluate", "llava.eval.answer", "llava.eval.run_llava")


@pytest.mark.parametrize("module", [*QUICK, "llava.model.merge_lora"])
def test_help_imports_no_package_that_takes_time(module):
    assert not imported_by(module, "--help") & {"torch", "transformers", "gradio", "deepspeed", "numpy", "pyarrow"}
