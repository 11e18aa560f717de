"""`python -m llava.export push`: a model's folder to the hub, card, logs and `run.json` included.

Without `--execute` it only says what would be sent and what not, and reaches no network.
"""

import argparse
import glob
import json
import logging
import re
import sys
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects, validate_repo_id
from safetensors import SafetensorError, safe_open

from llava.eval.results import RESULTS_FILE
from llava.export import remote_code
from llava.export.card import CARD_FILE, one_line
from llava.export.folder import EXPORT_FILE
from llava.model.lora import NON_LORA_FILE
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.train.checkpoint import MANIFEST, checkpoint_faults
from llava.train.telemetry import LOG_FILE
from llava.utils.provenance import RUN_FILE

WEIGHTS = ["*.safetensors", "pytorch_model*.bin", "adapter_model.bin", ADAPTER_FILE, NON_LORA_FILE, "*.gguf"]
SENT = [
    *(*WEIGHTS, "*.safetensors.index.json", "pytorch_model*.bin.index.json"),
    *("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json*", "*.jinja"),
    *("modeling_*.py", "configuration_*.py", "processing_*.py", "image_processing_*.py", "tokenization_*.py"),
    *(remote_code.file_of(module) for module in remote_code.COPIED),
    *(CARD_FILE, "LICENSE*", "NOTICE*", RUN_FILE, LOG_FILE, RESULTS_FILE, EXPORT_FILE),
]
"""Names of the files that make a model: weights, configuration, tokenizer, code, card and records."""
_FIGURE = re.compile(r"""(?:\]\(|src=["'])([^\s"')#?]+\.(?:png|jpe?g|svg|gif|webp))(?=[\s"')])""")
_TOKEN = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[A-Z0-9]{16}|gh[opsur]_[A-Za-z0-9]{30,}"
    rb"|github_pat_[A-Za-z0-9_]{30,})\b"
)
_PASSWORD = re.compile(rb"""://[^\s/:@"'<>]+:[^\s/:@"'<>]+@""")  # of a user, in an address
_PATH = re.compile(rb'"(?:/[\w.-]+){2,}')
_MOST_TEXT = 16 << 20  # bytes; larger files are not searched for secrets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True, help="folder of the model, as trained or as exported")
    parser.add_argument("--repo", type=repo_id, required=True, help="OWNER/NAME on the hub; made if it is missing")
    parser.add_argument("--private", action="store_true", help="if the repository is made, only its owner sees it")
    parser.add_argument("--revision", help="branch to write to (default: main); made if it is missing")
    parser.add_argument("--execute", action="store_true", help="send it; without this nothing leaves the machine")


def repo_id(text: str) -> str:
    """The value of `--repo`.

    Raises:
        argparse.ArgumentTypeError: not OWNER/NAME.
    """
    try:
        validate_repo_id(text)
    except HFValidationError:
        text = ""
    if text.count("/") != 1:
        raise argparse.ArgumentTypeError("expected OWNER/NAME")
    return text


def run(args: argparse.Namespace) -> None:
    """Lists what is sent and what stays, and sends it with `--execute`.

    Raises:
        ValueError: the folder is not whole, lacks a card, or holds a secret.
        OSError: the hub cannot be reached, or refuses.
    """
    files, left_out = sort_out(args.model_path)
    print_plan(args, files, left_out)
    check_folder(args.model_path, files)
    if not args.execute:
        print("nothing was sent; the same command with --execute sends it")
        return
    print(send(args.model_path, files, args.repo, args.private, args.revision))


def print_plan(args: argparse.Namespace, files: list[str], left_out: dict[str, str]) -> None:
    """Prints the files with their sizes, what is left out, and which files name folders of this machine."""
    sizes = {name: (args.model_path / name).stat().st_size / 1e6 for name in files}
    where = f"{args.repo}, branch {args.revision}" if args.revision else args.repo
    print(f"{args.model_path} -> {where}{' (private, if it is made)' if args.private else ''}")
    for name, size in sizes.items():
        print(f"  {size:>10,.2f} MB  {name}")
    print(f"  {sum(sizes.values()):>10,.2f} MB  in {len(files)} files")
    for name, reason in left_out.items():
        print(f"  left out: {name} ({reason})")
    for name in files:
        if name.endswith((".json", ".jsonl")) and _PATH.search(_text(args.model_path / name)):
            print(f"  note: {name} names folders of the machine that wrote it, and is sent as it is")


# --- what is sent -----------------------------------------------------------------------------------------------------


def sort_out(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files to send, and what else is in the folder with the reason why it stays.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"--model-path {folder}: no such folder")
    figures = _figures(folder)
    links = [path.name for path in folder.iterdir() if path.is_symlink()]
    names = [path.name for path in folder.iterdir() if path.is_file()]
    files = sorted({*filter_repo_objects(names, allow_patterns=SENT), *figures} - {*links})
    left_out = {}
    for path in sorted(folder.iterdir()):
        if path.name in links:
            left_out[path.name] = "a link"
        elif path.is_dir():
            shown = any(name.startswith(f"{path.name}/") for name in figures)
            left_out[f"{path.name}/"] = "except what the card shows" if shown else "not part of a model"
        elif path.name not in files:
            left_out[path.name] = "not part of a model"
    return files, left_out


def _figures(folder: Path) -> list[str]:
    """The pictures in and below `folder` that its card shows; one behind a link has its real place elsewhere."""
    card, root = folder / CARD_FILE, folder.resolve()
    if card.is_symlink() or not card.is_file():
        return []
    shown = map(PurePosixPath, _FIGURE.findall(card.read_text(encoding="utf-8", errors="replace")))
    return [
        str(path)
        for path in shown
        if (folder / path).is_file()
        and (folder / path).resolve() == root / path
        and not path.is_absolute()
        and not any(part.startswith(".") for part in path.parts)
    ]


def _text(file: Path) -> bytes:
    """A file's content; nothing of a large or binary file."""
    content = b"" if file.stat().st_size > _MOST_TEXT else file.read_bytes()
    return b"" if b"\0" in content[:8192] else content


def check_folder(folder: Path, files: list[str]) -> None:
    """Refuses a folder without weights or card, a half-written one, and one with a secret in it.

    Raises:
        ValueError: what is wrong, and what to do.
    """
    if RUN_FILE in files and not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: its training is not finished ({MANIFEST} is written last); continue it first")
    if faults := weight_faults(folder, files):
        raise ValueError(f"{folder} is not whole: {faults[0]}; write it again")
    if not _weights(files):
        raise ValueError(f"{folder}: no weights to send (expected {', '.join(WEIGHTS)}); a link is not followed")
    for name in files:
        text = _text(folder / name)
        if token := _TOKEN.search(text):
            start = token[0][:6].decode()
            raise ValueError(f"{folder / name} holds what looks like an access token ({start}...); take it out")
        if _PASSWORD.search(text):
            raise ValueError(f"{folder / name} holds an address with a password (user:password@); take it out")
    if CARD_FILE not in files:
        raise ValueError(f"{folder} has no card; write one: python -m llava.export card --model-path {folder}")
    try:
        ModelCard((folder / CARD_FILE).read_text(encoding="utf-8"))
    except Exception as error:  # YAML's own errors, and whatever the fields' classes raise
        raise ValueError(f"{folder / CARD_FILE}: its metadata cannot be read ({one_line(error)})") from error


def weight_faults(folder: Path, files: list[str]) -> list[str]:
    """The weight files that are cut off, missing from an index, or different from the manifest."""
    faults, indexed = [], set()
    for name in _weights(files):
        if not (folder / name).stat().st_size:
            faults.append(f"{name} is empty")
        elif name.endswith(".safetensors"):
            try:
                safe_open(folder / name, "pt")
            except (SafetensorError, OSError) as error:
                faults.append(f"{name} ({error})")
    for name in filter_repo_objects(files, allow_patterns="*.index.json"):
        indexed |= set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
    faults += [f"{name}, which its index names, is missing" for name in sorted(indexed - set(files))]
    if (folder / MANIFEST).is_file():
        faults += [fault for fault in checkpoint_faults(folder) if _weights([fault.partition(":")[0]])]
    return faults


def _weights(names: list[str]) -> list[str]:
    return list(filter_repo_objects(names, allow_patterns=WEIGHTS))


# --- sending ----------------------------------------------------------------------------------------------------------


def send(folder: Path, files: list[str], repo: str, private: bool = False, revision: str | None = None) -> str:
    """Sends the files that the hub lacks or has with other content; returns a line that says what was done.

    Raises:
        ValueError: the repository is public and `private` was given.
        OSError: the hub cannot be reached, or refuses; the same command sends what is missing.
    """
    if get_token() is None:
        raise PermissionError(
            "no token for the hub: log in by `hf auth login`, or set HF_TOKEN, with the right to write"
        )
    if not sys.stderr.isatty():  # a log gets a line now and then instead of a redrawn bar
        disable_progress_bars()
        logging.getLogger("huggingface_hub._upload_pipeline").setLevel(logging.INFO)
    api = HfApi()
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise ValueError(f"{repo} is public, and --private was given; change it on its page, or leave the flag out")
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        before = api.model_info(repo, revision=revision).sha
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            allow_patterns=[glob.escape(name) for name in files],
            commit_message=f"Upload {folder.resolve().name}",
        )
    except HfHubHTTPError as error:
        raise _refusal(error, repo) from error
    except ValueError:  # this command's own, or what the hub says of the card's metadata
        raise
    except Exception as error:  # transport errors of the hub's several clients, which share no class
        raise ConnectionError(
            f"{repo}: sending stopped ({_cause(error)}); the same command sends what is missing"
        ) from error
    if done.oid == before:
        return f"{api.endpoint}/{repo} has these {len(files)} files already; nothing was sent"
    return f"sent: {done.commit_url}"


def _refusal(error: HfHubHTTPError, repo: str) -> OSError:
    """The error to raise: what the hub answered, and what to do."""
    status = error.response.status_code
    if status == 401:
        return PermissionError(
            f"{repo}: the hub does not accept the token; log in again by `hf auth login`, or set HF_TOKEN"
        )
    if status in (403, 404):
        owner = repo.partition("/")[0]
        return PermissionError(f"{repo}: the token may not write there ({status}); take one that may write for {owner}")
    return ConnectionError(f"{repo}: the hub answered {status} ({_cause(error)}); try the same command again")


def _cause(error: BaseException) -> str:
    cause = error.__cause__ or error
    return one_line(f"{type(cause).__name__}: {cause}")[:200]
