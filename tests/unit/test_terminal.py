"""Help and dry runs fit the terminal's width, and their commands are read back by a shell as they were."""

import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from paths import ROOT
from shell import bash, only

from llava.utils import terminal

WIDTHS = (80, 120)
WITHOUT_HELP = {"check_flags", "variable_check", "data_arm", "record"}
PROGRAMS = sorted(
    path
    for folder in ("llava", "playground", "benchmarks", "patches")
    for path in (ROOT / folder).rglob("*.py")
    if path.stem not in WITHOUT_HELP and path.parent.name != "peers" and '__name__ == "__main__"' in path.read_text()
)
_COMMAND = re.compile(r"^ {2,4}([a-z][a-z0-9-]+)(?: {2,}|$)", re.MULTILINE)


def too_wide(text: str, width: int) -> list[str]:
    """The lines of more than `width` columns."""
    return [line for line in text.splitlines() if len(line) > width]


def words_of(command: str) -> list[str]:
    """The words that a shell makes of a command of several lines."""
    printed = subprocess.run(["bash", "-c", f'printf "%s\\0" {command}'], capture_output=True, text=True, check=True)
    return printed.stdout.split("\0")[:-1]


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def help_of(monkeypatch, capsys):
    """What a program prints for `--help`, run within this process."""

    def told(path, *words, width):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "argv", [str(path), *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
            sys.exit()
        assert not ended.value.code
        return capsys.readouterr().out

    return told


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_help_of_every_program_and_its_commands_fits_the_terminal(path, help_of):
    for width in WIDTHS:
        text = help_of(path, width=width)
        assert len(text) > 100 and too_wide(text, width) == []
        for command in _COMMAND.findall(text.partition("\n  command\n")[2].partition("\noptions:")[0]):
            assert too_wide(help_of(path, command, width=width), width) == []


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.stem)
def test_the_help_of_every_script_fits_the_narrowest_terminal(path):
    if path.stem in ("help", "lib"):
        return
    told = bash(str(path), "--help", LLAVA_PYTHON="false")
    assert told.returncode == 0 and told.stdout and too_wide(told.stdout, 80) == []


def test_help_keeps_paragraphs_tables_and_commands_and_cuts_no_word():
    text = (
        "Shows what is there, and what\nis not.\n\n"
        "    python -m llava.show --data_path DATA --seed 42 others\n"
        "    --long-option        a meaning of several\n"
        "                         words\n"
        "    - an entry\n    - another\nAt last."
    )
    assert terminal.reflowed(text, 46).splitlines() == [
        "Shows what is there, and what is not.",
        "",
        "    python -m llava.show --data_path DATA \\",
        "      --seed 42 others",
        "    --long-option        a meaning of several",
        "                         words",
        "    - an entry",
        "    - another",
        "At last.",
    ]
    assert terminal.hung("  name   ", "see /a/path/that/is/longer/than/the/line for-it", 24).splitlines() == [
        "  name   see",
        "/a/path/that/is/longer/than/the/line",
        "         for-it",
    ]


# --- dry runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_dry_run_fits_the_terminal_and_its_command_is_the_one_that_runs(stage, width, tmp_path):
    flags = ["--run_name", "it's a name", "--mm_projector_lr=1e-4", "--lr_scheduler_kwargs", '{"a": [1, 2], "b": "$x"}']
    settings = {"NUM_GPUS": 0, "LLAVA_PYTHON": "false", "COLUMNS": width, "MASTER_PORT": 29500}
    shown = bash(f"scripts/{stage}.sh", *flags, DRY_RUN=1, **settings).stdout
    assert too_wide(shown, width) == []
    command = shown.partition("command\n")[2].partition("\ninputs\n")[0]
    data = json.loads(bash(f"scripts/{stage}.sh", *flags, DRY_RUN="json", **settings).stdout)
    assert words_of(command) == data["command"]


def test_a_broken_command_is_read_back_word_for_word():
    words = ["env", "A=", "python", "-m", "x", "--name", "it's", "--json", '{"a": 1}', "--x", "-2", "y" * 90, "$z"]
    for width in range(20, 121):
        text = terminal.command([[shlex.quote(w) for w in words[:5]], [shlex.quote(w) for w in words[5:]]], width, "  ")
        assert words_of(text) == words
        assert all("y" * 90 in line or len(line) <= width for line in text.splitlines()), width


def test_what_goes_to_a_pipe_is_80_columns_wide():
    code = "from llava.utils.terminal import columns; print(columns())"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=only(), capture_output=True)
    assert int(run.stdout) == 80


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


@pytest.mark.parametrize("module", [*QUICK, "llava.model.merge_lora", "benchmarks.run_all"])
def test_help_imports_no_package_that_takes_time(module):
    assert not imported_by(module, "--help") & {"torch", "transformers", "gradio", "deepspeed", "numpy", "pyarrow"}


@pytest.mark.slow
def test_the_check_of_a_dry_runs_flags_imports_no_model():
    imported = imported_by("llava.train.check_flags", "--model_name_or_path", "x", "--output_dir", "y")
    assert "transformers.training_args" in imported
    assert not imported & {"peft", "transformers.modeling_utils", "transformers.trainer", "deepspeed"}
