"""How far the arms with and without compensation part in the demo's stage 1, by optimizer, clipping and epsilon.

Each row trains both arms on the same samples from the same weights. The distance is that of their projectors' weights,
without the norm, over the way that the plain arm's have gone. The table is in docs/models.md, made of the committed
docs/compensation.json. The same command again goes on where it was stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT, emptied, write_result
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, read_tensors
from llava.train.telemetry import LOG_FILE
from llava.utils.commands import Parser, whole
from llava.utils.digests import revision
from llava.utils.versions import code_digest

PLAIN, COMPENSATED = "layernorm", "gwc_layernorm"
SAVED = 4
"""Checkpoints of a run."""


class Setting(NamedTuple):
    """A row: the flags that both arms share."""

    optim: str
    max_grad_norm: float
    adam_epsilon: float
    learnable: bool = True


ADAMW, SGD = "adamw_torch_fused", "sgd"
SETTINGS = (
    *(Setting(ADAMW, norm, epsilon) for norm in (1.0, 0.0) for epsilon in (1e-8, 1e-16)),
    *(Setting(ADAMW, norm, 1e-16, learnable=False) for norm in (1.0, 0.0)),
    *(Setting(SGD, norm, 1e-8) for norm in (1.0, 0.0)),
)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--steps", type=whole(SAVED), default=16, help="optimizer steps of a run, a multiple of 4")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--work", type=Path, default=Path("outputs/compensation"), help="results and logs; emptied of other settings"
    )
    args, flags = parser.parse_known_args()  # what is left goes to the trainer
    if args.steps % SAVED:
        parser.error(f"--steps {args.steps}: expected a multiple of {SAVED}")
    if subprocess.run([sys.executable, "-m", "playground", "all"], cwd=ROOT).returncode:
        sys.exit("error: the demo's model, pictures or tower could not be prepared, see above")
    inputs = {name: revision(str(ROOT / "playground/data" / name)) for name in ("siglip-scenes", "scenes")}
    settings = {"steps": args.steps, "seed": args.seed, "flags": flags, "code": code_digest(), "inputs": inputs}
    work = begun(args.work, settings)
    still = [*flags, "--learning_rate", "0", "--max_steps", "1"]
    start = weights(trained(work / "start", PLAIN, SETTINGS[0], args, still))
    rows = []
    for number, setting in enumerate(SETTINGS):
        folders = [trained(work / f"{number}-{arm}", arm, setting, args, flags) for arm in (PLAIN, COMPENSATED)]
        rows.append(setting._asdict() | compared(*folders, start, args.steps))
        print(rows[-1], flush=True)
    print(table(rows))
    print(f"written to {write_result('compensation', rows, work, steps=args.steps, seed=args.seed, flags=flags)}")


def begun(folder: Path, settings: dict[str, Any]) -> Path:
    """The folder's absolute path, with the runs that it has of these settings, code and inputs; emptied of others."""
    file = folder / "settings.json"
    if not file.is_file() or json.loads(file.read_text()) != settings:
        emptied(folder)
        file.write_text(json.dumps(settings))
    return folder.resolve()


def trained(folder: Path, arm: str, setting: Setting, args: argparse.Namespace, flags: list[str]) -> Path:
    """The folder of a finished stage 1 of the demo with float32 weights, which is trained unless it is there."""
    if (folder / ADAPTER_FILE).is_file():
        return folder
    variables = {
        "PRESET": "demo", "NORM": arm, "SEED": args.seed, "MAX_STEPS": args.steps, "OPTIM": setting.optim,
        "BF16": False, "NORM_LEARNABLE": setting.learnable, "SAVE_STRATEGY": "steps",
        "SAVE_STEPS": args.steps // SAVED, "SAVE_TOTAL_LIMIT": SAVED, "REPORT_TO": "none", "OUTPUT_DIR": folder,
    }  # fmt: skip
    command = ["bash", ROOT / "scripts/pretrain.sh", "--max_grad_norm", setting.max_grad_norm]
    command += ["--adam_epsilon", setting.adam_epsilon, *flags]
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    with folder.with_suffix(".log").open("w") as log:
        done = subprocess.run([str(part) for part in command], env=environment, stdout=log, stderr=log)
    if done.returncode:
        lines = folder.with_suffix(".log").read_text(errors="replace").splitlines()[-8:]
        sys.exit("\n".join([*lines, f"error: a run ended with status {done.returncode}; its log: {log.name}"]))
    (folder / "model.safetensors").unlink(missing_ok=True)  # the frozen parts, the same in all runs
    return folder


def weights(folder: Path) -> torch.Tensor:
    """The projector's weights without the norm, which is its element 3."""
    tensors = read_tensors(folder / ADAPTER_FILE)
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors) if "mm_projector.3." not in name])


def compared(plain: Path, compensated: Path, start: torch.Tensor, steps: int) -> dict[str, Any]:
    """Both arms' gradients, clipping and losses, and the distance between their weights over the steps."""
    row: dict[str, Any] = {}
    for arm, folder in (("plain", plain), ("compensated", compensated)):
        lines = [line for line in map(json.loads, (folder / LOG_FILE).read_text().splitlines()) if "loss" in line]
        row[f"{arm}_grad_norm"] = statistics.median(line["grad_norm"] for line in lines)
        row[f"{arm}_clipped"] = statistics.mean(line["clipped_share"] for line in lines)
        shares = [line.get("grad_share/mm_projector_norm", 0.0) for line in lines]
        row[f"{arm}_norms_share"] = statistics.median(shares)
        row[f"{arm}_loss"] = statistics.mean(line["loss"] for line in lines[-steps // SAVED :])
    for step in range(steps // SAVED, steps + 1, steps // SAVED):
        ours, theirs = (weights(folder / f"checkpoint-{step}") for folder in (compensated, plain))
        row[f"distance_at_{step}"] = ((ours - theirs).norm() / (theirs - start).norm()).item()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: of each pair the plain arm's number first, and the distances in the order of the steps."""

    def pair(row: dict[str, Any], name: str, form: str) -> str:
        return ", ".join(format(row[f"{arm}_{name}"], form) for arm in ("plain", "compensated"))

    cells = [
        {
            "optimizer": "SGD" if row["optim"] == SGD else "AdamW",
            "κ": f"{row['max_grad_norm']:g}" if row["max_grad_norm"] else "off",
            "ε": "" if row["optim"] == SGD else f"{row['adam_epsilon']:g}",
            "gain": "trained" if row["learnable"] else "fixed",
            "steps clipped": pair(row, "clipped", ".0%") if row["max_grad_norm"] else "",
            "gradient norm": pair(row, "grad_norm", ".3g"),
            "share of gain and bias": pair(row, "norms_share", ".2g") if row["learnable"] else "",
            "loss": pair(row, "loss", ".3f"),
            "distance": ", ".join(f"{value:.2g}" for name, value in row.items() if "distance_at_" in name),
        }
        for row in rows
    ]
    lines = [cells[0], dict.fromkeys(cells[0], "---").values(), *(line.values() for line in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
