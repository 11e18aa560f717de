"""A run as the variables and flags resolve it, and how it is shown: table, command, inputs, JSON."""

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llava.launch.command import Launch, resolve_launch
from llava.launch.devices import (
    Batch,
    Devices,
    has_bf16_instructions,
    resolve_batch,
    resolve_devices,
)
from llava.launch.inputs import MISSING, WRONG, Input, check_inputs
from llava.launch.settings import Flags, Refusal, is_on, one_of, parse_flags
from llava.utils.paths import shipped


@dataclass(frozen=True)
class Plan:
    """Everything that a stage's run is made of."""

    stage: str
    preset: str
    entry: str
    python: str
    devices: Devices
    batch: Batch
    launch: Launch
    flags: Flags
    inputs: tuple[Input, ...]

    @property
    def output_dir(self) -> Path:
        return Path(self.flags.value("output_dir"))

    @property
    def problems(self) -> list[Input]:
        """The inputs with which the run cannot start."""
        return [each for each in self.inputs if each.state in (MISSING, WRONG)]

    def command(self, entry: str = "") -> list[str]:
        """The whole command as words."""
        return [*self.launch.command(), entry or self.entry, *self.flags.words()]


def resolve(environment: Mapping[str, str], entry: str, words: Sequence[str], cores: int = 1) -> Plan:
    """The run of `entry` with the flags `words` on `cores` cores; raises Refusal for a setting that cannot be used."""
    flags = parse_flags(words)
    output_dir = flags.value("output_dir")
    if not output_dir:
        raise Refusal("OUTPUT_DIR is empty; expected the folder where everything goes")
    if flags.value("deepspeed"):
        flags = flags.with_value("deepspeed", shipped(flags.value("deepspeed")))
    python = environment.get("PYTHON_BIN") or ".venv/bin/python"
    one_of("LIGER", flags.value("use_liger_kernel") or "False", ("auto", "True", "False", "1", "0"))
    devices = resolve_devices(environment)
    global_batch, size = environment.get("GLOBAL_BATCH", ""), flags.value("per_device_train_batch_size")
    batch = resolve_batch(devices, global_batch, size, flags.value("gradient_accumulation_steps"))
    flags = flags.with_value("per_device_train_batch_size", str(batch.per_device))
    if flags.value("length_group_window") == "auto":
        window = batch.length_group_window if is_on(flags.value("group_by_modality_length")) else 1
        flags = flags.with_value("length_group_window", str(window))
    run_name = environment.get("RUN_NAME") or Path(output_dir).name
    bf16 = "False" if is_on(flags.value("fp16")) else str(devices.on_gpu or has_bf16_instructions())
    flags = flags.before(
        gradient_accumulation_steps=str(batch.accumulation),
        bf16=environment.get("BF16") or bf16,
        tf32=environment.get("TF32") or str(devices.on_gpu),
        run_name=run_name,
    )
    launch = resolve_launch(environment, devices, flags.value("deepspeed"), run_name, python, cores)
    inputs = [*missing_deepspeed(environment, flags, launch), *check_inputs(environment, flags, devices, launch)]
    stage, preset = environment.get("STAGE", ""), environment.get("PRESET", "")
    return Plan(stage, preset, entry, python, devices, batch, launch, flags, tuple(inputs))


def missing_deepspeed(environment: Mapping[str, str], flags: Flags, launch: Launch) -> Iterator[Input]:
    """The package DeepSpeed, where the run needs it and the caller's own environment, a wheel's too, lacks it."""
    python = environment.get("LLAVA_PYTHON", "")  # without it scripts/setup.sh installs the package
    if python and (flags.value("deepspeed") or launch.launcher == "deepspeed"):
        lacks = "from importlib.util import find_spec; print(find_spec('deepspeed') is None)"
        if subprocess.run([python, "-c", lacks], capture_output=True, text=True).stdout.strip() == "True":
            advice = f"{python} -m pip install deepspeed; or, on one device, set DEEPSPEED_CONFIG="
            yield Input(MISSING, "DEEPSPEED", "the package is not installed", advice)


def configuration(plan: Plan) -> list[tuple[str, str]]:
    """The rows of the table that is shown before a run; those without a value are left out."""
    value = plan.flags.value
    steps = value("max_steps")
    length = f"{value('num_train_epochs')} epoch(s)"
    if steps.isdecimal() and int(steps) > 0:
        length = "1 step" if steps == "1" else f"{steps} steps"
    init = value("mm_projector_norm_init")
    auto = "auto: chosen by the GPUs' memory when the run starts (docs/scale.md has estimates)"
    tokens, zero = (
        auto if value(flag) == "auto" else value(flag) for flag in ("max_tokens_per_micro_batch", "deepspeed")
    )
    rows = [
        ("stage", plan.stage),
        ("preset", plan.preset),
        ("arm (NORM)", value("mm_projector_norm") + (f", initial norm {init}" if init else "")),
        ("trains", value("mm_tunable_parts") or "mm_mlp_adapter"),
        ("LoRA rank", value("lora_r")),
        ("devices", str(plan.devices)),
        ("per-device batch", str(plan.batch.per_device)),
        ("accumulation", str(plan.batch.accumulation)),
        ("global batch", str(plan.batch)),
        ("micro-batch tokens", tokens),
        ("learning rate", value("learning_rate")),
        ("  projector", value("mm_projector_lr")),
        ("  vision tower", value("mm_vision_tower_lr")),
        ("length", length),
        ("max. tokens", value("model_max_length")),
        ("model", value("model_name_or_path")),
        ("vision tower", value("vision_tower")),
        ("data", value("data_path")),
        ("images", value("image_folder")),
        ("held-out data", value("eval_data_path")),
        ("adapter", value("pretrain_mm_mlp_adapter")),
        ("launcher", plan.launch.launcher),
        ("deepspeed", zero or "none"),
        ("Liger's kernels", value("use_liger_kernel")),
        ("reports to", value("report_to")),
        ("output", value("output_dir")),
    ]
    return [(name, text) for name, text in rows if text]


def command_text(plan: Plan, entry: str, indent: str = "") -> str:
    """The whole command as a shell reads it, one flag per line."""
    lines = [[*plan.launch.command(), entry], *plan.flags.given.values()]
    return indent + f" \\\n{indent}  ".join(map(shlex.join, lines))


def show(plan: Plan) -> str:
    """Configuration, command and inputs, as a run prints them first."""
    lines = ["configuration"]
    lines += [f"  {name:<20} {text}" for name, text in configuration(plan)]
    lines += ["command", command_text(plan, plan.entry, indent="  "), "inputs"]
    for each in plan.inputs:
        lines.append(f"  {each.state:<8} {each.what:<14} {each.value}")
        if each.hint:
            lines.append(f"  {'':<8} {'':<14} -> {each.hint}")
    if any(each.state == MISSING for each in plan.inputs):
        lines.append(f"  relative paths start at {Path.cwd()}")
    return "\n".join(lines)


def as_json(plan: Plan) -> str:
    """The plan as JSON, for programs."""
    sizes = (plan.batch.per_device, plan.batch.accumulation, plan.batch.total)
    content = {
        "stage": plan.stage,
        "preset": plan.preset,
        "devices": vars(plan.devices),
        "batch": dict(zip(("per_device", "accumulation", "global"), sizes, strict=True)),
        "launcher": plan.launch.launcher,
        "environment": plan.launch.environment,
        "command": plan.command(),
        "flags": plan.flags.values(),
        "inputs": [vars(each) for each in plan.inputs],
        "problems": [f"{each.what} {each.value}: {each.state}, {each.hint}" for each in plan.problems],
    }
    return json.dumps(content, indent=1)
