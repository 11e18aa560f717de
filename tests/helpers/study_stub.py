"""Stands in for the Python that comparisons and studies start: leaves the files of a training, of answers and of
measurements.

`$CALLS` gets a line per call; one that ends with `$HANGS` waits to be told to stop, which it notes, or to be killed.
`$RIGHT` has the share of right answers by arm, as JSON.
It imports nothing that takes a second.
"""

import hashlib
import json
import math
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llava.compare.answers import SOURCES
from llava.utils.digests import revision
from llava.utils.provenance import RUN_FILE
from llava.utils.versions import made_by, software

KINDS = ("color", "count", "binding")
STEP = {"loss": 1.0, "samples_per_second": 8.0, "tokens_per_second": 80.0, "peak_memory_gib": 1.0}


def main(words: list[str]) -> None:
    line = described(words)
    if line is None:
        return
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(line + "\n")
    if line.endswith(os.environ.get("HANGS") or "\n"):
        for sent in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(sent, stopped)
        while True:
            time.sleep(0.1)
    if line.startswith("train"):
        train(flags_of(words))
    elif line.startswith("evaluate"):
        evaluate(words)
    elif line.startswith("answer"):
        answer(flags_of(words))
    elif line.startswith("measure"):
        measure(words, flags_of(words))


def stopped(*_: object) -> None:
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("saved\n")
    sys.exit(143)


def described(words: list[str]) -> str | None:
    text, flags = " ".join(words), flags_of(words)
    if "train_mem.py" in text:
        return f"train {flags['seed']} {arm_of(Path(flags['output_dir']))} {Path(flags['output_dir']).name}"
    if "llava.compare answers" in text:
        return f"answer {arm_of(Path(flags['checkpoint']))}"
    if "playground" in words:
        return f"prepare {words[words.index('playground') + 1]}"
    if "llava.eval.evaluate" in text:
        return f"evaluate {arm_of(Path(words[2]))}"
    if "llava.analysis" in text:
        return f"measure {command_of(words)} {Path(flags['output-dir']).name}"
    return None


def command_of(words: list[str]) -> str:
    return words[words.index("llava.analysis") + 1]


def flags_of(words: list[str]) -> dict[str, str]:
    return {a[2:]: b for a, b in zip(words, [*words[1:], ""], strict=True) if a.startswith("--")}


def arm_of(stage: Path) -> str:
    return stage.parent.name


def train(flags: dict[str, str]) -> None:
    folder, seed = Path(flags["output_dir"]), int(flags["seed"])
    if flags.get("mm_projector_lr") == os.environ.get("DIVERGES", ""):
        sys.exit("NonFiniteError: too many steps were skipped")
    stage, arm = folder.name, arm_of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mm_projector.bin", "model.safetensors"):
        (folder / name).write_text(f"PK {seed} {arm} {stage}")  # as files of tensors begin
    norm = flags["mm_projector_norm"]
    model = {"model_name_or_path": flags["model_name_or_path"], "vision_tower": flags["vision_tower"]}
    model |= {"mm_projector_norm": norm, "mm_projector_norm_init": flags.get("mm_projector_norm_init", "text_norm")}
    model["mm_projector_norm_learnable"] = flags.get("mm_projector_norm_learnable") != "False"
    model["mm_projector_type"] = flags["mm_projector_type"]
    adapter = flags.get("pretrain_mm_mlp_adapter")
    names = ("learning_rate", "mm_projector_lr", "max_grad_norm")
    rates = {name: float(flags[name]) if flags.get(name) else None for name in names}
    config = {"model_type": "llava_llama", "mm_projector_norm": norm, "mm_projector_lr": rates["mm_projector_lr"]}
    (folder / "config.json").write_text(json.dumps(config))
    start = {
        "model": model,
        "training": {"seed": seed, "bf16": False}
        | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        | rates,
        "adapter": adapter and hashlib.sha256(Path(adapter).read_bytes()).hexdigest(),
        "order": seed,
        "initial_weights": {"mm_mlp_adapter": f"{seed} {arm if adapter else ''}"},
        "devices": {"ranks": 1, "kind": "cpu"},
        **software(("numpy",)),
    }
    provenance = {"started": "2026-01-01T00:00:00+00:00", "command": shlex.join(sys.argv), "machine": "a CPU"}
    record = {"configuration": start, "provenance": provenance}
    (folder / RUN_FILE).write_text(json.dumps({"format": 1, "starts": [record]}))
    lines, steps = [], max(2, int(flags["max_steps"]))  # -1: an epoch
    every = max(1, round(steps * float(flags.get("eval_steps") or 1)))
    for step in range(steps + 1):
        norms = {"norm/llm_input": 3.0 + step, "norm/text_embeddings": 3.0}
        lines += [{"step": step} | STEP | norms] if step else []
        if flags.get("eval_data_path") and (step % every == 0 or step == steps):
            share = 0.25 + (right_of(arm) - 0.25) * step / steps
            own = random.Random(f"{seed} {arm} {step}").random()
            lines.append({"step": step, "eval/loss": 2 - share - 0.1 * own})
    (folder / "train_log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def right_of(arm: str) -> float:
    return json.loads(os.environ.get("RIGHT", "{}")).get(arm, 0.5)


def answer(flags: dict[str, str]) -> None:
    checkpoint = Path(flags["checkpoint"])
    write_results(checkpoint, Path(flags["output-dir"]), off_best(checkpoint, Path(flags["data"])))


def off_best(checkpoint: Path, data: Path) -> float:
    """What the projector's rate costs, whose best value by arm a file of questions says."""
    if data.suffix != ".json":
        return 0.0
    rate = json.loads((checkpoint / "config.json").read_text())["mm_projector_lr"]
    return 0.2 * abs(math.log10(rate / json.loads(data.read_text())[arm_of(checkpoint)]))


def evaluate(words: list[str]) -> None:
    flags = flags_of(words)
    kinds = flags["tasks"].split(",") if "tasks" in flags else KINDS
    write_results(Path(words[2]), Path(flags["output-dir"]), kinds=kinds)


def write_results(checkpoint: Path, folder: Path, lost: float = 0.0, kinds: Sequence[str] = KINDS) -> None:
    """Questions are as hard for one arm as for another, up to a little luck."""
    run, stage = arm_of(checkpoint), checkpoint.parent.parent.name
    tasks = {}
    for kind in kinds:
        shared, own = random.Random(f"{stage} {kind}"), random.Random(f"{stage} {kind} {run}")
        share = right_of(run) - lost
        samples = []
        for number in range(100):
            hit = 0.8 * shared.random() + 0.2 * own.random() < share
            sample = {"id": f"{kind}-{number}", "score": float(hit), "answer": "<b>a</b>", "target": "a"}
            samples.append(sample | {"group": kind, "log_probability": -own.random() - (not hit)})
        score = sum(sample["score"] for sample in samples)
        tasks[kind] = {"metric": "accuracy", "score": score, "samples": samples, "chance": 25.0, "seconds": 1.0}
    content = {"format": 1, "checkpoint": str(checkpoint), "fingerprint": revision(str(checkpoint)), "command": ""}
    content |= {"versions": made_by(SOURCES), "settings": {}, "created": "2026-01-01"}
    content["tasks"] = tasks
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(content))


def measure(words: list[str], flags: dict[str, str]) -> None:
    rows = [{"model": word.split("=")[0], "angle": 0.25} for word in words if "=/" in word]
    content = {"rows": rows, "provenance": {"models": []}}
    Path(flags["output-dir"], f"{command_of(words)}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main(sys.argv[1:])
