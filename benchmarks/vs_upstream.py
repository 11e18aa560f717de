"""Samples per second of LLaVA 1.2.2.post1 and of this tree, on the same weights, samples, order, dtype and threads.

Upstream runs unchanged in its own environment, which the script makes (`scripts/upstream_baseline.sh`), or by this
interpreter with the packages in the folder UPSTREAM_PACKAGES before its own (`benchmarks.gpu_wheels`). Runs alternate.
The losses of every step must agree, or nothing is reported. The time is that of consecutive optimizer steps without
the first ones, with data preparation in the same process.

The default is a Llama with random weights on the CPU, in the shapes of the quickstart's model and tower (`demo`);
`--size 3b --bf16` are shapes of a real model, on a GPU.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks import common
from benchmarks.shapes import made, sizes_of
from llava.launch.command import preloads
from llava.mm_utils import load_tokenizer
from llava.utils.commands import Parser, whole
from llava.utils.paths import ROOT

TOKENIZER = ROOT / "tests/golden/train/inputs/llama"
WORDS = ("the", "a", "cat", "dog", "red", "house", "near", "tree", "on", "under", "with", "two", "small", "is", "what")
STAGES = {
    "pretrain": ["--version", "plain", "--tune_mm_mlp_adapter", "True", "--learning_rate", "1e-3"],
    "finetune": ["--version", "v1", "--image_aspect_ratio", "pad", "--learning_rate", "2e-5"],
}
# Samples per device in upstream's scripts v1_5/pretrain.sh and v1_5/finetune.sh.
BATCH = {"pretrain": 32, "finetune": 16}
THREADS = 2  # PyTorch's, on the CPU, for all


@dataclass(frozen=True)
class Size:
    """Shapes of model and data.

    Attributes:
        language_model: name of a file in benchmarks/models.
        steps: of stage 2; stage 1, with its short steps, takes three times as many.
        shortest: tokens of the shortest caption and conversation.
    """

    language_model: str
    steps: int
    warmup_steps: int
    shortest: tuple[int, int]
    vision_hidden: int
    vision_layers: int
    image_size: int
    patch_size: int
    vocabulary: int | None = None  # in place of the file's

    def llama(self) -> dict[str, Any]:
        """Fields of the language model's config."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        sizes = sizes_of(self.language_model) | ({"vocab_size": self.vocabulary} if self.vocabulary else {})
        return {name: sizes[name] for name in (*names, "vocab_size", "tie_word_embeddings")}


# With the vocabulary of `tiny` the head's share is that of a 3B model; small models have many short steps.
SIZES = {
    "tiny": Size("tiny", 24, 3, (5, 8), vision_hidden=48, vision_layers=3, image_size=56, patch_size=14),
    "check": Size("tiny", 2, 1, (5, 8), vision_hidden=48, vision_layers=3, image_size=56, patch_size=14),
    "demo": Size("demo", 5, 1, (10, 30), vision_hidden=192, vision_layers=5, image_size=64, patch_size=16),
    "3b": Size("llama-3.2-3b", 12, 3, (5, 8), 1024, 24, image_size=336, patch_size=14, vocabulary=32_000),
}


def main() -> None:
    parser = Parser(description=__doc__)
    add_flags(parser)
    args = parsed(parser)
    work = common.emptied("vs_upstream")
    theirs, ours = upstream_tree(), (Path(sys.executable), f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    trees = {"upstream": theirs, "this tree": ours}
    make_models(args, work)
    names = ("torch", "transformers", "numpy")
    code = f"import json; print(json.dumps([__import__(name).__version__ for name in {names}]))"
    shown = subprocess.check_output([theirs[0], "-c", code], env=os.environ | {"PYTHONPATH": theirs[1]}, cwd=work)
    versions = dict(zip(names, json.loads(shown.splitlines()[-1]), strict=True))
    meta = {name: getattr(args, name) for name in ("size", "repeats", "bf16")}
    meta["preloaded"] = common.preloaded_names({} if args.bf16 else preloads(os.environ))
    for stage in args.stages:
        batch, steps = batch_of(args.size, stage), args.steps * (3 if stage == "pretrain" else 1)
        make_data(SIZES[args.size], work, stage, batch * steps)
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for number in range(args.repeats):
            for name, (python, path) in trees.items():
                measured[name].append(run(args, work, stage, (batch, steps), name, python, path))
                print(f"{stage}, run {number + 1}, {name}: {measured[name][-1]['rate']:.2f} samples/s", flush=True)
        theirs, ours = measured.values()
        difference = loss_difference(ours[-1]["losses"], theirs[-1]["losses"])
        if not difference <= common.TOLERANCE[args.bf16]:
            sys.exit(f"error: {stage}: losses differ by up to {difference:.1e} (relative); speeds cannot be compared")
        row = {"stage": stage, "steps": steps, "batch": batch, "largest_relative_loss_difference": difference}
        for name, runs in (("upstream_samples_per_second", theirs), ("samples_per_second", ours)):
            row[name] = statistics.median(run["rate"] for run in runs)
        row |= ratios(ours, theirs)
        print(row, flush=True)
        name = f"vs_upstream_{args.size}_{stage}"
        print(common.write_result(name, [row], folder=args.output_dir, upstream=versions, **meta))


def upstream_tree() -> tuple[Path, str]:
    """Upstream's interpreter and PYTHONPATH: this one beside UPSTREAM_PACKAGES, or an environment, which is made."""
    if packages := os.environ.get("UPSTREAM_PACKAGES"):
        return Path(sys.executable), f"{packages}:{os.environ.get('PYTHONPATH', '')}"
    variables = os.environ | {"PREPARE_ONLY": "1"}
    subprocess.run(["bash", "scripts/upstream_baseline.sh"], cwd=ROOT, env=variables, check=True)
    upstream = Path(os.environ.get("UPSTREAM_VENV", ROOT / ".venv-upstream")).resolve()
    return upstream / "bin/python", str(upstream / "original")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `vs_peers` has too."""
    text = "demo: SmolLM2-135M's shapes and the quickstart's tower; tiny: width 256; check: few steps; 3b: for a GPU"
    parser.add_argument("--size", choices=SIZES, default="demo", help=text)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--repeats", type=whole(1), default=5)
    parser.add_argument("--bf16", action="store_true", help="all train in bf16")
    common.add_output_dir(parser)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, completed by its size."""
    args = parser.parse_args()
    args.steps, args.warmup_steps = SIZES[args.size].steps, SIZES[args.size].warmup_steps
    return args


def batch_of(size: str, stage: str) -> int:
    """Samples per step. At the demo's sizes 16 samples of stage 2 need more than 24 GiB in upstream."""
    return 8 if size == "3b" or (size, stage) == ("demo", "finetune") else BATCH[stage]


def make_models(args: argparse.Namespace, work: Path) -> None:
    """Writes a random Llama and a random CLIP tower."""
    size, dtype = SIZES[args.size], torch.bfloat16 if args.bf16 else torch.float32
    config = LlamaConfig(**size.llama(), max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    device = torch.device("cuda" if args.bf16 else "cpu")
    made(lambda: LlamaForCausalLM(config), device, dtype).save_pretrained(work / "llama")
    torch.cuda.empty_cache()  # this process keeps none of the GPU's memory while others train
    written = json.loads((work / "llama/config.json").read_text())
    written |= {"rope_theta": 10000.0, "torch_dtype": str(dtype).removeprefix("torch.")}  # for transformers 4
    (work / "llama/config.json").write_text(json.dumps(written))
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, work / "llama")
    make_tower(size, work / "clip")


def make_tower(size: Size, folder: Path) -> None:
    """Writes a CLIP tower with random weights."""
    tower = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=size.vision_hidden,
            intermediate_size=4 * size.vision_hidden,
            num_hidden_layers=size.vision_layers,
            num_attention_heads=max(3, size.vision_hidden // 64),
            image_size=size.image_size,
            patch_size=size.patch_size,
        )
    )
    tower.config.save_pretrained(folder)
    weights = {f"vision_model.{name.removeprefix('vision_model.')}": t for name, t in tower.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # transformers 4's names
    crop = {"height": size.image_size, "width": size.image_size}
    CLIPImageProcessorPil(size={"shortest_edge": size.image_size}, crop_size=crop).save_pretrained(folder)


def make_data(size: Size, work: Path, stage: str, count: int, tokenizer_folder: Path = TOKENIZER) -> None:
    """Writes records. Stage 1: captions to 60 tokens. Stage 2: to 700 tokens, log-normal; a third text only."""
    generator = random.Random(0)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    cost = {word: len(tokenizer(f" {word}", add_special_tokens=False).input_ids) for word in WORDS}

    def text(tokens: float) -> str:
        words = []
        while tokens > 0:
            words.append(generator.choice(WORDS))
            tokens -= cost[words[-1]]
        return " ".join(words)

    (work / "images").mkdir(exist_ok=True)
    for index in range(32):
        common.write_photo(work / "images" / f"{index}.jpg", size.image_size, size.image_size * 3 // 4, seed=index)
    records = []
    for index in range(count):
        record = {"id": str(index), "image": f"{index % 32}.jpg"}
        if stage == "pretrain":
            question, answer = "<image>", text(generator.uniform(size.shortest[0], 60))
        else:
            length = min(700, max(size.shortest[1], generator.lognormvariate(5.08, 0.9)))
            question, answer = text(length / 3), text(2 * length / 3)
            if index % 3 == 2:
                del record["image"]
            else:
                question = "<image>\n" + question
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        records.append(record | {"conversations": turns})
    (work / f"{stage}.json").write_text(json.dumps(records))


def run(
    args: argparse.Namespace, work: Path, stage: str, counts: tuple[int, int], name: str, python: Path, path: str
) -> dict[str, Any]:
    """One training run in its own process: losses, and samples per second."""
    folder, (batch, steps) = work / stage / name.replace(" ", "_"), counts
    flags = {
        "model_name_or_path": work / "llama",
        "vision_tower": work / "clip",
        "image_folder": work / "images",
        "data_path": work / f"{stage}.json",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_use_im_patch_token": False,
        "per_device_train_batch_size": batch,
        "warmup_ratio": 0.03,
        "model_max_length": 2048,
        "gradient_checkpointing": False,
        "lazy_preprocess": True,
    }
    flags |= common_flags(folder, steps, args.bf16)
    if name == "upstream":
        flags |= {"group_by_modality_length": stage == "finetune"}
    else:
        flags |= upstreams_order(work, stage, batch * steps)
    # Upstream's bf16 weights have no masters, and would lose updates that ours keep: neither moves.
    command = recorded_command(python, folder, flags, STAGES[stage] + ["--learning_rate", "1e-9"] * args.bf16)
    # This tree starts as its scripts start a run on a CPU.
    variables = {} if args.bf16 or name == "upstream" else preloads(os.environ)
    # With several GPUs in sight the Trainer would divide batches among them.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] if args.bf16 else ""
    variables |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpu}
    run_logged(command, variables, folder)
    record = json.loads((folder / "record.json").read_text())
    times = record["times"][args.warmup_steps - 1 :]
    return {"losses": record["losses"], "rate": batch * (len(times) - 1) / (times[-1] - times[0])}


def common_flags(folder: Path, steps: int, bf16: bool) -> dict[str, Any]:
    """Flags of a short run that leaves nothing behind but its record."""
    return {
        "output_dir": folder / "run", "max_steps": steps, "lr_scheduler_type": "cosine", "weight_decay": 0.0,
        "save_strategy": "no", "logging_steps": 10**6, "report_to": "none", "disable_tqdm": True, "bf16": bf16,
    }  # fmt: skip


def upstreams_order(work: Path, stage: str, count: int) -> dict[str, Any]:
    """Flags by which this tree starts from upstream's weights and takes its samples in its order."""
    theirs = work / stage / "upstream"
    records = json.loads((work / f"{stage}.json").read_text())
    order = json.loads((theirs / "record.json").read_text())["order"][:count]
    (work / stage / "ordered.json").write_text(json.dumps([records[i] for i in order]))
    return {
        "data_path": work / stage / "ordered.json",
        "pretrain_mm_mlp_adapter": theirs / "initial/mm_projector.bin",
        "train_sampling_strategy": "sequential",
        "label_masking": "upstream",
    }


def recorded_command(python: Path, folder: Path, flags: dict[str, Any], words: list[str]) -> list[Path]:
    """Empties the run's folder; the command of a run that writes losses, times and order of samples to record.json."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    argv = [str(word) for key, value in flags.items() for word in (f"--{key}", value)] + words
    (folder / "runs.json").write_text(json.dumps([{"argv": argv, "record": str(folder)}]))
    return [python, ROOT / "patches/baseline/record.py", folder / "runs.json"]


def run_logged(command: list[Path], variables: dict[str, Any], folder: Path) -> None:
    """Runs a training in `folder` on `THREADS` threads, with its output in log.txt there."""
    variables = variables | {"OMP_NUM_THREADS": THREADS, "TOKENIZERS_PARALLELISM": "false"}
    common.run_logged(command, folder / "log.txt", variables, cwd=folder)


def loss_difference(theirs: list[float], ours: list[float]) -> float:
    """The largest relative difference between the losses of the same step; NaN if one is."""
    return float(np.max([abs(a - b) / abs(b) for a, b in zip(theirs, ours, strict=True)]))


def ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Median, minimum and maximum of this tree's samples per second over another's, round by round."""
    over = [our["rate"] / their["rate"] for our, their in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(over), "ratio_min": min(over), "ratio_max": max(over)}


if __name__ == "__main__":
    main()
