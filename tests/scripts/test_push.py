"""`python -m llava.export push` against a stand-in for the hub: what is sent, what stays, what is refused."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from hub_server import OWNER, READER, WRITER, serve, use
from safetensors.torch import save_file

from llava.export.__main__ import main
from llava.export.push import sort_out
from llava.export.remote_code import code_files
from llava.utils.digests import bytes_digest

REPO = f"{OWNER}/model"
STAY = (
    "checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt", "optimizer.pt", "rng_state_0.pth", "resume.json",
    "training_args.bin", ".env", "id_rsa", "hub.token", ".llava_cache/x.json", ".git/config", "__pycache__/a.pyc",
    "runs/events", "notes.txt", "dump.bin", "pictures.npy", "prepare.py", "figures/other.png",
)  # fmt: skip
SENT = ("README.md", "config.json", "model.safetensors", "run.json", "train_log.jsonl", "figures/loss.png")


@pytest.fixture
def folder(tmp_path):
    """A folder with everything that a training run leaves."""
    folder = tmp_path / "ckpt"
    for name in (*STAY, *SENT):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    save_file({"a": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n![Loss](figures/loss.png)\n![Me](.env)\n")
    (folder / "config.json").write_text('{"model_type": "llava_llama"}')
    weights = folder / "model.safetensors"
    entry = {"size": weights.stat().st_size, "sha256": bytes_digest(weights)}
    (folder / "manifest.json").write_text(json.dumps({"files": {weights.name: entry}, "step": 10}))
    return folder


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, which huggingface_hub takes for the hub, with a token that may write."""
    with serve() as hub:
        use(hub, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield hub


def push(folder, *arguments, repo=REPO):
    return main(["push", "--repo", repo, "--model-path", str(folder), *arguments])


def refused(capsys):
    """The one line of a refusal."""
    line = capsys.readouterr().err
    assert line.startswith("llava.export push: ") and line.count("\n") == 1
    return line


def test_without_execute_it_only_says_what_it_would_do(folder, hub, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert push(folder) == 0 and not hub.models
    printed = capsys.readouterr().out
    for name in SENT:
        assert f"  {name}\n" in printed
    for name in ("checkpoint-10/", "optimizer.pt", ".env", "notes.txt", "dump.bin"):
        assert f"left out: {name} (not part of a model)\n" in printed
    assert "left out: figures/ (except what the card shows)\n" in printed
    assert "nothing was sent" in printed and f"in {len(SENT)} files" in printed


def test_what_is_sent_arrives_whole_and_the_rest_stays(folder, hub, capsys):
    assert push(folder, "--private", "--execute") == 0
    repository = hub.models[REPO]
    assert repository.private and set(repository.branches["main"]) == set(SENT)
    for name in SENT:
        assert repository.branches["main"][name] == (folder / name).read_bytes()
    assert f"sent: {hub.endpoint}" in capsys.readouterr().out


def test_a_second_time_nothing_is_sent_and_then_only_what_changed(folder, hub, capsys):
    assert push(folder, "--execute") == 0
    hub.received.clear()
    assert push(folder, "--execute") == 0
    assert hub.received == [] and f"has these {len(SENT)} files already; nothing was sent" in capsys.readouterr().out
    (folder / "train_log.jsonl").write_text("longer")
    assert push(folder, "--execute") == 0 and hub.received == ["train_log.jsonl"]


def test_a_branch_is_made_and_main_stays(folder, hub):
    assert push(folder, "--execute", "--revision", "step-10") == 0
    assert set(hub.models[REPO].branches["step-10"]) == set(SENT) and hub.models[REPO].branches["main"] == {}
    assert push(folder, "--execute", "--revision", "step-10") == 0


def test_what_was_cut_off_goes_on_by_the_same_command(folder, hub, capsys):
    hub.fails = "/commit/"
    assert push(folder, "--execute") == 2
    assert "sending stopped" in (line := refused(capsys)) and "the same command sends what is missing" in line
    hub.fails = None
    before = dict(hub.objects)
    assert (
        push(folder, "--execute") == 0 and hub.objects == before and set(hub.models[REPO].branches["main"]) == set(SENT)
    )


@pytest.mark.parametrize(
    ("token", "repo", "message"),
    [
        (None, REPO, "no token for the hub: log in by `hf auth login`"),
        ("hf_unknown", REPO, "does not accept the token"),
        (READER, REPO, "the token may not write there (403); take one that may write for owner"),
        (WRITER, "other/model", "the token may not write there (403); take one that may write for other"),
    ],
)
def test_a_token_without_the_right_is_named(folder, hub, capsys, monkeypatch, token, repo, message):
    monkeypatch.setattr("llava.export.push.get_token", lambda: token)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert push(folder, "--execute", repo=repo) == 2 and message in refused(capsys) and not hub.models


def test_private_is_not_promised_for_a_public_repository(folder, hub, capsys):
    assert push(folder, "--execute") == 0
    assert push(folder, "--execute", "--private") == 2 and f"{REPO} is public, and --private was given" in refused(
        capsys
    )


def test_a_hub_that_cannot_be_reached_is_reported(folder, hub, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push(folder, "--execute") == 2 and "sending stopped" in refused(capsys)


def halve(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')


def other_weights(folder):
    save_file({"a": torch.zeros(6)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (halve, "is not whole: model.safetensors"),
        (index, "model-00002-of-00002.safetensors, which its index names, is missing"),
        (other_weights, "its content is not what was written"),
        (lambda folder: (folder / "manifest.json").unlink(), "its training is not finished"),
        (lambda folder: (folder / "model.safetensors").unlink(), "missing"),
        (lambda folder: (folder / "README.md").unlink(), "has no card; write one: python -m llava.export card"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "its metadata cannot be read"),
        (lambda folder: (folder / "run.json").write_text('"hf_' + "a" * 34 + '"'), "like an access token (hf_aaa...)"),
        (lambda folder: (folder / "run.json").write_text('"ghp_' + "a" * 36 + '"'), "like an access token (ghp_aa...)"),
        (lambda folder: (folder / "run.json").write_text("github_pat_" + "a1_" * 20), "access token (github...)"),
        (lambda folder: (folder / "run.json").write_text('"https://me:pass@host"'), "an address with a password"),
        (shutil.rmtree, "no such folder"),
    ],
)  # fmt: skip
def test_a_folder_that_should_not_be_sent_is_refused_before_anything_is(folder, hub, capsys, harm, message):
    harm(folder)
    assert push(folder, "--execute") == 2 and message in refused(capsys) and not hub.models


def test_a_link_is_not_followed(folder, hub, tmp_path):
    (tmp_path / "elsewhere").write_text("private")
    (folder / "tokenizer.json").symlink_to(tmp_path / "elsewhere")
    assert push(folder, "--execute") == 0 and "tokenizer.json" not in hub.models[REPO].branches["main"]


def test_every_file_that_an_export_or_an_adapter_needs_is_sent(folder):
    names = (
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "mm_projector.bin", "adapter_config.json",
        "adapter_model.safetensors", "non_lora_trainables.bin", "tokenizer.json", "tokenizer_config.json",
        "tokenizer.model", "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
        "preprocessor_config.json", "processor_config.json", "export.json", "results.json", "model-f16.gguf",
        *code_files("llava_next_norm"),
    )  # fmt: skip
    for name in names:
        (folder / name).touch()
    assert set(sort_out(folder)[0]) == {*SENT, *names}


@pytest.mark.parametrize("link", ["figures/loss.png", "figures"])
def test_a_figure_behind_a_link_or_outside_the_folder_stays(folder, tmp_path, link):
    (folder / "figures").rename(tmp_path / "figures")
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(tmp_path / link)
    (folder / "README.md").write_text(f"![a](figures/loss.png) ![b](../figures/loss.png) ![c]({tmp_path}/a.png)")
    (tmp_path / "a.png").touch()
    assert set(sort_out(folder)[0]) == set(SENT) - {"figures/loss.png"}


def test_files_that_tell_of_the_machine_are_named(folder, hub, capsys):
    for name in ("config.json", "run.json"):
        (folder / name).write_text('{"model_type": "llava_llama", "a": "/home/me"}')
    assert push(folder) == 0
    printed = capsys.readouterr().out
    for name in ("config.json", "run.json"):
        assert f"note: {name} names folders of the machine that wrote it, and is sent as it is\n" in printed
    assert printed.count("note: ") == 2
