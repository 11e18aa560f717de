"""What the presets take on cards of 24, 48 and 80 GB, alone and by eight: prints docs/data/scale.csv.

Files of DeepSpeed and sizes of micro-batches are those that `--deepspeed auto` chooses (llava.train.memory), from what
a card of that size has free before anything is loaded. Nothing is run.
"""

import csv
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.shapes import PRESETS, STAGES, build_llava
from llava.launch.recipe import resolved_run
from llava.model.lora import add_lora
from llava.train.memory import AUTO, OFFLOAD, Choice, choose
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, set_trainable
from llava.train.telemetry import flop_costs
from llava.utils.commands import Parser

NAMES = ("nano", "0.5b", "1.5b", "3b-qwen", "llama-3.2-3b", "qwen2.5-7b")
SAMPLES = {1: 558_128, 2: 779_289}  # LLaVA-558K and LLaVA-NeXT's data
TEXT, TARGETS = {1: 25, 2: 300}, {1: 20, 2: 200}  # tokens of a sample, on average
COUNTS = (1, 8)
GIB = 2**30
MFU = 0.4
USABLE = 0.9 * (1 - 0.02)  # the share that a run takes; the driver and CUDA have taken two hundredths before
PCIE, HOST = 25e9, 50e9  # bytes per second to a card, and of the host's memory, which the ranks share


class Card(NamedTuple):
    """A card's memory in GB as it is sold (GiB by its driver), and its dense bf16 peak."""

    memory: int
    tflops: float

    @property
    def budget(self) -> float:
        """Bytes that a run may take."""
        return USABLE * self.memory * GIB


CARDS = (Card(24, 165), Card(48, 362), Card(80, 989))  # RTX 4090, L40S, H100


class Recipe(NamedTuple):
    """A stage of a preset, as its script resolves it."""

    name: str
    stage: int
    lora: bool

    @property
    def label(self) -> str:
        return f"{self.stage}, LoRA" if self.lora else str(self.stage)

    def resolved(self) -> dict[str, Any]:
        script = "pretrain" if self.stage == 1 else "finetune"
        return resolved_run(script, PRESET=self.name, NUM_GPUS=1, LORA=int(self.lora))


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


def hours(model: Any, recipe: Recipe, batch: int, choice: Choice, card: Card, cards: int) -> float:
    """Estimated hours of an epoch at an MFU of `MFU`."""
    tokens, samples = model.get_vision_tower().num_tokens + TEXT[recipe.stage], batch / cards
    pairs, targets = samples * tokens * (tokens + 1) / 2, samples * TARGETS[recipe.stage]
    flops = float(flop_costs(model) @ [samples * tokens, pairs, samples, targets])
    if choice.recomputes:  # as if every layer were: a forward pass is a third, and half where weights are frozen
        flops *= 3 / 2 if recipe.lora or recipe.stage == 1 else 4 / 3
    seconds = flops / (card.tflops * 1e12 * MFU)
    if choice.zero == OFFLOAD:
        elements = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        micro_batches = -(-samples * tokens // choice.tokens)
        # Weights go to the card in both passes and gradients back; Adam reads and writes 28 bytes per weight.
        seconds += micro_batches * (4 * elements + 2 * trained) / PCIE + 28 * trained / HOST
    return seconds * SAMPLES[recipe.stage] / batch / 3600


def rows() -> Iterator[list[str]]:
    """A row for every preset and stage, with a cell for each number of cards and each card."""
    for recipe in RECIPES:
        run = recipe.resolved()
        model = build(recipe, run["flags"])
        cells = []
        for count in COUNTS:
            for card in CARDS:
                choice = choose(model, arguments(run["flags"], count), card.budget, AUTO)
                cells.append(cell(choice, card, hours(model, recipe, run["batch"]["global"], choice, card, count)))
        yield [recipe.name, recipe.label, *cells]


def cell(choice: Choice, card: Card, time: float) -> str:
    """The choice, its memory and its time; `-` if it does not fit."""
    if choice.needed > card.budget:
        return "-"
    layout = choice.zero.rpartition("/")[2].removesuffix(".json").replace("zero3_offload", "offload") or "none"
    recomputes = " r" if choice.recomputes else ""
    shown = f"{time:.0f}" if time >= 10 else f"{time:.1f}"
    return f"{choice.needed / GIB:.0f} GiB, {shown} h ({layout}, {choice.tokens}{recomputes})"


def main() -> None:
    Parser(description=__doc__).parse_args()
    header = ["preset", "stage", *(f"{count} x {card.memory} GB" for count in COUNTS for card in CARDS)]
    csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows()])


if __name__ == "__main__":
    main()
