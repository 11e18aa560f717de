"""`python -m llava.export push`: a model's folder to the hub, card, logs and `run.json` included.

Without `--execute` it only says what would be sent and what not, and reaches no network.
"""

import argparse
import glob
import logging
import sys
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from llava.export.push_files import check_folder, sort_out, tells_paths

_UNITS = ("B", "kB", "MB", "GB", "TB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True, help="folder of the model, as trained or as exported")
    parser.add_argument("--repo", type=repo_id, required=True, help="OWNER/NAME on the hub; made if it is missing")
    parser.add_argument("--private", action="store_true", help="if the repository is made, only its owner sees it")
    parser.add_argument("--revision", help="branch to write to (default: main); made if it is missing")
    parser.add_argument("--execute", action="store_true", help="send it; without this nothing leaves the machine")


def run(args: argparse.Namespace) -> None:
    """Lists what is sent and what stays, and sends it with `--execute`.

    Raises:
        ValueError: the folder is not whole, lacks a card, or holds a secret.
        OSError: the hub cannot be reached, or refuses.
    """
    files, left_out = sort_out(args.model_path)
    say_what(args, files, left_out)
    check_folder(args.model_path, files)
    if not args.execute:
        print("nothing was sent; the same command with --execute sends it")
        return
    print(send(args.model_path, files, args.repo, args.private, args.revision))


def say_what(args: argparse.Namespace, files: list[str], left_out: dict[str, str]) -> None:
    """Prints the files with their sizes, what is left out, and which files name folders of this machine."""
    sizes = {name: (args.model_path / name).stat().st_size for name in files}
    where = f"{args.repo}, branch {args.revision}" if args.revision else args.repo
    print(f"{args.model_path} -> {where}{' (private, if it is made)' if args.private else ''}")
    for name, size in sizes.items():
        print(f"  {size_text(size):>8}  {name}")
    print(f"  {size_text(sum(sizes.values())):>8}  in {len(files)} files")
    for name, reason in left_out.items():
        print(f"  left out: {name} ({reason})")
    if telling := [name for name in files if tells_paths(args.model_path / name)]:
        one = "names folders of the machine that wrote it, and is sent as it is"
        several = "name folders of the machine that wrote them, and are sent as they are"
        print(f"  note: {', '.join(telling)} {several if len(telling) > 1 else one}")


def size_text(size: float) -> str:
    """A number of bytes as `12 MB`."""
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


# --- sending ----------------------------------------------------------------------------------------------------------


def send(folder: Path, files: list[str], repo: str, private: bool = False, revision: str | None = None) -> str:
    """Sends the files that the hub lacks or has with other content; returns a line that says what was done.

    Raises:
        PermissionError: there is no token, or it may not write there.
        ValueError: the name belongs to a dataset or a space, or the repository is public and `private` is asked for.
        ConnectionError: the hub cannot be reached, or failed.
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
        before = _prepare(api, repo, private, revision)
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
            f"{repo}: sending stopped ({_one_line(error)}); the same command sends what is missing"
        ) from error
    if done.oid == before:
        return f"{api.endpoint}/{repo} has these {len(files)} files already; nothing was sent"
    return f"sent: {done.commit_url}"


def _prepare(api: HfApi, repo: str, private: bool, revision: str | None) -> str | None:
    """Makes repository and branch if they are missing; returns the branch's commit."""
    try:
        found = api.model_info(repo)
        if private and not found.private:
            raise ValueError(f"{repo} is public, and --private was given; change it on its page, or leave the flag out")
    except RepositoryNotFoundError:
        for kind in ("dataset", "space"):
            if api.repo_exists(repo, repo_type=kind):
                raise ValueError(f"--repo {repo} is a {kind}; a model needs another name") from None
        api.create_repo(repo, private=private or None)
    if revision:
        api.create_branch(repo, branch=revision, exist_ok=True)
    return api.model_info(repo, revision=revision).sha


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
    return ConnectionError(f"{repo}: the hub answered {status} ({_one_line(error)}); try the same command again")


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:200]


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
