"""Samples per second of this tree and of the tools one might use instead, with the same model, data, order and threads.

The model is a `LlavaForConditionalGeneration` (Llama decoder, CLIP tower, projector without norm, random weights) that
this tree exports; the peers are TRL, LLaMA-Factory, ms-swift and lmms-engine, each in its own environment and at
the settings that `PEERS` lists. An optimizer step has the same samples everywhere. The losses of the first step must
agree, or a row has no figures. The time is that of consecutive optimizer steps without the first ones, with the
preparation of the samples in the same process (LLaMA-Factory tokenizes before the first step). Runs alternate.

"grouped by length" is the order in which a large data set's batches would come from the Trainer's `group_by_length`;
this tree runs in the same order beside it, and `ratio` is over that run. This tree has no settings here: a step's
samples form one row.

Environments are made once, in `.venv-peers` or $PEERS_VENV, from `benchmarks/peers/*.txt`.

  python -m benchmarks.vs_peers            each peer at its best settings; the fastest in this tree's environment too
  python -m benchmarks.vs_peers --bf16     the same in bf16: this tree as its scripts train where a CPU has instructions
                                           for it, with fp32 masters, and the peers by autocast over fp32 weights
  python -m benchmarks.vs_peers --search   every setting that was tried, once
  python -m benchmarks.vs_peers --profile  one run each, profiled: the host's seconds of a step by kind of operation
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes, vs_upstream
from benchmarks.common import (
    ROOT,
    add_result_flags,
    check_warmup,
    emptied,
    preloaded_names,
    ratio,
    result_folder,
    write_result,
)
from llava.data.preprocess import preprocess
from llava.export.hf import export
from llava.launch.command import preloads
from llava.mm_utils import load_tokenizer, save_tokenizer
from llava.model.builder import load_language_model
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict
from llava.train.arguments import ModelArguments
from llava.utils.commands import Parser, whole
from playground import smollm2

PEERS_FOLDER = Path(__file__).with_name("peers")
OURS = "this tree"
STAGES = {"pretrain": 1, "finetune": 2}
TEMPLATES = {"pretrain": "plain", "finetune": "qwen_2"}
LEARNING_RATES = {"pretrain": 1e-3, "finetune": 2e-5}
# Samples of an optimizer step, by stage. Stage 1 has short samples.
BATCH = {"pretrain": 32, "finetune": 16}

_TEXT = (
    "{% set text %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{% endset %}"
)
# What our templates write, in Jinja; `generation` marks the targets.
CHAT_TEMPLATES = {
    "pretrain": (
        "{% set IMAGE = '<image>' %}{% for message in messages %}" + _TEXT + "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ text + '\\n' }}{% endgeneration %}{% else %}{{ text }}{% endif %}{% endfor %}"
    ),
    "finetune": (
        "{% set IMAGE = '<image>\\n' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% for message in messages %}"
        + _TEXT
        + "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ text + '<|im_end|>' }}{% endgeneration %}{% else %}{{ text + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}{% endfor %}"
    ),
}


@dataclass(frozen=True)
class Setting:
    """One way to run a peer: samples of a micro-batch, the data's order, and the options of its script."""

    name: str
    micro_batch: int
    order: str = "shuffled"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A tool: its script and requirements are `peers/train_<name>.py` and `peers/<name>.txt`.

    The `settings` of a stage are the best ones that were found, and what else was tried, the defaults first. `cannot`
    says why there are none.
    """

    name: str
    settings: dict[str, tuple[Setting, ...]] = field(default_factory=dict)
    cannot: str = ""

    @property
    def python(self) -> Path:
        folder = Path(os.environ.get("PEERS_VENV", ROOT / ".venv-peers")).resolve()
        return folder / self.name / "bin/python"


def split(micro: int, batch: int, order: str = "shuffled", **options: Any) -> Setting:
    """Steps of `batch` samples in micro-batches of `micro`."""
    what = {"shuffled": "", "grouped": "grouped by length, "}[order] + "".join(f"{k} {v}, " for k, v in options.items())
    return Setting(f"{what}{micro} x {batch // micro}", micro, order, options)


def rebalanced(micro: int, batch: int, **options: Any) -> Setting:
    return split(micro, batch, sampler="batch_rebalance", **options)


def packed(samples: int) -> Setting:
    """LLaMA-Factory packs this many samples of a step into a row."""
    return Setting(f"neat_packing, {samples} in a row", 1, options={"pack": samples})


def in_bf16(setting: Setting) -> Setting:
    """The same in bf16, by autocast over fp32 weights."""
    return replace(setting, options=setting.options | {"bf16": True})


def in_our_environment(setting: Setting) -> Setting:
    """The same, with the libraries that this tree's scripts load before a run."""
    name = f"this tree's environment, {setting.name}"
    return replace(setting, name=name, options=setting.options | {"preloads": True})


# For each peer and stage: the best settings that were found, the defaults, and what else was tried.
PEERS = (
    Peer(
        "trl",
        {
            "pretrain": (
                split(32, 32, "grouped"),
                split(32, 32),
                split(8, 32, "grouped"),
                *(rebalanced(micro, 32) for micro in (16, 8, 4, 1)),
            ),
            "finetune": (
                rebalanced(2, 16, attention="eager"),
                split(16, 16),
                *(rebalanced(micro, 16) for micro in (1, 2, 4)),
                *(split(micro, 16, "grouped") for micro in (16, 4, 2)),
                rebalanced(1, 16, workers=1),
            ),
        },
    ),
    Peer(
        "llamafactory",
        {
            "pretrain": (
                split(32, 32, "grouped"),
                split(32, 32),
                split(8, 32, "grouped"),
                packed(32),
            ),
            "finetune": (
                split(1, 16, attention="disabled"),
                split(16, 16),
                split(1, 16),
                *(split(micro, 16, "grouped") for micro in (16, 4)),
                *(packed(samples) for samples in (4, 16)),
            ),
        },
    ),
    Peer(
        "lmms-engine",
        cannot="0.1.4 cannot train on a CPU, --use_cpu or not: its process group makes a device mesh of cuda "
        "(AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'); of LLaVA it knows OneVision",
    ),
    Peer(
        "ms-swift",
        {
            "pretrain": (
                split(32, 32, "grouped"),
                split(32, 32),
                split(8, 32, "grouped"),
                split(4, 32),
            ),
            "finetune": (
                split(2, 16, "grouped", attention="eager"),
                split(16, 16),
                *(split(micro, 16, "grouped") for micro in (16, 4, 2)),
                *(split(micro, 16) for micro in (2, 1)),
            ),
        },
    ),
)


def main() -> int:
    args = parse_arguments()
    work = emptied(args.work)
    peers = [peer for peer in PEERS if peer.name in args.peers]
    for peer in peers:
        if not peer.cannot:
            ensure_environment(peer)
    named = ("size", "bf16", "steps", "warmup_steps", "repeats", "threads", "search")
    meta = {name: getattr(args, name) for name in named}
    meta["preloaded"] = preloaded_names(preloads(os.environ))
    meta["peers"] = ", ".join(version_of(peer) for peer in peers if not peer.cannot)
    name = f"vs_peers_{args.size}{'_bf16' if args.bf16 else ''}{'_profile' if args.profile else ''}"
    rows = []
    for stage in args.stages:
        make_inputs(args, work, stage)
        rows += (of_stage := (profile_rows if args.profile else stage_rows)(args, work, stage, peers))
        print(write_result(f"{name}_{stage}{args.suffix}", of_stage, folder=result_folder(args), **meta))
    return int(any(row.get("note") and row["setting"] for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    vs_upstream.add_size(parser, "demo")
    parser.add_argument("--search", action="store_true", help="every setting of the peers, not only the best")
    parser.add_argument("--profile", action="store_true", help="profile one run each, in place of the comparison")
    parser.add_argument("--bf16", action="store_true", help="all train in bf16; their weights start as the same fp32")
    parser.add_argument("--steps", type=whole(1), help="steps of stage 2; stage 1 takes twice as many")
    parser.add_argument("--warmup-steps", type=whole(1), help="first steps, left out of the time")
    parser.add_argument("--repeats", type=whole(1), default=5)
    parser.add_argument("--threads", type=whole(1), default=2, help="PyTorch's threads, for all")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "outputs/vs_peers",
        help="folder for models, data and logs; what an earlier call left there is removed",
    )
    parser.add_argument("--suffix", default="", help="suffix of the result file's name")
    add_result_flags(parser, quick="one short run of each peer's best settings, tiny")
    args = vs_upstream.with_size(parser)
    if args.quick:
        args.steps, args.repeats = 6, 1
    if args.profile:
        args.repeats = 1
    check_warmup(parser, args)
    return args


# --- environments -----------------------------------------------------------------------------------------------------


def ensure_environment(peer: Peer) -> None:
    """Makes the peer's environment from its list of versions, unless it is there."""
    requirements = PEERS_FOLDER / f"{peer.name}.txt"
    folder = peer.python.parents[1]
    fingerprint = f"{sys.version_info[:2]} {hashlib.sha256(requirements.read_bytes()).hexdigest()}"
    stamp = folder / "peer.stamp"
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return
    print(f"vs_peers: making {folder}, some minutes", flush=True)
    pip = [peer.python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    torch_line = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    commands = (
        [sys.executable, "-m", "venv", "--clear", folder],
        [*pip, torch_line],  # before the rest, which could choose another build; with what this build needs
        [*pip, "--no-deps", "-r", requirements],
    )
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                f"error: {peer.name}: {folder} could not be made ({' '.join(map(str, command))} failed, see above); "
                f"fix that, or omit it: --peers {' '.join(other.name for other in PEERS if other != peer)}"
            )
    stamp.write_text(fingerprint)


def version_of(peer: Peer) -> str:
    """The versions of the tool and of its transformers, from its requirements."""
    lines = (PEERS_FOLDER / f"{peer.name}.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    return f"{peer.name} {pinned[peer.name]} with transformers {pinned['transformers']}"


# --- inputs -----------------------------------------------------------------------------------------------------------


def steps_of(args: argparse.Namespace, stage: str) -> int:
    """Optimizer steps of a run."""
    return args.steps * (2 if stage == "pretrain" else 1)


def make_inputs(args: argparse.Namespace, work: Path, stage: str) -> None:
    """Writes model and data of a stage, for this tree and for the peers: `hf`, and a file of records for each order."""
    made = argparse.Namespace(**vars(args) | {"batch": BATCH[stage], "bf16": False})  # fp32 for all
    if not (work / "llama").exists():
        shapes.write_language_model(args.size, work / "llama", torch.device("cpu"), torch.float32)
        if args.size == "demo":
            use_tokenizer(smollm2.prepare(smollm2.Settings(), ROOT / "playground/data"), work / "llama")
        vs_upstream.make_tower(made, work)
    torch.manual_seed(0)
    model = load_language_model(str(work / "llama"))
    model.get_model().initialize_vision_modules(
        ModelArguments(model_name_or_path="", vision_tower=str(work / "clip"), mm_projector_norm="none")
    )
    torch.save(adapter_state_dict(model.get_model().mm_projector), work / ADAPTER_FILE)
    write_hf_model(model, work / "clip", work / "llama", stage, work / stage / "hf")
    vs_upstream.make_data(made, work, stage, work / "llama")
    records = json.loads((work / f"{stage}.json").read_text())[: steps_of(args, stage) * BATCH[stage]]
    visual, tokenizer = (args.image_size // args.patch_size) ** 2, load_tokenizer(str(work / "llama"))
    tokens = [positions(record, stage, tokenizer, visual) for record in records]
    for order, indices in {"shuffled": range(len(records)), "grouped": grouped(tokens, BATCH[stage])}.items():
        ordered = [records[i] for i in indices]
        (work / stage / f"{order}.json").write_text(json.dumps(ordered))
        lines = [json.dumps(peers_record(records[i], work / "images", tokens[i])) for i in indices]
        (work / stage / f"{order}.jsonl").write_text("\n".join(lines) + "\n")


def write_hf_model(model: Any, tower: Path, tokenizer: Path, stage: str, folder: Path) -> None:
    """Writes the model as the peers read it, with a chat template that marks the targets; `folder` must be new."""
    checkpoint = folder.with_name("checkpoint")
    model.config.mm_conv_version = TEMPLATES["finetune"]  # stage 1's has no chat template to export; replaced below
    model.save_pretrained(checkpoint)
    save_tokenizer(load_tokenizer(str(tokenizer)), checkpoint)
    load_image_processor(str(tower), model.get_vision_tower()).save_pretrained(checkpoint)
    export(str(checkpoint), folder)
    shutil.rmtree(checkpoint)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATES[stage])


def use_tokenizer(source: Path, folder: Path) -> None:
    """Gives the model in `folder` the tokenizer of the model in `source`, and the ids of its special tokens."""
    tokenizer = load_tokenizer(str(source))
    save_tokenizer(tokenizer, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))


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


def peers_record(record: dict[str, Any], images: Path, tokens: int) -> dict[str, Any]:
    """A record in the format that the peers' scripts read."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
    pictures = [str(images / record["image"])] if "image" in record else []
    return {"messages": messages, "images": pictures, "length": tokens}


# --- runs -------------------------------------------------------------------------------------------------------------


def ways_of(args: argparse.Namespace, stage: str, peers: list[Peer]) -> list[tuple[Peer | None, Setting]]:
    """The peers' settings that run in a stage, after this tree (None) in the order of each."""
    theirs = [(p, setting) for p in peers for setting in p.settings.get(stage, ())[: None if args.search else 1]]
    if args.bf16:
        theirs = [(peer, in_bf16(setting)) for peer, setting in theirs]
    orders = dict.fromkeys(setting.order for _, setting in theirs)
    return [(None, Setting(order, BATCH[stage], order)) for order in orders] + theirs


def stage_rows(args: argparse.Namespace, work: Path, stage: str, peers: list[Peer]) -> list[dict[str, Any]]:
    """The runs of a stage, in turns, and a row for each way that was run."""
    ways = ways_of(args, stage, peers)
    measured: list[list[dict]] = [[] for _ in ways]
    failures: dict[int, str] = {}

    def run(index: int) -> None:
        peer, setting = ways[index]
        who = peer.name if peer else OURS
        try:
            measured[index].append(measure(args, work, stage, peer, setting))
        except RuntimeError as error:
            if peer is None:
                raise
            failures[index] = str(error)
            print(f"{stage}, {who}, {setting.name}: {error}", flush=True)
        else:
            rate = measured[index][-1]["rate"]
            print(f"{stage}, run {len(measured[index])}, {who}, {setting.name}: {rate:.2f} samples/s", flush=True)

    for number in range(args.repeats):
        for index in range(len(ways)):
            if index not in failures:
                run(index)
        theirs = [index for index, (peer, _) in enumerate(ways) if peer and index not in failures]
        if number == 0 and theirs and preloads(os.environ) and not args.quick:
            peer, setting = ways[max(theirs, key=lambda index: measured[index][0]["rate"])]
            ways.append((peer, in_our_environment(setting)))
            measured.append([])
            run(len(ways) - 1)
    ours = {setting.order: measured[index] for index, (peer, setting) in enumerate(ways) if peer is None}
    rows = [
        row(stage, peer, setting, measured[index], ours[setting.order], failures.get(index), args.bf16)
        for index, (peer, setting) in enumerate(ways)
    ]
    return rows + [no_figures(stage, peer, note=peer.cannot) for peer in peers if peer.cannot]


def profile_rows(args: argparse.Namespace, work: Path, stage: str, peers: list[Peer]) -> list[dict[str, Any]]:
    """A row for each way: seconds of a step, and of its pieces, after the first steps."""
    rows = []
    for peer, setting in ways_of(args, stage, peers):
        who, output = peer.name if peer else OURS, work / stage / "profile.json"
        around = (PEERS_FOLDER / "profiled.py", str(args.warmup_steps), output)
        measure(args, work, stage, peer, setting, around)
        step = json.loads(output.read_text())
        pieces = {f"{piece.replace(' ', '_')}_s": seconds for piece, seconds in step["seconds"].items()}
        rows.append({"stage": STAGES[stage], "tool": who, "setting": setting.name, "step_s": step["wall_s"]} | pieces)
        print(rows[-1], flush=True)
    return rows


def measure(
    args: argparse.Namespace,
    work: Path,
    stage: str,
    peer: Peer | None,
    setting: Setting,
    around: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """One training run in its own process.

    Args:
        around: a script, with its arguments, that runs the run's own script.

    Raises:
        RuntimeError: the run failed; the message ends with the last line that it printed.
    """
    folder = work / stage / (peer.name if peer else "ours")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_job = ours_job if peer is None else peer_job
    python, *script = write_job(args, work, stage, peer, setting, folder)
    # This tree's scripts preload an allocator and more; a peer gets it where its setting says so.
    preloaded = preloads(os.environ) if peer is None or "preloads" in setting.options else {}
    env = (
        os.environ
        | preloaded
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(args.threads),
            "PYTHONPATH": "" if peer else str(ROOT),
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    log_path = folder / "log.txt"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [python, *around, *script], env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        peak = peak_mib(process)
    if process.returncode:
        last = (log_path.read_text(errors="replace").strip().splitlines() or ["nothing was printed"])[-1]
        print(f"whole log: {log_path}", flush=True)  # not part of the message, which the result keeps
        raise RuntimeError(f"ended with {process.returncode}: {last}")
    return read_run(args, work, stage, setting, folder) | {"peak_mib": peak}


def peak_mib(process: subprocess.Popen) -> float | None:
    """Waits for the process; returns its peak memory in MiB, or None where /proc does not tell."""
    peak, status = None, Path(f"/proc/{process.pid}/status")
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                line = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
                peak = int(line[1]) / 2**10 if line else peak
            time.sleep(0.1)
    finally:
        if process.poll() is None:  # Ctrl-C
            process.terminate()
            process.wait()
    return peak


def read_run(args: argparse.Namespace, work: Path, stage: str, setting: Setting, folder: Path) -> dict[str, Any]:
    """Losses of the steps, samples and tokens per second of those after the first ones."""
    result = folder / "result.json"
    if result.is_file():
        record = json.loads(result.read_text())
        losses, ends, versions = record["losses"], record["ends"], record["versions"]
    else:
        record = json.loads((folder / "record.json").read_text())
        losses, ends, versions = record["losses"], record["times"], {}
    if len(ends) != steps_of(args, stage):
        raise RuntimeError(f"expected {steps_of(args, stage)} steps, found {len(ends)}")
    records = [json.loads(line) for line in (work / stage / f"{setting.order}.jsonl").read_text().splitlines()]
    if len(records) != len(ends) * BATCH[stage]:
        raise RuntimeError(f"expected {BATCH[stage]} samples for each of {len(ends)} steps, found {len(records)}")
    seconds = ends[-1] - ends[args.warmup_steps - 1]
    timed = records[args.warmup_steps * BATCH[stage] :]
    return {
        "losses": losses,
        "rate": len(timed) / seconds,
        "tokens_rate": sum(record["length"] for record in timed) / seconds,
        "versions": versions,
    }


def peer_job(args: argparse.Namespace, work: Path, stage: str, peer: Peer, setting: Setting, folder: Path) -> list:
    """Writes the job of a peer's script; returns the command that runs it."""
    job = {
        "model": str(work / stage / "hf"),
        "records": str(work / stage / f"{setting.order}.jsonl"),
        "stage": stage,
        "batch": BATCH[stage] // setting.options.get("pack", 1),
        "micro_batch": setting.micro_batch,
        "steps": steps_of(args, stage),
        "learning_rate": LEARNING_RATES[stage],
        "warmup_steps": 1,
        "options": setting.options,
        "output": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=1))
    return [peer.python, PEERS_FOLDER / f"train_{peer.name.replace('-', '_')}.py", folder / "job.json"]


def ours_job(args: argparse.Namespace, work: Path, stage: str, _: None, setting: Setting, folder: Path) -> list:
    """Writes the run of this tree's own trainer; returns the command."""
    parts = {"pretrain": "mm_mlp_adapter", "finetune": "mm_vision_tower,mm_mlp_adapter,mm_language_model"}
    flags = {
        "output_dir": folder / "run",
        "model_name_or_path": work / "llama",
        "version": TEMPLATES[stage],
        "vision_tower": work / "clip",
        "pretrain_mm_mlp_adapter": work / ADAPTER_FILE,
        "mm_tunable_parts": parts[stage],
        "image_folder": work / "images",
        "data_path": work / stage / f"{setting.order}.json",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": setting.micro_batch,
        "gradient_accumulation_steps": BATCH[stage] // setting.micro_batch,
        "max_steps": steps_of(args, stage),
        "learning_rate": LEARNING_RATES[stage],
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "weight_decay": 0.0,
        "save_strategy": "no",
        "logging_steps": 10**6,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": args.bf16,
    }
    argv = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    (folder / "runs.json").write_text(json.dumps([{"argv": argv, "record": str(folder)}]))
    return [sys.executable, ROOT / "patches/baseline/record.py", folder / "runs.json"]


# --- rows -------------------------------------------------------------------------------------------------------------


def loss_difference(theirs: list[float], ours: list[float]) -> float:
    """The largest relative difference between the losses of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(theirs, ours, strict=True))


def row(
    stage: str,
    peer: Peer | None,
    setting: Setting,
    runs: list[dict],
    ours: list[dict],
    failure: str | None,
    bf16: bool,
) -> dict[str, Any]:
    """One line of the table; without figures if the run failed or its first loss differs."""
    line = no_figures(stage, peer, setting, failure or "")
    if failure:
        return line
    theirs, own = runs[-1]["losses"], ours[-1]["losses"]
    line["first_loss_difference"] = loss_difference(theirs[:1], own[:1])
    if line["first_loss_difference"] > vs_upstream.TOLERANCE[bf16]:
        return line | {"note": f"losses of the first step differ, {theirs[0]:.6f} and {own[0]:.6f}: no speed"}
    line["largest_loss_difference"] = loss_difference(theirs, own)
    ratios = ratio([run["rate"] for run in ours], [run["rate"] for run in runs])
    line |= {"ratio": ratios["median"], "ratio_min": ratios["min"], "ratio_max": ratios["max"]}
    line["samples_per_second"] = statistics.median(run["rate"] for run in runs)
    line["tokens_per_second"] = statistics.median(run["tokens_rate"] for run in runs)
    line["peak_mib"] = max((run["peak_mib"] for run in runs if run["peak_mib"]), default=None)
    return line


def no_figures(stage: str, peer: Peer | None, setting: Setting | None = None, note: str = "") -> dict[str, Any]:
    """A line of the table before anything was measured."""
    figures = ("samples_per_second", "tokens_per_second", "peak_mib", "ratio", "ratio_min", "ratio_max")
    losses = ("first_loss_difference", "largest_loss_difference")
    return {
        "stage": STAGES[stage],
        "tool": peer.name if peer else OURS,
        "setting": setting.name if setting else "",
        "tried": len(peer.settings.get(stage, ())) if peer else None,
        **dict.fromkeys(figures + losses),
        "note": note,
    }


if __name__ == "__main__":
    sys.exit(main())
