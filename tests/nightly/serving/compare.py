"""The run of `tests/nightly/serving/run.sh`: checkpoints are exported and served by vLLM; both answer the same.

Answers are greedy on both sides. Two that differ are explained by our own model in float32: at the first token that
differs, by how much it prefers ours to theirs, in nats. Next to nothing is a tie that rounding decides; more is a
fault.
"""

import argparse
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from llava.asking import Asked, Assistant, batch_answers, load_assistant
from llava.compare.answers import held_out, longest_answer
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.mm_utils import process_prompt_images
from llava.utils.commands import Parser, exit_status
from playground.store import PlaygroundError

PLUGIN = "llava_norm"  # its name among the entry points of pyproject.toml
STARTED_WITHIN = 600.0  # seconds that a server may need
STOPPED_WITHIN = 30.0
BATCH = 80  # questions that our own model answers at a time
# By dtype: the largest share of answers that may differ, and the largest preference (nats, in float32) of a tie.
BOUNDS = {"bfloat16": (0.05, 0.25), "float32": (0.01, 0.001)}


@dataclass
class Answer:
    """What the server said, and the tokens that it was asked by."""

    text: str
    prompt: list[int]


def parser() -> argparse.ArgumentParser:
    description = "Serves checkpoints by vLLM and compares answers."
    parser = Parser(prog="bash tests/nightly/serving/run.sh", description=description)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("outputs/quickstart"), metavar="DIR", help="a quickstart's folder"
    )
    parser.add_argument("--data", type=Path, default=Path("playground/data/scenes"), help="its prepared pictures")
    parser.add_argument("--arms", nargs="+", default=["none", "gwc_layernorm"], help="which of its arms to serve")
    parser.add_argument("--questions", type=positive, help="how many to ask (default: all that are held out)")
    parser.add_argument("--dtype", choices=list(BOUNDS), default="bfloat16", help="precision of both sides")
    parser.add_argument(
        "--remote-code",
        action="store_true",
        help="serve by the folder's own code (--trust-remote-code) on vLLM's transformers backend, without the plugin",
    )
    parser.add_argument("--parallel", type=positive, default=8, help="questions asked at a time")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs/serving"), help="for exports, logs and answers"
    )
    parser.add_argument("--vllm", type=Path, required=True, help=argparse.SUPPRESS)  # run.sh sets it
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        args = parser().parse_args()
        return exit_status(lambda: run(args), "stopped, and the server with it")
    except PlaygroundError as error:
        print(f"error: --data: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> None:
    """Every arm in turn; exits with status 1 where one does not answer as our own model does.

    Raises:
        ValueError: a checkpoint or the questions are missing, an export failed, or a server did not start.
    """
    records = held_out(args.data)[: args.questions]
    checkpoints = {arm: args.checkpoints / arm / "finetune" for arm in args.arms}
    for arm, checkpoint in checkpoints.items():
        if not (checkpoint / "config.json").is_file():
            raise ValueError(
                f"--checkpoints {args.checkpoints}: no checkpoint in {arm}/finetune; run: bash scripts/quickstart.sh"
            )
    failed = [arm for arm, checkpoint in checkpoints.items() if not compare(arm, checkpoint, records, args)]
    if failed:
        sys.exit(1)


def compare(arm: str, checkpoint: Path, records: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Exports, serves and asks one arm, and prints the result; returns whether everything is as expected."""
    folder, pictures = args.output_dir / arm, args.data / "images"
    export(checkpoint, folder)
    assistant = load_assistant(str(checkpoint), torch_dtype=args.dtype)
    max_tokens = longest_answer(records, assistant.tokenizer)
    ours = our_answers(assistant, records, pictures, max_tokens)
    with served(folder, arm, args) as address, ThreadPoolExecutor(args.parallel) as pool:
        started = time.monotonic()
        theirs = list(pool.map(lambda record: ask(address, arm, record, pictures, max_tokens), records))
        seconds = time.monotonic() - started
    image = json.loads((folder / "config.json").read_text())["image_token_index"]
    report = {
        "arm": arm,
        "dtype": args.dtype,
        "questions": len(records),
        "prompts_differ": [
            record["id"]
            for record, answer in zip(records, theirs, strict=True)
            if not same_prompt(assistant, record, answer, image)
        ],
        "different": differences(assistant, checkpoint, records, pictures, ours, theirs),
    }
    (args.output_dir / f"{arm}.json").write_text(json.dumps(report, indent=1))
    print(f"{summary(report)} ({args.dtype}, {args.parallel} at a time, {seconds:.0f} s)", flush=True)
    return is_as_expected(report)


def differences(
    assistant: Assistant,
    checkpoint: Path,
    records: list[dict[str, Any]],
    pictures: Path,
    ours: list[str],
    theirs: list[Answer],
) -> list[dict[str, Any]]:
    """The answers that differ, each with our model's preference for its own: in the precision asked, and in float32."""
    different = [i for i, answer in enumerate(theirs) if answer.text != ours[i]]
    exact = load_assistant(str(checkpoint), torch_dtype="float32") if different else assistant
    return [
        {
            "id": records[i]["id"],
            "question": question(records[i]),
            "served": theirs[i].text,
            "ours": ours[i],
            "nats": preference(assistant, records[i], pictures, ours[i], theirs[i].text),
            "nats_in_float32": preference(exact, records[i], pictures, ours[i], theirs[i].text),
        }
        for i in different
    ]


def summary(report: dict[str, Any]) -> str:
    lines = [
        f"{report['arm']}: {answer['id']} {answer['question']!r}: served {answer['served']!r}, ours {answer['ours']!r}"
        f", preferred by {answer['nats']:.4f} nats, in float32 by {answer['nats_in_float32']:.4f}"
        for answer in report["different"]
    ]
    if wrong := report["prompts_differ"]:
        lines.append(f"{report['arm']}: {len(wrong)} prompts have other tokens than ours, the first {wrong[0]}")
    equal = report["questions"] - len(report["different"])
    return "\n".join([*lines, f"{report['arm']}: {equal} of {report['questions']} answers equal"])


def is_as_expected(report: dict[str, Any]) -> bool:
    """Whether enough answers are equal, the others are ties, and all prompts have our tokens."""
    most, tie = BOUNDS[report["dtype"]]
    ties = all(abs(answer["nats_in_float32"]) <= tie for answer in report["different"])
    return ties and not report["prompts_differ"] and len(report["different"]) <= most * report["questions"]


def export(checkpoint: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = ["-m", "llava.export", "hf", "--model-path", str(checkpoint), "--output-dir", str(folder)]
    if subprocess.run([sys.executable, *command]).returncode:
        raise ValueError(f"python {' '.join(command)} failed, see above")


# --- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(folder: Path, arm: str, args: argparse.Namespace) -> Iterator[str]:
    """The address of a server of `folder`, which ends with the block.

    Raises:
        ValueError: it ended or did not answer in time.
    """
    port, log = free_port(), args.output_dir / f"{arm}.log"
    command = [str(args.vllm), "serve", str(folder), "--served-model-name", arm, "--dtype", args.dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--enforce-eager"]  # compiling takes longer than these questions
    command += ["--trust-remote-code"] * args.remote_code
    env = os.environ | {
        "VLLM_PLUGINS": ""
        if arm == "none" or args.remote_code
        else PLUGIN,  # the stock class needs none, and gets none
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("PYTHONPATH", None)  # its environment has this package installed
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_ready(process: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + STARTED_WITHIN
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ValueError(f"vllm serve ended with status {process.returncode}; see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return
        time.sleep(1)
    raise ValueError(f"vllm serve did not answer within {STARTED_WITHIN:.0f} s; see {log}")


def stop(process: subprocess.Popen) -> None:
    """Ends the server and what it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPED_WITHIN)


# --- both sides -------------------------------------------------------------------------------------------------------


def question(record: dict[str, Any]) -> str:
    return record["conversations"][0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()


def ask(address: str, model: str, record: dict[str, Any], pictures: Path, max_tokens: int) -> Answer:
    """Asks as an OpenAI client does, with the picture as a data URL.

    Raises:
        ValueError: the server refused.
    """
    picture = base64.b64encode((pictures / record["image"]).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": question(record)},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    body |= {"max_tokens": max_tokens, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            completion = json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{record['id']}: the server refused it: {error.read().decode()[:500]}") from error
    return Answer(completion["choices"][0]["message"]["content"].strip(), completion["prompt_token_ids"])


def our_answers(assistant: Assistant, records: list[dict[str, Any]], pictures: Path, max_tokens: int) -> list[str]:
    questions = [Asked(record["conversations"][:1], [pictures / record["image"]]) for record in records]
    answers: dict[int, str] = {}
    for batch in batch_answers(assistant, questions, Image.open, BATCH, do_sample=False, max_new_tokens=max_tokens):
        answers |= batch
    return [answers[number] for number in range(len(records))]


def same_prompt(assistant: Assistant, record: dict[str, Any], answer: Answer, image: int) -> bool:
    """Whether the server's tokens are ours, once every run of its token `image` is read as one placeholder."""
    read: list[int] = []
    for token in answer.prompt:
        token = IMAGE_TOKEN_INDEX if token == image else token
        if token != IMAGE_TOKEN_INDEX or read[-1:] != [IMAGE_TOKEN_INDEX]:
            read.append(token)
    return read == assistant.prompt_ids(record["conversations"][:1]).tolist()


@torch.no_grad()
def preference(assistant: Assistant, record: dict[str, Any], pictures: Path, ours: str, theirs: str) -> float:
    """By how many nats the model prefers our answer to theirs, at the first token that differs."""
    mine, other = (
        assistant.tokenizer(text + assistant.end, add_special_tokens=False)["input_ids"] for text in (ours, theirs)
    )
    common = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
    prompt = assistant.prompt_ids(record["conversations"][:1]).tolist() + mine[:common]
    picture = Image.open(pictures / record["image"])
    shown = process_prompt_images([picture], assistant.image_processor, assistant.model.config)
    logits = assistant.model(input_ids=torch.tensor([prompt]), images=shown).logits[0, -1].float()
    return (logits[mine[common]] - logits[other[common]]).item()


if __name__ == "__main__":
    sys.exit(main())
