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
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from llava.asking import Asked, Assistant, batch_answers, load_assistant
from llava.compare.answers import held_out, longest_answer
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.mm_utils import process_prompt_images
from llava.utils.commands import Parser

STARTED_WITHIN = 600.0  # seconds that a server may need
BATCH, PARALLEL = 80, 8  # questions at a time that our own model answers, and that the server is asked
DTYPE = "float32"  # in bf16 a tie of a hardly trained model is decided by rounding
SHARE, TIE = 0.01, 0.001  # the largest share of answers that may differ, and the largest preference (nats) of a tie


def main() -> None:
    parser = Parser(prog="bash tests/nightly/serving/run.sh", description="Serves checkpoints and compares answers.")
    parser.add_argument("--checkpoints", type=Path, default=Path("outputs/quickstart"), help="a quickstart's folder")
    parser.add_argument("--data", type=Path, default=Path("playground/data/scenes"), help="its prepared pictures")
    parser.add_argument("--questions", type=int, help="how many to ask (default: all that are held out)")
    parser.add_argument("--remote-code", action="store_true", help="serve by the folder's own code, without the plugin")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/serving"), help="for exports and logs")
    parser.add_argument("--vllm", type=Path, required=True, help=argparse.SUPPRESS)  # run.sh sets it
    args = parser.parse_args()
    records = held_out(args.data)[: args.questions]
    failed = [arm for arm in ("none", "gwc_layernorm") if not compare(arm, records, args)]
    sys.exit(bool(failed))


def compare(arm: str, records: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Exports, serves and asks one arm, and prints what differs.

    Returns whether enough answers are equal, the others are ties, and all prompts have our tokens.
    """
    checkpoint, folder, pictures = args.checkpoints / arm / "finetune", args.output_dir / arm, args.data / "images"
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = ["-m", "llava.export", "hf", "--model-path", str(checkpoint), "--output-dir", str(folder)]
    subprocess.run([sys.executable, *words], check=True)
    assistant = load_assistant(str(checkpoint), torch_dtype=DTYPE)
    max_tokens = longest_answer(records, assistant.tokenizer)
    ours = our_answers(assistant, records, pictures, max_tokens)
    with served(folder, arm, args) as address, ThreadPoolExecutor(PARALLEL) as pool:
        answers = list(pool.map(lambda record: ask(address, arm, record, pictures, max_tokens), records))
    image = json.loads((folder / "config.json").read_text())["image_token_index"]
    prompts = zip(records, (prompt for _, prompt in answers), strict=True)
    wrong = [record["id"] for record, prompt in prompts if not same_prompt(assistant, record, prompt, image)]
    print(f"{arm}: {len(wrong)} prompts have other tokens than ours {wrong[:1]}")
    preferences, exact = [], load_assistant(str(checkpoint), torch_dtype="float32")
    for record, mine, (theirs, _) in zip(records, ours, answers, strict=True):
        if theirs != mine:
            preferences.append(preference(exact, record, pictures, mine, theirs))
            print(f"{arm}: {record['id']}: served {theirs!r}, ours {mine!r}, preferred by {preferences[-1]:.4f} nats")
    print(f"{arm}: {len(records) - len(preferences)} of {len(records)} answers equal", flush=True)
    few = len(preferences) <= SHARE * len(records)
    return few and not wrong and all(abs(nats) <= TIE for nats in preferences)


@contextlib.contextmanager
def served(folder: Path, arm: str, args: argparse.Namespace) -> Iterator[str]:
    """The address of a server of `folder`, which ends with the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", args.output_dir / f"{arm}.log"
    command = [str(args.vllm), "serve", str(folder), "--served-model-name", arm, "--dtype", DTYPE]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--enforce-eager"]  # compiling takes longer than these questions
    command += ["--trust-remote-code"] * args.remote_code
    plugin = "" if arm == "none" or args.remote_code else "llava_norm"  # the stock class needs none, and gets none
    env = os.environ | {"VLLM_PLUGINS": plugin, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    env.pop("PYTHONPATH", None)  # its environment has this package installed
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + STARTED_WITHIN
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > end:
                sys.exit(f"vllm serve does not answer, status {process.returncode}; see {log}")
            time.sleep(1)
        yield address
    finally:  # with all that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(address: str, model: str, record: dict[str, Any], pictures: Path, max_tokens: int) -> tuple[str, list[int]]:
    """Asks as an OpenAI client does, with the picture as a data URL; the answer, and the prompt's tokens."""
    picture = base64.b64encode((pictures / record["image"]).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": record["conversations"][0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    body |= {"max_tokens": max_tokens, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        completion = json.load(response)
    return completion["choices"][0]["message"]["content"].strip(), completion["prompt_token_ids"]


def our_answers(assistant: Assistant, records: list[dict[str, Any]], pictures: Path, max_tokens: int) -> list[str]:
    questions = [Asked(record["conversations"][:1], [pictures / record["image"]]) for record in records]
    answers: dict[int, str] = {}
    for batch in batch_answers(assistant, questions, Image.open, BATCH, do_sample=False, max_new_tokens=max_tokens):
        answers |= batch
    return [answers[number] for number in range(len(records))]


def same_prompt(assistant: Assistant, record: dict[str, Any], prompt: list[int], image: int) -> bool:
    """Whether the server's tokens are ours, once every run of its token `image` is read as one placeholder."""
    read: list[int] = []
    for token in prompt:
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
    main()
