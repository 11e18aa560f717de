"""Trains LLaVA and this tree on the same model and data, and prints their losses side by side.

Three processes run `record.py`: upstream as it came (arm `none` only), upstream with the patch, this tree. This tree is
given upstream's sample order and initial projector, so that every number can be compared.
`scripts/upstream_baseline.sh` prepares the environments and calls this file.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

REPO = Path(__file__).resolve().parents[2]
NORM_KEY = "mm_projector.3."  # after mlp2x_gelu's Linear, GELU, Linear

TREES = {"patched": "upstream, patched", "original": "upstream as it came", "ours": "this tree"}


@dataclass(frozen=True)
class Stage:
    """What the two stages do not share; the flags are those of LLaVA's own scripts."""

    name: str
    flags: tuple[str, ...]
    upstream_flags: tuple[str, ...] = ()


PRETRAIN = Stage("pretrain", ("--version", "plain", "--tune_mm_mlp_adapter", "True", "--learning_rate", "1e-3"))
FINETUNE = Stage(
    "finetune",
    ("--version", "v1", "--image_aspect_ratio", "pad", "--learning_rate", "2e-5"),
    ("--group_by_modality_length", "True"),
)
STAGES = (PRETRAIN, FINETUNE)
SHARED_FLAGS = {
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_use_im_start_end": False,
    "mm_use_im_patch_token": False,
    "gradient_accumulation_steps": 1,
    "evaluation_strategy": "no",
    "save_strategy": "no",
    "weight_decay": 0.0,
    "warmup_ratio": 0.03,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "lazy_preprocess": True,
    "report_to": "none",
    "disable_tqdm": True,
}


def main() -> int:
    args = parse_arguments()
    patched = {(arm, stage): upstream_run(args, "patched", arm, stage) for arm in args.arms for stage in STAGES}
    original = {("none", stage): upstream_run(args, "original", "none", stage) for stage in STAGES}
    ours = {(arm, stage): our_run(args, arm, stage) for arm in args.arms for stage in STAGES}
    args.output.mkdir(parents=True, exist_ok=True)
    record(args, "patched", args.upstream_python, args.patched, patched)
    if "none" in args.arms:
        record(args, "original", args.upstream_python, args.original, original)
    for arm, stage in ours:
        write_in_order(args, arm, stage)
    record(args, "ours", sys.executable, REPO, ours)

    report = {"arms": {}, "unpatched_equals_patched_none": None}
    for arm in args.arms:
        report["arms"][arm] = {stage.name: compare_stage(args, arm, stage) for stage in STAGES}
    if "none" in args.arms:
        equal = all(same_to_the_bit(args, stage) for stage in STAGES)
        report["unpatched_equals_patched_none"] = equal
        print(f"\nupstream as it came and patched with none: {'equal to the bit' if equal else 'NOT EQUAL'}")
    worst = print_summary(report["arms"])
    (args.output / "comparison.json").write_text(json.dumps(report, indent=1))
    print(f"\nnumbers: {args.output / 'comparison.json'}")
    return int(math.isinf(worst) or worst > args.tolerance or report["unpatched_equals_patched_none"] is False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upstream-python", required=True)
    for name in ("original", "patched", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("model", "vision-tower", "pretrain-data", "pretrain-images", "finetune-data", "finetune-images"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--arms", type=str.split, required=True)
    for name in ("steps", "batch", "seed", "max-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("bf16", "gradient-checkpointing"):
        parser.add_argument(f"--{name}", choices=("True", "False"), required=True)
    parser.add_argument("--tolerance", type=float, required=True)
    return parser.parse_args()


# --- runs -------------------------------------------------------------------------------------------------------------


def folder(args: argparse.Namespace, tree: str, arm: str, stage: Stage) -> Path:
    return args.output / tree / arm / stage.name


def flags(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def shared_flags(args: argparse.Namespace, stage: Stage, output: Path) -> list[str]:
    values = {
        "output_dir": output,
        "model_name_or_path": args.model,
        "vision_tower": args.vision_tower,
        "image_folder": getattr(args, f"{stage.name}_images"),
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "seed": args.seed,
        "model_max_length": args.max_length,
        "bf16": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
    }
    return [*flags(values | SHARED_FLAGS), *stage.flags]


def upstream_run(args: argparse.Namespace, tree: str, arm: str, stage: Stage) -> dict:
    """Upstream's run; its stage 2 continues from its own stage 1."""
    output = folder(args, tree, arm, stage)
    values = {"data_path": getattr(args, f"{stage.name}_data")}
    if tree == "patched":
        values["mm_projector_norm"] = arm
    if stage is FINETUNE:
        values["pretrain_mm_mlp_adapter"] = folder(args, tree, arm, PRETRAIN) / "mm_projector.bin"
    return {"record": str(output), "argv": [*shared_flags(args, stage, output), *flags(values), *stage.upstream_flags]}


def our_run(args: argparse.Namespace, arm: str, stage: Stage) -> dict:
    """This tree's run, from patched upstream's initial projector and on its samples."""
    output = folder(args, "ours", arm, stage)
    values = {
        "data_path": output / "ordered.json",
        "mm_projector_norm": arm,
        "pretrain_mm_mlp_adapter": folder(args, "patched", arm, stage) / "initial" / "mm_projector.bin",
        "train_sampling_strategy": "sequential",
        "label_masking": "upstream",
    }
    return {"record": str(output), "argv": [*shared_flags(args, stage, output), *flags(values)]}


def write_in_order(args: argparse.Namespace, arm: str, stage: Stage) -> None:
    """The records that upstream read, in its order, as data for this tree."""
    order = read_record(folder(args, "patched", arm, stage))["order"][: args.steps * args.batch]
    records = json.loads(Path(getattr(args, f"{stage.name}_data")).read_text())
    output = folder(args, "ours", arm, stage)
    output.mkdir(parents=True, exist_ok=True)
    (output / "ordered.json").write_text(json.dumps([records[index] for index in order]))


def record(args: argparse.Namespace, tree: str, python: str, path: Path, runs: dict) -> None:
    """Runs `record.py` with the tree at `path`; the output goes to a log, shown where it fails."""
    print(f"training: {TREES[tree]} ({len(runs)} runs)", flush=True)
    runs_file, log = args.output / f"{tree}.json", args.output / f"{tree}.log"
    runs_file.write_text(json.dumps(list(runs.values()), indent=1))
    command = [python, str(Path(__file__).with_name("record.py")), str(runs_file)]
    with log.open("w") as file:
        env = os.environ | {"PYTHONPATH": str(path)}
        status = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        sys.exit(f"{log.read_text()[-4000:]}\nerror: training {TREES[tree]} failed, status {status}; whole log: {log}")


# --- what came out ----------------------------------------------------------------------------------------------------


def read_record(path: Path) -> dict:
    return json.loads((path / "record.json").read_text())


def final_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything that a run's folder holds: the whole model, or else `mm_projector.bin`."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        yield from torch.load(path / "mm_projector.bin", weights_only=True).items()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                yield name, tensors.get_tensor(name)


def final_norm(path: Path) -> dict[str, torch.Tensor]:
    """Gain and bias that a run ends with; empty for the arm `none`."""
    tensors = {name.split(NORM_KEY)[1]: t.float() for name, t in final_tensors(path) if NORM_KEY in name}
    return dict(sorted(tensors.items()))


def compare_stage(args: argparse.Namespace, arm: str, stage: Stage) -> dict:
    """Prints the two columns of losses; returns everything that was compared."""
    theirs, mine = folder(args, "patched", arm, stage), folder(args, "ours", arm, stage)
    upstream, ours = read_record(theirs)["losses"], read_record(mine)["losses"]
    print(f"\n{arm}, {stage.name}\n  step      upstream     this tree    difference")
    for step, (a, b) in enumerate(itertools.zip_longest(upstream, ours), 1):
        print(f"  {step:4}  {a:12.7f}  {b:12.7f}  {b - a:12.1e}")
    differences = [abs(a - b) for a, b in zip(upstream, ours, strict=True)]
    norms = final_norm(theirs), final_norm(mine)
    if norms[0].keys() != norms[1].keys():
        sys.exit(f"error: {arm}, {stage.name}: final norms have {list(norms[0])} and {list(norms[1])}")
    targets = [json.loads((f / "config.json").read_text()).get("mm_projector_norm_target") for f in (theirs, mine)]
    result = {
        "upstream": upstream,
        "ours": ours,
        "largest_loss_difference": math.inf if any(map(math.isnan, differences)) else max(differences),
        "norm_target": targets,
        "largest_norm_difference": {k: (norms[0][k] - norms[1][k]).abs().max().item() for k in norms[0]},
        "largest_norm_value": {k: v.abs().max().item() for k, v in norms[0].items()},
    }
    print(f"  largest difference {result['largest_loss_difference']:.1e}")
    for name, difference in result["largest_norm_difference"].items():
        print(f"  final norm's {name}: largest difference {difference:.1e}, values up to ", end="")
        print(f"{result['largest_norm_value'][name]:.1e}")
    return result


def same_to_the_bit(args: argparse.Namespace, stage: Stage) -> bool:
    """Whether upstream as it came and patched upstream with `none` had the same samples, losses and final tensors."""
    first, second = folder(args, "original", "none", stage), folder(args, "patched", "none", stage)
    records = [read_record(path) for path in (first, second)]
    if any(records[0][key] != records[1][key] for key in ("losses", "order")):
        return False
    pairs = itertools.zip_longest(final_tensors(first), final_tensors(second), fillvalue=(None, None))
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def print_summary(arms: dict) -> float:
    """Prints the largest differences of every arm; returns the largest of all losses'."""
    print("\nlargest difference of the loss, upstream to this tree")
    print(f"  {'arm':16}" + "".join(f"{stage.name:>12}" for stage in STAGES))
    for arm, stages in arms.items():
        print(f"  {arm:16}" + "".join(f"{stages[s.name]['largest_loss_difference']:12.1e}" for s in STAGES))
    return max(result["largest_loss_difference"] for stages in arms.values() for result in stages.values())


if __name__ == "__main__":
    sys.exit(main())
