"""Samples per second of this tree, of LLaMA-Factory and of ms-swift, with the same model, data, order and threads.

The model is a `LlavaForConditionalGeneration` (Llama decoder, CLIP tower, projector without norm, random weights) that
this tree exports. Each peer runs in its own environment at the best settings that were found (`BEST`); the fastest one
runs once more with the libraries that this tree's scripts preload. An optimizer step has the same samples everywhere.
The losses of the first step must agree, or nothing is reported. The time is that of consecutive optimizer steps
without the first ones, with the preparation of the samples in the same process (LLaMA-Factory tokenizes before the
first step). Runs alternate.

"grouped by length" is the order in which a large data set's batches would come from the Trainer's `group_by_length`;
this tree runs in the same order beside it, and `ratio` is over that run. With --bf16 this tree trains with fp32
masters, as its scripts do where a CPU has instructions for bf16, and the peers by autocast over fp32 weights.

Environments are made once, in `.venv-peers` or $PEERS_VENV, from `benchmarks/peers/*.txt`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes, vs_upstream
from benchmarks.common import ROOT, TOLERANCE, Failed, emptied, preloaded_names, write_result
from llava.data.preprocess import preprocess
from llava.export.hf import export
from llava.launch.command import preloads
from llava.mm_utils import load_tokenizer, save_tokenizer
from llava.model.builder import load_language_model
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict
from llava.train.arguments import ModelArguments
from llava.utils.commands import Parser

PEERS_FOLDER = Path(__file__).with_name("peers")
BATCH = vs_upstream.BATCH
OURS = "this tree"
PEERS = ("llamafactory", "ms-swift")
STAGES = {"pretrain": 1, "finetune": 2}
TEMPLATES = {"pretrain": "plain", "finetune": "qwen_2"}
LEARNING_RATES = {"pretrain": 1e-3, "finetune": 2e-5}
PARTS = {"pretrain": "mm_mlp_adapter", "finetune": "mm_vision_tower,mm_mlp_adapter,mm_language_model"}

# What our template `plain` writes; an export has none for it. `generation` marks the targets.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% set text %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{% endset %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ text + '\\n' }}{% endgeneration %}"
    "{% else %}{{ text }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Way:
    """A tool, the samples of its micro-batch, the data's order, and the options of its script.

    A peer's script and requirements are `peers/train_<tool>.py` and `peers/<tool>.txt`.
    """

    tool: str
    micro_batch: int
    order: str = "shuffled"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        folder = Path(os.environ.get("PEERS_VENV", ROOT / ".venv-peers")).resolve()
        return folder / self.tool / "bin/python"

    def setting(self) -> str:
        """The way in words, without what all peers have."""
        words = ["this tree's environment"] * ("preloads" in self.options)
        words += ["grouped by length"] * (self.order == "grouped")
        words += [f"{name} {value}" for name, value in self.options.items() if name not in ("preloads", "bf16")]
        return ", ".join([*words, f"micro-batches of {self.micro_batch}"])


# The best settings of many (benchmarks/LOG.md).
BEST = {
    "pretrain": tuple(Way(tool, 32, "grouped") for tool in PEERS),
    "finetune": (
        Way("llamafactory", 1, options={"attention": "disabled"}),
        Way("ms-swift", 2, "grouped", {"attention": "eager"}),
    ),
}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    vs_upstream.add_flags(parser)
    args = vs_upstream.parsed(parser)
    work = emptied("vs_peers")
    for peer in args.peers:
        ensure_environment(Way(peer, 1).python.parents[1], peer)
    named = ("size", "bf16", "steps", "warmup_steps", "repeats")
    meta = {name: getattr(args, name) for name in named}
    meta |= {"preloaded": preloaded_names(preloads(os.environ)), "peers": ", ".join(map(versions, args.peers))}
    for stage in args.stages:
        make_inputs(args, work, stage)
        name = f"vs_peers_{args.size}{'_bf16' * args.bf16}_{stage}"
        print(write_result(name, stage_rows(args, work, stage), folder=args.output_dir, **meta))


# --- environments -----------------------------------------------------------------------------------------------------


def ensure_environment(folder: Path, peer: str) -> None:
    """Makes the peer's environment from its list of versions, or completes it; pip keeps what is there."""
    requirements = PEERS_FOLDER / f"{peer}.txt"
    print(f"vs_peers: {folder}; some minutes where packages are missing", flush=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    torch_line = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    commands = (
        *([] if pip[0].exists() else [[sys.executable, "-m", "venv", "--clear", folder]]),
        [*pip, torch_line],  # before the rest, which could choose another build; with what this build needs
        [*pip, "--no-deps", "-r", requirements],
    )
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                f"error: {peer}: {folder} could not be made ({' '.join(map(str, command))} failed, see above); "
                f"fix that, or omit it: --peers {' '.join(other for other in PEERS if other != peer)}"
            )


def versions(peer: str) -> str:
    """The versions of the tool and of its transformers, from its requirements."""
    lines = (PEERS_FOLDER / f"{peer}.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    return f"{peer} {pinned[peer]} with transformers {pinned['transformers']}"


# --- inputs -----------------------------------------------------------------------------------------------------------


def steps_of(args: argparse.Namespace, stage: str) -> int:
    """Optimizer steps of a run."""
    return args.steps * (2 if stage == "pretrain" else 1)


def make_inputs(args: argparse.Namespace, work: Path, stage: str) -> None:
    """Writes model and data of a stage, for this tree and for the peers: `hf`, and a file of records for each order."""
    size = vs_upstream.SIZES[args.size]
    if not (work / "llama").exists():
        shapes.write_language_model(size.language_model, work / "llama", torch.device("cpu"), torch.float32)
        vs_upstream.make_tower(size, work / "clip")
    torch.manual_seed(0)
    model = load_language_model(str(work / "llama"))
    model.get_model().initialize_vision_modules(
        ModelArguments(model_name_or_path="", vision_tower=str(work / "clip"), mm_projector_norm="none")
    )
    torch.save(adapter_state_dict(model.get_model().mm_projector), work / ADAPTER_FILE)
    write_hf_model(model, work / "clip", work / "llama", stage, work / stage / "hf")
    vs_upstream.make_data(size, work, stage, steps_of(args, stage) * BATCH[stage], work / "llama")
    records = json.loads((work / f"{stage}.json").read_text())
    visual, tokenizer = (size.image_size // size.patch_size) ** 2, load_tokenizer(str(work / "llama"))
    tokens = [positions(record, stage, tokenizer, visual) for record in records]
    for order, indices in {
        "shuffled": range(len(records)),
        "grouped": grouped(tokens, BATCH[stage]),
    }.items():
        (work / stage / f"{order}.json").write_text(json.dumps([records[i] for i in indices]))
        lines = [json.dumps(peers_record(records[i], work / "images")) for i in indices]
        (work / stage / f"{order}.jsonl").write_text("\n".join(lines) + "\n")


def write_hf_model(model: Any, tower: Path, tokenizer: Path, stage: str, folder: Path) -> None:
    """Writes the model as the peers read it, with a chat template that marks the targets; `folder` must be new."""
    checkpoint = folder.with_name("checkpoint")
    model.config.mm_conv_version = TEMPLATES["finetune"]  # stage 1's cannot be exported; replaced below
    model.save_pretrained(checkpoint)
    save_tokenizer(load_tokenizer(str(tokenizer)), checkpoint)
    load_image_processor(str(tower), model.get_vision_tower()).save_pretrained(checkpoint)
    export(str(checkpoint), folder)
    shutil.rmtree(checkpoint)
    if stage == "pretrain":
        (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)


def positions(record: dict[str, Any], stage: str, tokenizer: Any, visual: int) -> int:
    """Tokens of a record, visual ones included."""
    sample = preprocess(record["conversations"], tokenizer, TEMPLATES[stage], has_image="image" in record)
    return len(sample.input_ids) + (visual - 1 if "image" in record else 0)


def grouped(tokens: list[int], batch: int) -> list[int]:
    """An order in which a batch's samples have similar lengths, as `group_by_length` gives for a large data set."""
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    random.Random(0).shuffle(batches)
    return [index for members in batches for index in members]


def peers_record(record: dict[str, Any], images: Path) -> dict[str, Any]:
    """A record in the format that the peers' scripts read."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
    pictures = [str(images / record["image"])] if "image" in record else []
    return {"messages": messages, "images": pictures}


# --- runs -------------------------------------------------------------------------------------------------------------


def stage_rows(args: argparse.Namespace, work: Path, stage: str) -> list[dict[str, Any]]:
    """The runs of a stage, in turns, and a row for each way: this tree in the order of each peer, then the peers."""
    theirs = [way for way in BEST[stage] if way.tool in args.peers]
    theirs = [replace(way, options=way.options | ({"bf16": True} if args.bf16 else {})) for way in theirs]
    ways = [Way(OURS, BATCH[stage], order) for order in dict.fromkeys(way.order for way in theirs)] + theirs
    runs: list[list[dict[str, Any]]] = [[] for _ in ways]
    ours = {way.order: runs[index] for index, way in enumerate(ways) if way.tool == OURS}

    def run(index: int) -> None:
        way = ways[index]
        try:
            runs[index].append(measure(args, work, stage, way))
            check_first_loss(runs[index][-1]["losses"], ours[way.order][-1]["losses"], TOLERANCE[args.bf16])
        except Failed as error:
            sys.exit(f"error: {stage}, {way.tool}, {way.setting()}: {error}; --peers names those to run")
        print(f"{stage}, {way.tool}, {way.setting()}: {runs[index][-1]['rate']:.2f} samples/s", flush=True)

    for number in range(args.repeats):
        for index in range(len(ways)):
            run(index)
        if number == 0 and preloads(os.environ):
            fastest = max(theirs, key=lambda way: runs[ways.index(way)][0]["rate"])
            ways.append(replace(fastest, options=fastest.options | {"preloads": True}))
            runs.append([])
            run(len(ways) - 1)
    return [row(stage, way, runs[index], ours[way.order]) for index, way in enumerate(ways)]


def check_first_loss(theirs: list[float], ours: list[float], tolerance: float) -> None:
    """Raises Failed if the losses of the first step differ: the runs did other work, and their speeds say nothing."""
    if not vs_upstream.loss_difference(theirs[:1], ours[:1]) <= tolerance:
        raise Failed(f"losses of the first step differ, {theirs[0]:.6f} and {ours[0]:.6f}")


def measure(args: argparse.Namespace, work: Path, stage: str, way: Way) -> dict[str, Any]:
    """One training run in its own process: losses of the steps, samples per second.

    Raises:
        Failed: the run failed, or has other steps than it should; the message says why.
    """
    folder, steps = work / stage / way.tool.replace(" ", "_"), steps_of(args, stage)
    command = (
        ours(args, work, stage, way, folder) if way.tool == OURS else peers_command(work, stage, way, folder, steps)
    )
    # This tree's scripts preload an allocator and more; a peer gets it where its options say so.
    variables = preloads(os.environ) if way.tool == OURS or "preloads" in way.options else {}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ROOT if way.tool == OURS else ""}
    vs_upstream.run_logged(command, variables, folder)
    record = json.loads((folder / "record.json").read_text())
    if (found := len(record["times"])) != steps:
        raise Failed(f"expected {steps} steps, found {found}")
    seconds = record["times"][-1] - record["times"][args.warmup_steps - 1]
    return {"losses": record["losses"], "rate": (steps - args.warmup_steps) * BATCH[stage] / seconds}


def peers_command(work: Path, stage: str, way: Way, folder: Path, steps: int) -> list[Path]:
    """Writes the job of a peer's script; returns the command that runs it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = {
        "model": str(work / stage / "hf"),
        "records": str(work / stage / f"{way.order}.jsonl"),
        "stage": stage,
        "batch": BATCH[stage],
        "micro_batch": way.micro_batch,
        "steps": steps,
        "learning_rate": LEARNING_RATES[stage],
        "warmup_steps": 1,
        "options": way.options,
        "output": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=1))
    return [way.python, PEERS_FOLDER / f"train_{way.tool.replace('-', '_')}.py", folder / "job.json"]


def ours(args: argparse.Namespace, work: Path, stage: str, way: Way, folder: Path) -> list[Path]:
    """The command of this tree's own trainer, for which a step's samples form one row."""
    flags = {
        "model_name_or_path": work / "llama",
        "version": TEMPLATES[stage],
        "vision_tower": work / "clip",
        "pretrain_mm_mlp_adapter": work / ADAPTER_FILE,
        "mm_tunable_parts": PARTS[stage],
        "image_folder": work / "images",
        "data_path": work / stage / f"{way.order}.json",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": BATCH[stage],
        "learning_rate": LEARNING_RATES[stage],
        "warmup_steps": 1,
    }
    flags |= vs_upstream.common_flags(folder, steps_of(args, stage), args.bf16)
    return vs_upstream.recorded_command(Path(sys.executable), folder, flags, [])


def row(stage: str, way: Way, runs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table."""
    line: dict[str, Any] = {"stage": STAGES[stage], "tool": way.tool, "setting": way.setting()}
    line["largest_loss_difference"] = vs_upstream.loss_difference(runs[-1]["losses"], ours[-1]["losses"])
    line["samples_per_second"] = statistics.median(run["rate"] for run in runs)
    return line | vs_upstream.ratios(ours, runs)


if __name__ == "__main__":
    main()
