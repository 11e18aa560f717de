"""What the presets for one card take on cards of 24, 48 and 80 GB, alone and by eight; a section of docs/scale.md.

Files of DeepSpeed and sizes of micro-batches are those that a run chooses (llava.train.memory), from what a card
of that size has free before anything is loaded. `python -m benchmarks.scale` prints the section.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.shapes import PRESETS, STAGES, build_llava
from llava.data.prepare import SOURCES
from llava.launch.recipe import resolved_run
from llava.model.lora import add_lora
from llava.train.memory import OFFLOAD, Choice, choose
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, set_trainable
from llava.train.telemetry import Work, flop_costs, required_flops

NAMES = ("nano", "0.5b", "1.5b", "3b-qwen")
GIB = 2**30
SAMPLES = {1: SOURCES["llava-558k"].records, 2: SOURCES["llava-next"].records}
COUNTS = (1, 8)
USABLE = 0.9 * (1 - 0.02)  # the share that a run takes; the driver and CUDA have taken two hundredths before


@dataclass(frozen=True)
class Card:
    """A card's memory in GB as it is sold (GiB by its driver), and an example's dense bf16 peak."""

    memory: int
    example: str
    tflops: float

    @property
    def budget(self) -> float:
        """Bytes that a run may take."""
        return USABLE * self.memory * GIB


CARDS = (Card(24, "RTX 4090", 165), Card(48, "L40S", 362), Card(80, "H100", 989))
PCIE, HOST = 25e9, 50e9  # bytes per second to a card, and of the host's memory, which the ranks share


@dataclass(frozen=True)
class Recipe:
    """A stage of a preset, as its script resolves it."""

    name: str
    stage: int
    lora: bool

    @property
    def label(self) -> str:
        return f"{self.stage}, LoRA" if self.lora else str(self.stage)

    def resolved(self) -> dict[str, Any]:
        return resolved_run(("pretrain", "finetune")[self.stage - 1], PRESET=self.name, NUM_GPUS=1, LORA=int(self.lora))


RECIPES = tuple(Recipe(name, *kind) for name in NAMES for kind in ((1, False), (2, False), (2, True)))


def build(recipe: Recipe, flags: dict[str, str]) -> Any:
    """The recipe's model in bf16 on the meta device, with `requires_grad` as the stage sets it."""
    model = build_llava(PRESETS[recipe.name], torch.device("meta"), torch.bfloat16)
    model.tie_weights()
    parts = STAGES[recipe.stage]
    if recipe.lora:
        parts = {ADAPTER, LANGUAGE_MODEL}
        add_lora(model, int(flags["lora_r"]), int(flags["lora_alpha"]), 0.05, torch.bfloat16)
    set_trainable(model, frozenset(parts))
    model.config._attn_implementation = "flash_attention_2"
    return model


def arguments(flags: dict[str, str], ranks: int) -> SimpleNamespace:
    """The training arguments that the choice reads."""
    fixed = {"optim": "adamw_torch_fused", "bf16": True, "fp16": False, "use_liger_kernel": True}
    length = int(flags["model_max_length"])
    return SimpleNamespace(device=torch.device("cuda"), world_size=ranks, model_max_length=length, **fixed)


def hours(model: Any, recipe: Recipe, batch: int, choice: Choice, card: Card, cards: int, args: Any) -> float:
    """Estimated hours of an epoch.

    Args:
        args: `mfu`, and `text` and `targets` of a sample in tokens.
    """
    tower = model.get_vision_tower()
    tokens, samples = tower.num_tokens + args.text, batch / cards
    work = Work(samples, samples * tokens, samples * tokens * (tokens + 1) / 2, samples, samples * args.targets)
    flops = required_flops(flop_costs(model), work)
    if choice.recomputes:  # as if every layer were: a forward pass is a third, and half where weights are frozen
        flops *= 3 / 2 if recipe.lora or recipe.stage == 1 else 4 / 3
    seconds = flops / (card.tflops * 1e12 * args.mfu)
    if choice.zero == OFFLOAD:
        elements = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        micro_batches = -(-samples * tokens // choice.tokens)
        # Weights go to the card in both passes and gradients back; Adam reads and writes 28 bytes per weight.
        seconds += micro_batches * (4 * elements + 2 * trained) / PCIE + 28 * trained / HOST
    return seconds * SAMPLES[recipe.stage] / batch / 3600


def rows(mfu: float, text: dict[int, int], targets: dict[int, int]) -> Iterator[list[str]]:
    """A row for every preset and stage, with a cell for each card and number of cards."""
    for recipe in RECIPES:
        run = recipe.resolved()
        model = build(recipe, run["flags"])
        sizes = SimpleNamespace(mfu=mfu, text=text[recipe.stage], targets=targets[recipe.stage])
        cells = []
        for count in COUNTS:
            for card in CARDS:
                choice = choose(model, arguments(run["flags"], count), card.budget, None)
                time = hours(model, recipe, run["batch"]["global"], choice, card, count, sizes)
                cells.append(cell(choice, card, time))
        yield [recipe.name, recipe.label, *cells]


def cell(choice: Choice, card: Card, time: float) -> str:
    """The choice, its memory and its time; `-` if it does not fit."""
    if choice.needed > card.budget:
        return "-"
    layout = choice.zero.rpartition("/")[2].removesuffix(".json").replace("zero3_offload", "offload") or "none"
    recomputes = " r" if choice.recomputes else ""
    shown = f"{time:.0f}" if time >= 10 else f"{time:.1f}"
    return f"{choice.needed / GIB:.0f} GiB, {shown} h ({layout}, {choice.tokens}{recomputes})"


def header() -> list[str]:
    return ["preset", "stage", *(f"{count} x {card.memory} GB" for count in COUNTS for card in CARDS)]


SECTION = """
## The presets for one card

Estimated memory of a card and hours of the whole stage, for the recipes' data (LLaVA-558K and LLaVA-NeXT 779K). In
brackets what `DEEPSPEED_CONFIG=auto` and `MAX_TOKENS_PER_MICRO_BATCH=auto` choose on such cards with Liger's kernels:
the file of `deepspeed_configs/` (`offload`: `zero3_offload.json`; `none`: no DeepSpeed), the tokens of a micro-batch,
and `r` if layers recompute their activations. Nothing of this was measured.

- A run may take {usable:.0%} of a card's memory. A card reaches {mfu:g} of its dense bf16 peak, which is that of
  {examples}.
- A recomputing run is counted as if it recomputed every layer. Communication between cards costs nothing.
- Offload moves weights and gradients at {pcie:.0f} GB/s for every micro-batch, and Adam uses {host:.0f} GB/s of the
  host's memory. The host needs about 16 bytes per trained weight, and a C++ compiler
  ([clusters.md](clusters.md#which-zero)).
- Reading data keeps up.
"""


def section(mfu: float) -> str:
    """The section's introduction."""
    examples = ", ".join(f"{card.example} ({card.memory} GB, {card.tflops} TFLOP/s)" for card in CARDS)
    return SECTION.format(usable=USABLE, examples=examples, mfu=mfu, pcie=PCIE / 1e9, host=HOST / 1e9)
