"""The pages are true: links lead somewhere, commands and flags exist."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from paths import ROOT
from shell import bash

from llava.eval.tasks import choose
from llava.launch.settings import NAMES, OTHERS
from llava.model.multimodal_projector.norm import NORM_TYPES
from playground.options import PICTURES

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for pattern in ("*.md", "docs/**/*.md", "tests/*.md", "tests/golden/*.md", "patches/*.md", "benchmarks/*.md")
    for path in sorted(ROOT.glob(pattern))
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# ---- links ----------------------------------------------------------------------------------------------------------


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", PAGES[page])


def anchors(path: Path) -> set[str]:
    """The anchors of a page, as code hosts make them from its headings."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_every_link_leads_to_a_file_and_a_heading_of_it():
    wrong = []
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", re.sub("`[^`]*`", "", prose(page)))
        for path, anchor in links:
            target = (ROOT / page).parent / path if path else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page}: {path}#{anchor}")
    assert wrong == []


def test_every_file_of_this_tree_that_a_page_names_is_there():
    rooms = "llava|scripts|tests|docs|benchmarks|patches|notebooks|deepspeed_configs|playground"
    file = re.compile(rf"`((?:{rooms})/[\w/.-]+\.(?:py|sh|md|json|yaml|ipynb|sbatch))`")
    named = [(page, path) for page in PAGES if page != "CHANGELOG.md" for path in file.findall(PAGES[page])]
    assert [pair for pair in named if "playground/data/" not in pair[1] and not (ROOT / pair[1]).exists()] == []


# ---- references -----------------------------------------------------------------------------------------------------


def pinned(package: str) -> bool:
    """Whether the version here is that of constraints.txt, whose flags the pages list."""
    return f"\n{package}=={version(package)} " in (ROOT / "constraints.txt").read_text().replace("\n", " \n")


@pytest.mark.slow
@pytest.mark.skipif(not pinned("transformers"), reason="another transformers than the pinned one has other flags")
def test_the_references_in_the_tree_are_what_the_code_says():
    written = runpy.run_path(str(ROOT / "docs/references.py"))["page"]
    for name in ("flags.md", "variables.md"):
        assert PAGES[f"docs/{name}"] == written(name), "run: python docs/references.py"


# ---- commands -------------------------------------------------------------------------------------------------------

OUTSIDE_VARIABLES = {"CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "VLLM_PLUGINS", "WANDB_MODE"}
OWN = ("llava", "playground", "benchmarks")
WITHOUT_HELP = ("llava.eval.harness",)  # hands all further words to a harness
RECIPES = ("scripts/pretrain.sh", "scripts/finetune.sh")
# The parser behind a script's further flags.
BEHIND = {
    **dict.fromkeys(RECIPES, "llava.train.train"),
    "scripts/evaluate.sh": "llava.eval.evaluate",
    "scripts/compare.sh": "llava.compare run",
    "scripts/reproduce.sh": "llava.compare reproduce",
    "scripts/quickstart.sh": "llava.compare quickstart",
    "scripts/analyze.sh": "llava.analysis all",
}


def blocks() -> list[tuple[str, str]]:
    """Every block of shell commands, and every command within a sentence, with its page."""
    pages = sorted(PAGES.keys() - {"CHANGELOG.md"})  # which names what is gone
    found = [(page, text) for page in pages for kind, text in FENCE.findall(PAGES[page]) if kind == "bash"]
    starts = r"(?:[A-Z_]+=\S* )*(?:python -m |bash |sbatch )"
    spans = ((page, span) for page in pages for span in re.findall(r"`([^`]+)`", prose(page)))
    return found + [(page, span) for page, span in spans if re.match(starts, span) and "\n" not in span]


def commands(text: str) -> list[list[str]]:
    """The words of each command in a block, without comments, redirections and what a pipe leads to."""
    text = re.sub(r"(?m)(?:^|\s)#.*$", "", text).replace("\\\n", " ")
    text = re.sub(r"<\([^)]*\)", "FILE", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if not word.strip(";&|<>()\n"):
            redirected = word in (">", ">>", "<")
            if not redirected:
                found.append([])
        elif redirected:
            redirected = False
        else:
            found[-1].append(word)
    return [words for words in found if words]


def split_variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that stand before a command, with their values, and the command."""
    words = words[words[0] == "export" :]
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_0-9]+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def own_module(words: list[str]) -> list[str]:
    """The module of this tree that a command calls, and its words; empty for other people's."""
    is_own = words[1:2] == ["-m"] and words[2].split(".")[0] in OWN and words[2] not in WITHOUT_HELP
    return [word for word in words[2:] if word != "COMMAND"] if is_own else []


@cache
def help_after(*words: str) -> str:
    """What a module prints for its words and --help, within this process: its parser takes the words' values first."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")  # of runpy, about modules that are imported already
        patch.setattr(sys, "argv", [*words, "--help"])
        patch.setattr(os, "environ", os.environ.copy())
        with contextlib.suppress(SystemExit, ImportError):
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return out.getvalue()


@pytest.mark.slow
def test_every_command_flag_value_variable_and_script_that_a_page_uses_is_known():
    calls = {tuple(words): page for page, text in blocks() for words in commands(text)}  # some are on several pages
    assert [f"{page}: {' '.join(call)}: {fault}" for call, page in calls.items() for fault in faults([*call])] == []


def test_every_preset_norm_and_kind_of_pictures_that_a_page_sets_is_there():
    known = {"DEMO_DATA": PICTURES, "PRESET": [path.stem for path in (ROOT / "scripts/presets").iterdir()]}
    known["NORM"] = {*NORM_TYPES, "half_rmsnorm"}  # the plug-in of docs/models.md
    form = rf"\b({'|'.join(known)})=([\w.-]*\w)"
    given = {(page, *pair) for page in PAGES for pair in re.findall(form, PAGES[page])}
    assert len(given) > 20 and [each for each in given if each[2] not in known[each[1]]] == []


def faults(words: list[str]) -> list[str]:
    """What is wrong with one command of a page; what other people's programs take is theirs to check."""
    variables, words = split_variables(words)
    if not words:
        return [name for name in variables if name not in NAMES]
    ours = r"(?:\./)?(?:scripts|tests|benchmarks|examples|patches|deepspeed_configs)/"
    files = [word for word in words if re.match(ours, word)]
    if missing := [f"{word} is not there" for word in files if not (ROOT / word.split("::")[0]).exists()]:
        return missing
    script = next((word for word in files if word.endswith((".sh", ".sbatch", ".py"))), "")
    if script and (words[0] in ("bash", "sbatch") or script == words[1]):
        return script_faults(script, variables, words[words.index(script) + 1 :])
    return module_faults(own_module(words))


def script_faults(script: str, variables: dict[str, str], words: list[str]) -> list[str]:
    text = (ROOT / script).read_text()
    head = text if script.endswith(".py") else "\n".join(re.findall("^#.*", text, re.MULTILINE))
    known = {*re.findall(r"\b[A-Z][A-Z_0-9]+\b", head), *OUTSIDE_VARIABLES}
    recipe = f"scripts/{Path(script).stem}.sh"  # also a job's
    if script in BEHIND or script.endswith(".sbatch"):
        known |= NAMES.union(OTHERS.split())
    wrong = [f"{name} is no variable of {script}" for name in variables if name not in known]
    if script == "scripts/test.sh":  # pytest's
        return wrong
    if recipe in RECIPES and "--help" not in words:
        return wrong + recipe_faults(recipe, variables, words)
    if script not in BEHIND:
        return wrong + unknown_flags(words, text)
    tasks = ["--tasks", variables["TASKS"]] if "TASKS" in variables else []
    return wrong + module_faults([*BEHIND[script].split(), *tasks, *words])


def recipe_faults(script: str, variables: dict[str, str], words: list[str]) -> list[str]:
    """What the launcher refuses, and what the trainer's parser would refuse of the flags that it makes."""
    gpus = 0 if variables.get("PRESET") == "demo" else 8
    done = bash(script, *words, **{"NUM_GPUS": gpus, **variables, "DRY_RUN": "json"})
    if not done.stdout:
        return [done.stderr]
    run = json.loads(done.stdout)
    flags = run["command"][[Path(word).name for word in run["command"]].index("train_mem.py") + 1 :]
    wrong = [problem for problem in run["problems"] if problem.startswith("deepspeed")]
    return wrong if "PLUGINS" in variables else wrong + module_faults([BEHIND[script], *flags])


def module_faults(words: list[str]) -> list[str]:
    """What the module's parser refuses."""
    if not words:
        return []
    if "usage:" not in (text := help_after(*words)):
        return ["a word is refused, or its --help says nothing"]
    for tasks in re.findall(r"--tasks (\S+)", " ".join(words)):
        choose(tasks)
    return unknown_flags(words, text)


def unknown_flags(words: list[str], known: str) -> list[str]:
    flags = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return [f"{flag} is unknown" for flag in sorted(flags) if not re.search(rf"{flag}(?![\w-])", known)]
