"""Which variables reach the other nodes, and how: `deepspeed` over a hostfile passes on few, so it gets a file of ours.

DeepSpeed reads lines NAME=value from the file that DS_ENV_FILE names, strips the value, puts it in double quotes where
it has more than plain characters, and has pdsh run `export NAME=value; ...` by ssh in the hosts' shells.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from llava.launch.settings import Refusal
from llava.utils.failures import RUN_DIR

ENV_FILE = "DS_ENV_FILE"
# fmt: off
_PREFIXES = (
    "LLAVA_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TENSORBOARD_",
    "COMET_", "MLFLOW_", "NCCL_", "GLOO_", "CUDA_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_",
    "DS_", "OMP_", "GOMP_", "KMP_", "MKL_",
)
_NAMES = frozenset((
    "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CC", "CXX", "MAX_JOBS",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
))
# fmt: on
# Variables that belong to one node, or to one launcher, alone.
_OWN = frozenset(
    {"CUDA_VISIBLE_DEVICES", ENV_FILE, RUN_DIR, "LLAVA_PYTHON", "LLAVA_REQUEUE_DIR", "TORCHELASTIC_RUN_ID"}
)
_SECRET = re.compile("(^|_)(TOKEN|KEY|SECRET|PASSWORD|PROXY)(_|$)", re.IGNORECASE)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that every node's ranks need, sorted by name."""
    wanted = (name for name in environment if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: environment[name] for name in sorted(wanted) if name not in _OWN}


def env_file_text(variables: Mapping[str, str], own_lines: Sequence[str] = ()) -> str:
    """The file's content; the user's own lines come last, and therefore win.

    Raises:
        Refusal: a line cannot hold one of the values.
    """
    named = {line.split("=", 1)[0].strip() for line in own_lines}
    lines = [f"{name}={_line_value(name, value)}" for name, value in variables.items() if name not in named]
    return "".join(f"{line}\n" for line in (*lines, *own_lines))


def own_lines(environment: Mapping[str, str]) -> list[str]:
    """The lines that DeepSpeed would read without us, from DS_ENV_FILE, or .deepspeed_env in the home folder and here.

    Raises:
        Refusal: there is no such file, or a line has no `=`, on which DeepSpeed ends with a traceback.
    """
    name = environment.get(ENV_FILE) or ".deepspeed_env"
    files = dict.fromkeys(Path(folder, name) for folder in (Path.home(), Path.cwd()))  # once, if the name is absolute
    present = [file for file in files if file.is_file()]
    if environment.get(ENV_FILE) and not present:
        raise Refusal(f"{ENV_FILE}={name} does not exist; give a file with NAME=value lines, or unset it")
    lines = [(file, line) for file in present for line in file.read_text().splitlines()]
    for file, line in lines:
        if line.strip() and not line.lstrip().startswith("#") and "=" not in line:
            raise Refusal(f"{file}: {line!r} is not a NAME=value line; DeepSpeed reads this file for the other nodes")
    return [line for _, line in lines if line.strip() and not line.lstrip().startswith("#")]


def write_env_file(environment: Mapping[str, str], folder: Path, **more: str) -> dict[str, str]:
    """Writes what is passed on into a file in `folder` that only this user can read; returns the variable naming it."""
    file = folder / "deepspeed_env"
    text = env_file_text(passed_on(environment) | more, own_lines(environment))
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    return {ENV_FILE: str(file)}


def word_for_hosts(word: str) -> str:
    """A word of the command, quoted so that the hosts' shells read it back as it is.

    pdsh interprets `%`, and DeepSpeed itself puts words with blanks in double quotes.
    """
    word = word.replace("%", "%%")
    if " " in word:  # DeepSpeed puts it in double quotes, and a backslash before those within
        return re.sub(r"[\\$`]", r"\\\g<0>", word)
    return shlex.quote(word)


def _line_value(name: str, value: str) -> str:
    if "\n" in value or "\r" in value or value != value.strip():
        raise Refusal(
            f"{name}={value!r} cannot be passed on to the hosts of HOSTFILE: a line of {ENV_FILE} holds no line break "
            "and no blanks at its ends; change it, or unset it"
        )
    return re.sub(r'[\\"$`]', r"\\\g<0>", value).replace("%", "%%")


def other_nodes(environment: Mapping[str, str], by_ssh: bool) -> list[str]:
    """Lines that say how the other nodes get their variables, and list these; of a secret only the name is shown.

    Raises:
        Refusal: a variable cannot be passed on.
    """
    variables = passed_on(environment)
    if by_ssh:
        own = own_lines(environment)
        env_file_text(variables, own)
        variables |= {name.strip(): value for name, _, value in (line.partition("=") for line in own)}
        first = "deepspeed passes on, besides PYTHONPATH:"
    elif environment.get("SLURM_JOB_ID"):
        first = "srun passes on every variable of the job, among them:"
    else:
        first = "nothing is passed on; set these on every node alike:"
    lines = (name if _SECRET.search(name) else f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return [first, *(f"  {line}" for line in lines)]
