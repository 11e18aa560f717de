"""The pages are true: links lead somewhere, commands and flags exist, quoted messages are what the code prints."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from messages import is_printed
from paths import ROOT

from llava.launch.settings import NAMES, OTHERS

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


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", re.sub("`[^`]*`", "", prose(page)))
    wrong = []
    for path, anchor in links:
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{path}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_every_file_of_this_tree_that_a_page_names_is_there(page):
    rooms = "llava|scripts|tests|docs|benchmarks|patches|notebooks|deepspeed_configs|playground"
    named = re.findall(rf"`((?:{rooms})/[\w/.-]+\.(?:py|sh|md|json|yaml|ipynb|sbatch))`", PAGES[page])
    assert [path for path in named if "playground/data/" not in path and not (ROOT / path).exists()] == []


# ---- the Chinese pages ----------------------------------------------------------------------------------------------


# ---- references -----------------------------------------------------------------------------------------------------


def pinned(package: str) -> bool:
    """Whether the version here is that of constraints.txt, whose flags the pages list."""
    return f"\n{package}=={version(package)} " in (ROOT / "constraints.txt").read_text().replace("\n", " \n")


@pytest.mark.slow
@pytest.mark.skipif(not pinned("transformers"), reason="another transformers than the pinned one has other flags")
@pytest.mark.parametrize("name", ["flags.md", "variables.md"])
def test_the_references_in_the_tree_are_what_the_code_says(name):
    written = runpy.run_path(str(ROOT / "docs/references.py"))["page"](name)
    assert PAGES[f"docs/{name}"] == written, "run: python docs/references.py"


# ---- commands -------------------------------------------------------------------------------------------------------

# What other people's programs take is theirs to check.
OUTSIDE = {
    "apt-get", "cat", "cp", "curl", "deepspeed", "docker", "grep", "hf", "llama-mtmd-cli", "llama-server", "mkdocs",
    "pip", "pre-commit", "swift", "tar", "torchrun", "trackio", "vllm", "wandb",
}  # fmt: skip
OUTSIDE_VARIABLES = {"CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "VLLM_PLUGINS", "WANDB_MODE"}
OWN = ("llava", "playground", "benchmarks")
WITHOUT_HELP = ("llava.eval.harness",)  # hands all further words to a harness
WITH_COMMANDS = ("llava.analysis", "llava.compare", "llava.export", "playground")
# The parser behind a script's further flags.
BEHIND = {
    "scripts/pretrain.sh": "llava.train.train",
    "scripts/finetune.sh": "llava.train.train",
    "scripts/evaluate.sh": "llava.eval.evaluate",
    "scripts/compare.sh": "llava.compare run",
    "scripts/reproduce.sh": "llava.compare reproduce",
    "scripts/quickstart.sh": "llava.compare quickstart",
    "scripts/analyze.sh": "llava.analysis all",
}


def blocks() -> list[tuple[str, str]]:
    """Every block of shell commands, and every command within a sentence, with its page."""
    found = [(page, text) for page, whole in PAGES.items() for kind, text in FENCE.findall(whole) if kind == "bash"]
    starts = r"(?:[A-Z_]+=\S* )*(?:python -m |bash |sbatch )"
    spans = ((page, span) for page in PAGES for span in re.findall(r"`([^`]+)`", prose(page)))
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


def split_variables(words: list[str]) -> tuple[list[str], list[str]]:
    """The variables that stand before a command, and the command."""
    words = words[words[0] == "export" :]
    count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_0-9]+=", word)), len(words))
    return [word.split("=")[0] for word in words[:count]], words[count:]


def own_module(words: list[str]) -> tuple[str, ...] | None:
    """The module of this tree that a command calls, with its subcommand where it has one."""
    if words[1:2] != ["-m"] or words[2].split(".")[0] not in OWN or words[2] in WITHOUT_HELP:
        return None
    takes_command = words[2] in WITH_COMMANDS and len(words) > 3 and re.fullmatch("[a-z][a-z0-9-]*", words[3])
    return tuple(words[2 : 3 + bool(takes_command)])


BLOCKS = blocks()
CALLS = [(page, words) for page, text in BLOCKS for words in commands(text)]
CALLED = sorted({call for _, words in CALLS if (rest := split_variables(words)[1]) and (call := own_module(rest))})
HELP = """
import contextlib, io, json, runpy, sys
told = {}
for call in json.loads(sys.argv[1]):
    sys.argv, out = [*call, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit, ImportError):
        runpy.run_module(call[0], run_name="__main__", alter_sys=True)
    told[" ".join(call)] = out.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What every module that a page calls prints for --help, from one process."""
    calls = [*CALLED, *(tuple(command.split()) for command in sorted(set(BEHIND.values())))]
    command = [sys.executable, "-c", HELP, json.dumps(calls)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("page", sorted({page for page, _ in BLOCKS}))
def test_blocks_of_commands_are_shell(page):
    for name, text in BLOCKS:
        if name == page:
            run = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert run.returncode == 0 and not run.stderr, f"{text}\n{run.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLED, ids=" ".join)
def test_every_module_that_a_page_calls_is_there_and_has_that_command(call, helps):
    path = ROOT / call[0].replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    assert "usage:" in helps[" ".join(call)], f"python -m {' '.join(call)} --help said nothing"


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, _ in CALLS}))
def test_every_flag_variable_and_script_that_a_page_uses_is_known(page, helps):
    wrong = []
    for name, words in CALLS:
        if name == page:
            wrong += [f"{' '.join(words)}: {fault}" for fault in faults(words, helps)]
    assert wrong == []


def faults(words: list[str], helps: dict[str, str]) -> list[str]:
    """What is wrong with one command of a page."""
    variables, words = split_variables(words)
    if not words:
        return [name for name in variables if name not in NAMES]
    program = Path(words[0]).name
    ours = r"(?:\./)?(?:scripts|tests|benchmarks|examples|patches|deepspeed_configs)/"
    files = [word for word in words if re.match(ours, word)]
    missing = [f"{word} is not there" for word in files if not (ROOT / word.split("::")[0]).exists()]
    if missing:
        return missing
    script = next((word for word in files if word.endswith((".sh", ".sbatch", ".py"))), "")
    if program == "bash" and not script:
        return ["it calls no script of this tree"]
    if script and (program in ("bash", "sbatch") or script == words[1]):
        return script_faults(script, variables, words[words.index(script) + 1 :], helps)
    if program.startswith("python"):
        call = own_module(words)
        known = helps[" ".join(call)] if call else None
        return [] if known is None else unknown_flags(words[3:], known)
    return [] if program in (*OUTSIDE, "sbatch", "source") else [f"{program} is no program that the pages may use"]


def script_faults(script: str, variables: list[str], words: list[str], helps: dict[str, str]) -> list[str]:
    text = (ROOT / script).read_text()
    head = text if script.endswith(".py") else "\n".join(re.findall("^#.*", text, re.MULTILINE))
    known = {*re.findall(r"\b[A-Z][A-Z_0-9]+\b", head), *OUTSIDE_VARIABLES}
    if script in BEHIND or script.endswith(".sbatch"):
        known |= NAMES.union(OTHERS.split())
    wrong = [f"{name} is no variable of {script}" for name in variables if name not in known]
    if script == "scripts/test.sh":  # pytest's
        return wrong
    return wrong + unknown_flags(words, text + helps.get(BEHIND.get(script, ""), ""))


def unknown_flags(words: list[str], known: str) -> list[str]:
    flags = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return [f"{flag} is unknown" for flag in sorted(flags) if not re.search(rf"{flag}(?![\w-])", known)]


# ---- messages -------------------------------------------------------------------------------------------------------

ROWS = re.findall(r"^\| (`.*?) \| ", PAGES["docs/troubleshooting.md"], re.MULTILINE)
QUOTED = [text for row in ROWS for text in re.findall(r"^`([^`]{20,})`$", row)]


@pytest.mark.parametrize("message", QUOTED)
def test_every_quoted_message_is_one_that_the_code_prints(message):
    assert is_printed(message), "no whole line of text in llava/ or scripts/ becomes this"
