"""Samples per second of LLaVA 1.2.2.post1 and of this tree, on the same weights, samples, order, dtype and threads.

Upstream runs unchanged in its own environment, which the script makes (`scripts/upstream_baseline.sh`). Runs
alternate. The losses of every step must agree, or nothing is reported. The time is that of consecutive optimizer steps
without the first ones, with data preparation in the same process.

The default is a Llama with random weights on the CPU, in the shapes of the quickstart's model and tower (`demo`).
Shapes of a real model, on a GPU:
  --size tiny --hidden 3072 --intermediate 8192 --layers 28 --heads 24 --kv-heads 8 --vocabulary 32000 \\
  --vision-hidden 1024 --vision-layers 24 --image-size 336 --bf16
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks import shapes
from benchmarks.common import (
    ROOT,
    add_result_flags,
    check_warmup,
    emptied,
    preloaded_names,
    ratio,
    result_folder,
    run_json,
    spread,
    write_result,
)
from llava.launch.command import preloads
from llava.mm_utils import load_tokenizer
from llava.utils.commands import Parser, whole
from playground.scene_drawing import draw_scene, render

TOKENIZER = ROOT / "tests/golden/train/inputs/llama"
WORDS = ("the", "a", "cat", "dog", "red", "house", "near", "tree", "on", "under", "with", "two", "small", "is", "what")
STAGES = {
    "pretrain": ["--version", "plain", "--tune_mm_mlp_adapter", "True", "--learning_rate", "1e-3"],
    "finetune": ["--version", "v1", "--image_aspect_ratio", "pad", "--learning_rate", "2e-5"],
}
# Samples per device in upstream's scripts v1_5/pretrain.sh and v1_5/finetune.sh.
BATCH = {"pretrain": 32, "finetune": 16}
# 16 samples of stage 2 need more than 24 GiB in upstream at these sizes.
SMALLER_BATCH = {("demo", "finetune"): 8}
# What a size leaves open on the command line; shapes of the language model are those of benchmarks/models/<size>.json.
# Small models have many short steps; with the vocabulary of `tiny` the head's share is that of a 3B model.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "steps": 24, "warmup_steps": 3, "shortest_caption": 5, "shortest_conversation": 8,
        "vision_hidden": 48, "vision_layers": 3, "image_size": 56, "patch_size": 14,
    },
    "demo": {
        "steps": 5, "warmup_steps": 1, "shortest_caption": 10, "shortest_conversation": 30,
        "vision_hidden": 192, "vision_layers": 5, "image_size": 64, "patch_size": 16,
    },
}  # fmt: skip
# Flags of the language model's shapes, and its config's names of them.
SHAPES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}
# Losses must agree this well (relative), or the two do not do the same work.
TOLERANCE = {False: 1e-4, True: 3e-2}


def main() -> None:
    args = parse_arguments()
    work = emptied(args.work)
    subprocess.run(
        ["bash", "scripts/upstream_baseline.sh"], cwd=ROOT, env=os.environ | {"PREPARE_ONLY": "1"}, check=True
    )
    upstream = Path(os.environ.get("UPSTREAM_VENV", ROOT / ".venv-upstream")).resolve()
    trees = {
        "upstream": (upstream / "bin/python", upstream / "original"),
        "this tree": (Path(sys.executable), ROOT),
    }
    make_models(args, work)
    meta = {name: getattr(args, name) for name in ("size", "repeats", *SHAPES, "image_size", "bf16")}
    versions = run_json(
        [upstream / "bin/python", "-c", "import json, torch, transformers as t;"
         "print(json.dumps({'torch': torch.__version__, 'transformers': t.__version__}))"]
    )  # fmt: skip
    meta["preloaded"] = preloaded_names({} if args.bf16 else preloads(os.environ))
    for stage in args.stages:
        make_data(args, work, stage)
        measured: dict[str, list[dict]] = {name: [] for name in trees}
        for number in range(args.repeats):
            for name, (python, path) in trees.items():
                measured[name].append(run(args, work, stage, name, python, path))
                print(f"{stage}, run {number + 1}, {name}: {measured[name][-1]['rate']:.2f} samples/s", flush=True)
        rows = [compare(args, stage, measured)]
        name = f"vs_upstream_{args.size}_{stage}{args.suffix}"
        print(write_result(name, rows, folder=result_folder(args), upstream=versions, **meta))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add_size(parser, "demo")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument(
        "--steps", type=whole(1), help="steps of stage 2; stage 1, with its short steps, takes three times as many"
    )
    parser.add_argument("--warmup-steps", type=whole(1), help="first steps, left out of the time")
    parser.add_argument(
        "--batch", type=whole(1), help="samples per device; default: as upstream's scripts, 32 and 16 (demo: 8)"
    )
    parser.add_argument("--repeats", type=whole(1), default=5)
    parser.add_argument("--threads", type=whole(1), default=2, help="PyTorch's threads on the CPU, for both")
    for name, field in SHAPES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole(1), help=f"{field} of the language model")
    for name in ("vision-hidden", "vision-layers", "image-size", "patch-size"):
        parser.add_argument(f"--{name}", type=whole(1), help=f"{name} of the CLIP tower")
    parser.add_argument("--bf16", action="store_true", help="both train in bf16, on a GPU")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "outputs/vs_upstream",
        help="folder for models, data and logs; what an earlier call left there is removed",
    )
    parser.add_argument("--suffix", default="", help="suffix of the result file's name")
    add_result_flags(parser, quick="one run at the size tiny, of 7 steps, in stage 1 of 21")
    args = with_size(parser)
    if args.quick:
        args.steps, args.repeats = 7, 1
    check_warmup(parser, args)
    return args


def add_size(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--size`, whose flags `with_size` takes from SIZES where the command line does not give them."""
    text = "size of model and data: demo, SmolLM2-135M's shapes and the quickstart's tower; tiny, 4 layers of width 256"
    parser.add_argument("--size", choices=SIZES, help=f"{text}; default: {default}, with --quick tiny")
    parser.set_defaults(default_size=default)


def with_size(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed command line, completed by its size's flags."""
    args = parser.parse_args()
    args.size = args.size or ("tiny" if args.quick else args.default_size)
    sizes = shapes.sizes_of(args.size)
    for name, value in (SIZES[args.size] | {name: sizes[field] for name, field in SHAPES.items()}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def batch_of(args: argparse.Namespace, stage: str) -> int:
    """Samples per step."""
    return args.batch or SMALLER_BATCH.get((args.size, stage), BATCH[stage])


def steps_of(args: argparse.Namespace, stage: str) -> int:
    """Optimizer steps per run."""
    return args.steps * (3 if stage == "pretrain" else 1)


def make_models(args: argparse.Namespace, work: Path) -> None:
    """Writes a random Llama, tied where the demo's is, and a random CLIP tower."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{field: getattr(args, name) for name, field in SHAPES.items()},
        tie_word_embeddings=shapes.sizes_of(args.size)["tie_word_embeddings"],
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16 if args.bf16 else torch.float32).save_pretrained(work / "llama")
    written = json.loads((work / "llama/config.json").read_text())
    written |= {"rope_theta": 10000.0, "torch_dtype": "bfloat16" if args.bf16 else "float32"}  # for transformers 4
    (work / "llama/config.json").write_text(json.dumps(written))
    for file in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, work / "llama")
    make_tower(args, work)


def make_tower(args: argparse.Namespace, work: Path) -> None:
    """Writes a CLIP tower with random weights to `clip` in `work`."""
    vision = CLIPVisionConfig(
        hidden_size=args.vision_hidden,
        intermediate_size=4 * args.vision_hidden,
        num_hidden_layers=args.vision_layers,
        num_attention_heads=max(3, args.vision_hidden // 64),
        image_size=args.image_size,
        patch_size=args.patch_size,
    )
    tower = CLIPVisionModel(vision)
    tower.config.save_pretrained(work / "clip")
    weights = {f"vision_model.{name.removeprefix('vision_model.')}": t for name, t in tower.state_dict().items()}
    save_file(weights, work / "clip/model.safetensors", metadata={"format": "pt"})  # transformers 4's names
    side = args.image_size
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}).save_pretrained(
        work / "clip"
    )


def make_data(args: argparse.Namespace, work: Path, stage: str, tokenizer_folder: Path = TOKENIZER) -> None:
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
    records = []
    for index in range(steps_of(args, stage) * batch_of(args, stage)):
        name = f"{index % 32}.png"
        if not (work / "images" / name).exists():
            picture(args, index).save(work / "images" / name)
        record = {"id": str(index), "image": name}
        if stage == "pretrain":
            question, answer = "<image>", text(generator.uniform(args.shortest_caption, 60))
        else:
            length = min(700, max(args.shortest_conversation, generator.lognormvariate(5.08, 0.9)))
            question, answer = text(length / 3), text(2 * length / 3)
            if index % 3 == 2:
                del record["image"]
            else:
                question = "<image>\n" + question
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        records.append(record | {"conversations": turns})
    (work / f"{stage}.json").write_text(json.dumps(records))


def picture(args: argparse.Namespace, index: int) -> Image.Image:
    """A scene of the quickstart; noise at the size tiny."""
    if args.size == "tiny":
        return Image.effect_noise((args.image_size, args.image_size * 3 // 4), 60).convert("RGB")
    return render(draw_scene(random.Random(index), args.image_size, 2), args.image_size)


def run(args: argparse.Namespace, work: Path, stage: str, name: str, python: Path, path: Path) -> dict:
    """One training run in its own process: losses, order of samples, samples per second."""
    folder, batch = work / stage / name.replace(" ", "_"), batch_of(args, stage)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = {
        "output_dir": folder,
        "model_name_or_path": work / "llama",
        "vision_tower": work / "clip",
        "image_folder": work / "images",
        "data_path": work / f"{stage}.json",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "per_device_train_batch_size": batch,
        "max_steps": steps_of(args, stage),
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "weight_decay": 0.0,
        "warmup_ratio": 0.03,
        "lr_scheduler_type": "cosine",
        "logging_steps": 10**6,
        "model_max_length": 2048,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "lazy_preprocess": True,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": args.bf16,
    }
    if name == "upstream":
        flags |= {"group_by_modality_length": stage == "finetune"}
        preloaded = {}
    else:
        theirs = work / stage / "upstream"
        records = json.loads((work / f"{stage}.json").read_text())
        order = json.loads((theirs / "record.json").read_text())["order"][: steps_of(args, stage) * batch]
        (folder / "ordered.json").write_text(json.dumps([records[i] for i in order]))
        flags |= {
            "data_path": folder / "ordered.json",
            "pretrain_mm_mlp_adapter": theirs / "initial/mm_projector.bin",
            "train_sampling_strategy": "sequential",
            "label_masking": "upstream",
        }
        preloaded = {} if args.bf16 else preloads(os.environ)  # as the scripts start a run on a CPU
    argv = [str(word) for key, value in flags.items() for word in (f"--{key}", value)] + STAGES[stage]
    (folder / "runs.json").write_text(json.dumps([{"argv": argv, "record": str(folder)}]))
    env = (
        os.environ
        | preloaded
        | {
            "PYTHONPATH": str(path),
            "OMP_NUM_THREADS": str(args.threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    if not args.bf16:
        env["CUDA_VISIBLE_DEVICES"] = ""
    log_path = folder / "log.txt"
    with log_path.open("w") as log:
        command = [str(python), str(ROOT / "patches/baseline/record.py"), str(folder / "runs.json")]
        if subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
            sys.exit(
                f"{(folder / 'log.txt').read_text()[-3000:]}\nerror: {name} failed; whole log: {folder / 'log.txt'}"
            )
    recorded = json.loads((folder / "record.json").read_text())
    times = recorded["times"][args.warmup_steps - 1 :]
    return {"losses": recorded["losses"], "rate": batch * (len(times) - 1) / (times[-1] - times[0])}


def compare(args: argparse.Namespace, stage: str, measured: dict[str, list[dict]]) -> dict:
    """One row of the result; ends the program if the losses differ."""
    upstream, ours = (measured[name][-1]["losses"] for name in ("upstream", "this tree"))
    difference = max(abs(a - b) / abs(a) for a, b in zip(upstream, ours, strict=True))
    if difference > TOLERANCE[args.bf16]:
        sys.exit(f"error: {stage}: losses differ by up to {difference:.1e} (relative); the speeds cannot be compared")
    rates = {name: [m["rate"] for m in runs] for name, runs in measured.items()}
    ratios = ratio(rates["this tree"], rates["upstream"])
    ours, theirs = (spread(rates[name])["median"] for name in ("this tree", "upstream"))
    print(
        f"{stage}: {ours:.2f} over {theirs:.2f} samples/s = {ratios['median']:.2f} "
        f"({ratios['min']:.2f} to {ratios['max']:.2f}); losses within {difference:.0e}",
        flush=True,
    )
    return {
        "stage": stage,
        "steps": steps_of(args, stage),
        "batch": batch_of(args, stage),
        "upstream_samples_per_second": theirs,
        "samples_per_second": ours,
        "ratio": ratios["median"],
        "ratio_min": ratios["min"],
        "ratio_max": ratios["max"],
        "largest_relative_loss_difference": difference,
    }


if __name__ == "__main__":
    main()
