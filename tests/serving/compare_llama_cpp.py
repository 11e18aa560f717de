"""Exports a checkpoint for llama.cpp, asks both, and says how many greedy answers are equal.

    LLAMA_CPP_PYTHON=ENV/bin/python python tests/serving/compare_llama_cpp.py --model-path CKPT [--dtype f16]

`LLAMA_CPP_PYTHON` is the Python of an environment with llama-cpp-python and Pillow; `pip install llama-cpp-python
pillow` compiles it, in about a quarter of an hour on one core. Answers here are those of the checkpoint in fp32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from llava.asking import load_assistant, load_picture
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.export.__main__ import main as export
from llava.mm_utils import process_prompt_images

ASK = Path(__file__).with_name("ask_llama_cpp.py")
SCENES = Path("playground/data/scenes")


def main() -> int:
    """Returns 0 if at least `--least` of the answers are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--data", type=Path, default=SCENES / "heldout.json", help="records with a question each")
    parser.add_argument("--image-folder", type=Path, default=SCENES / "images")
    parser.add_argument("--questions", type=int, help="how many, from the first (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="f16")
    parser.add_argument("--least", type=float, default=0.95, help="share of equal answers below which this fails")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return compare(args, Path(folder))


def compare(args: argparse.Namespace, folder: Path) -> int:
    """Exports into `folder`, asks, and prints what differs."""
    records = json.loads(args.data.read_text())[: args.questions]
    assistant = load_assistant(args.model_path, device="cpu", torch_dtype=torch.float32)
    ours, visual, asked = [], [], []
    for record in records:
        picture, turns = load_picture(str(args.image_folder / record["image"])), record["conversations"][:1]
        (text,) = assistant.answer([turns], [picture], do_sample=False, max_new_tokens=args.max_new_tokens)
        pixels = process_prompt_images([picture], assistant.image_processor, assistant.model.config)
        with torch.no_grad():
            visual.append(assistant.model.encode_images(torch.cat(pixels))[0])
        ids = assistant.prompt_ids(turns, [picture]).tolist()
        ours.append((text, [None if token == IMAGE_TOKEN_INDEX else token for token in ids]))
        image = str((args.image_folder / record["image"]).resolve())
        question = turns[0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()
        asked.append({"prompt": assistant.prompt_text(turns), "question": question, "image": image})
        asked[-1]["max_new_tokens"] = args.max_new_tokens
    if status := export(["gguf", "--model-path", args.model_path, "--output-dir", str(folder), "--dtype", args.dtype]):
        return status
    (folder / "asked.json").write_text(json.dumps(asked))
    files = [folder / f"{name}-{args.dtype}.gguf" for name in ("model", "mmproj")]
    command = [
        os.environ.get("LLAMA_CPP_PYTHON", sys.executable),
        ASK,
        *files,
        folder / "asked.json",
        folder / "said.json",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return 2
    theirs = json.loads((folder / "said.json").read_text())
    equal = sum(text == their["answer"] for (text, _), their in zip(ours, theirs, strict=True))
    chats = sum(text == their["chat_answer"] for (text, _), their in zip(ours, theirs, strict=True))
    prompts = sum(ids == their["prompt_ids"] for (_, ids), their in zip(ours, theirs, strict=True))
    error = max(
        ((torch.tensor(their["visual"]) - tokens).norm() / tokens.norm()).item()
        for tokens, their in zip(visual, theirs, strict=True)
    )
    for (text, _), their, question in zip(ours, theirs, asked, strict=True):
        if text != their["answer"]:
            print(f"{question['image']}: {text!r} here, {their['answer']!r} in llama.cpp")
    print(f"{args.dtype}: {equal} of {len(ours)} greedy answers equal, {chats} by the file's chat template")
    print(f"token ids of {prompts} prompts equal")
    print(f"visual tokens differ by at most {error:.2e} of their norm")
    return 0 if min(equal, chats) >= args.least * len(ours) and prompts == len(ours) else 1


if __name__ == "__main__":
    sys.exit(main())
