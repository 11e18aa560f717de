"""Fixtures for every test, and the order of the files; what tests import is in `helpers`.

Libraries are imported where they are needed: the process that hands the files to the workers needs none of them.
"""

import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if instructions := os.environ.get("ATEN_CPU_CAPABILITY"):  # what the compiler's cache holds may be for other ones
    own = f"torchinductor_{instructions}_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), own))
# A shell makes what it starts in the background ignore Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest


def pytest_collection_modifyitems(items):
    """Files with slow tests come first: if one began last, the other workers would have nothing to do meanwhile."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# With CI_STRICT=1 every other skip is a failure: a download that failed, a package or a history that is not there.
MAY_SKIP = (
    "needs an NVIDIA GPU",
    "a CPU would be compared with itself",
    "'bitsandbytes'",
    "the web page needs",  # bash scripts/test_all.sh browser has an environment for it
    "needs Playwright",
    "upstream's tokenizers 0.15.1 has wheels for",
    "LLaVA-NeXT is not on PyPI",
    "only root can",
    "no network namespace",
)


def without_unlisted_skips(report):
    """The report, as a failure if it is of a skip that CI_STRICT=1 does not allow."""
    unlisted = report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI_STRICT") == "1"
    if unlisted and not any(reason in report.longrepr[2] for reason in MAY_SKIP):
        report.outcome, report.longrepr = "failed", f"CI_STRICT=1, and no reason to skip: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return without_unlisted_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return without_unlisted_skips((yield))


def pytest_collection_finish():
    """Keeps garbage collection from looking through all imported modules, which takes as long as a tiny training."""
    gc.freeze()


@pytest.fixture(autouse=True)
def cut_pictures_are_faults():
    """lmms-eval, where a test imports it, tells Pillow to fill up cut pictures, for the whole process."""
    yield
    if pillow := sys.modules.get("PIL.ImageFile"):
        pillow.LOAD_TRUNCATED_IMAGES = False


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with `llama`, `qwen`, `llama_tied`, `qwen_tied` and tokenizers; `siglip`, `clip`; records and images."""
    from tiny_models import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory):
    """A function from a norm's name to a checkpoint folder that tells warm colours (Yes) from cold ones (No).

    Trained by the real entry point on one-coloured `<colour>.png` in `tiny/data/images` and `QUESTIONS`, plain and with
    `POPE_SUFFIX`.
    """
    from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM
    from PIL import Image
    from training import flags

    from llava.train.train import train

    records = []
    for colour, value in COLOURS.items():
        Image.new("RGB", (20, 16), value).save(tiny / f"data/images/{colour}.png")
        answer = {"from": "gpt", "value": "Yes" if colour in WARM else "No"}
        for question in QUESTIONS:
            turns = [{"from": "human", "value": f"<image>\n{question}{POPE_SUFFIX}"}, answer]
            records.append({"id": f"{colour} {question}", "image": f"{colour}.png", "conversations": turns})
    (tiny / "data/colours.json").write_text(json.dumps(records))
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train_with(norm):
        options = {"version": "qwen_1_5", "data_path": tiny / "data/colours.json", "per_device_train_batch_size": 8}
        options |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_steps": 40, "telemetry_steps": 100}
        train(flags(tiny, folder / norm, 2, norm=norm, **options))
        return folder / norm

    return train_with


@pytest.fixture(scope="session")
def tokenizer():
    from tiny_models import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def files_count_as_old(monkeypatch):
    """Files written in the test count as written long ago, so that their time stamps are trusted."""
    monkeypatch.setattr("llava.utils.digests._CLOCK_STEP", 0.0)


@pytest.fixture(scope="module")
def browser():
    """Playwright's browser, a Chromium that is there."""
    library = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no Chromium: none of {', '.join(BROWSERS)} on PATH (Debian: apt-get install {BROWSERS[0]})")
    with library.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from the source distribution, which is made from nothing but `sources`."""
    from paths import ROOT

    sources = ("llava", "scripts", "deepspeed_configs", "pyproject.toml", "README.md", "LICENSE")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in sources:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.whl")
    return file
