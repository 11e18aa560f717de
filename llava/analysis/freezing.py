"""What a trained model loses at inference if its layers stop updating the visual tokens from some layer on.

From layer L to the last one the visual tokens' states pass unchanged, or without the update of attention, or without
that of the MLP. Text still reads from them in every layer. If visual tokens that turn slowly lose information, freezing
must cost a model more whose tokens turn faster.

Shapes: B samples, S sequence, D LLM hidden size, C vocabulary.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from llava.analysis import inputs, loading, resume
from llava.analysis.commands import Needs
from llava.analysis.inputs import PicturePrompt, Samples
from llava.analysis.interventions import BLANK, GREY, HARMLESS, SEES_PICTURES, distance
from llava.analysis.models import NamedModel, required_models
from llava.analysis.output import figure, write_result
from llava.analysis.probe import VISUAL, Batch, Probe
from llava.analysis.resume import Rows, resumed
from llava.utils.presentation import looks

NEEDS = Needs()

WHOLE, ATTENTION, MLP = "all updates", "attention's updates", "the MLP's updates"
ATTENTION_NAMES = ("self_attn", "attention", "attn", "linear_attn", "conv")
MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe")


class Outcome(NamedTuple):
    """One run of one sample, compared with the untouched run.

    Attributes:
        frozen: `WHOLE`, `ATTENTION` or `MLP`; `BLANK` for the run with a blank picture.
        first: the first layer that is frozen; 0 with the blank picture.
        kl: of the output distribution after the prompt, in nats, from the untouched one.
        rank: of the token that the untouched run chose, from 1.
    """

    frozen: str
    first: int
    kl: float
    rank: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=8)
    resume.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`freezing-layers`) and the figure."""
    samples = inputs.choose(args)
    summary, layers = [], []
    for model in required_models(args.models):
        rows = by_layer(model.name, measured(model, samples, args))
        layers += rows
        summary += summarized(rows)
    write_result(args, summary)
    write_result(args, layers, name=f"{args.command}-layers", show=False)
    draw(args, layers)


def measured(named: NamedModel, samples: Samples, args: argparse.Namespace) -> list[Outcome]:
    """The outcomes over all samples; continues from what `--output-dir` has."""

    def start() -> Callable[[Rows, Sequence[PicturePrompt]], None]:
        probe = loading.load_with_vision(named, args)

        def add(state: Rows, some: Sequence[PicturePrompt]) -> None:
            for sample in some:
                state.rows += outcomes_of(probe, sample)

        return add

    return resumed(Rows(Outcome), "freezing", named, samples, start, args).rows


def outcomes_of(probe: Probe, sample: PicturePrompt) -> Iterator[Outcome]:
    """The outcomes of one sample: with a blank picture, and frozen from each layer on.

    Raises:
        ValueError: see `sub_layers` and `check`.
    """
    batch, layers = probe.prepare([sample]), probe.parts.layers
    check(probe, batch)
    expected = _log_probs(probe, batch)
    blank = probe.prepare([sample._replace(image=Image.new("RGB", sample.image.size, GREY))])
    yield Outcome(BLANK, 0, *distance(expected, _log_probs(probe, blank)))
    visual = probe.groups(batch) == VISUAL
    for what in (WHOLE, ATTENTION, MLP):
        for first in range(len(layers)):
            with frozen(layers[first:], visual, what):
                yield Outcome(what, first, *distance(expected, _log_probs(probe, batch)))


def _log_probs(probe: Probe, batch: Batch) -> torch.Tensor:
    """Of the token after the prompt of the only sample [C], fp64."""
    return probe.run(batch).logits[0, -1].double().log_softmax(dim=-1)


def check(probe: Probe, batch: Batch) -> None:
    """Checks that attention and MLP are all that updates a state in this model.

    Raises:
        ValueError: visual tokens change in a layer in which neither does.
    """
    visual = probe.groups(batch) == VISUAL
    with frozen(probe.parts.layers, visual, ATTENTION), frozen(probe.parts.layers, visual, MLP):
        steps = probe.run(batch).steps()
    for index, (entering, leaving) in enumerate(steps):
        at = visual.to(entering.device)
        if not torch.equal(entering[at], leaving[at]):
            raise ValueError(
                f"{probe.name}: layer {index} ({type(probe.parts.layers[index]).__name__}) changes visual tokens by "
                "more than what its attention and its MLP add, so their updates cannot be frozen apart: not measured"
            )


@contextlib.contextmanager
def frozen(layers: Sequence[nn.Module], visual: torch.Tensor, what: str) -> Iterator[None]:
    """Within the block, `layers` do not update the visual tokens, or only one of their two parts does.

    Args:
        visual: [B, S] bool.
        what: `WHOLE`, `ATTENTION` or `MLP`: the updates that are left out.

    Raises:
        ValueError: see `sub_layers`.
    """

    def keep(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        return _replaced(output, visual, args[0] if args else kwargs["hidden_states"])

    def drop(_: nn.Module, args: tuple, output: Any) -> Any:
        return _replaced(output, visual, 0.0)

    if what == WHOLE:
        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    else:
        part = (ATTENTION, MLP).index(what)
        handles = [module.register_forward_hook(drop) for module in [sub_layers(layer)[part] for layer in layers]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replaced(output: Any, visual: torch.Tensor, value: torch.Tensor | float) -> Any:
    """A module's output, [B, S, D] or the first of a tuple, with `value` at visual positions."""
    states = output if isinstance(output, torch.Tensor) else output[0]
    at = visual.to(states.device).reshape(*states.shape[:-1], 1)  # some mixtures of experts return [B S, D]
    states = torch.where(at, value, states)
    return states if isinstance(output, torch.Tensor) else (states, *output[1:])


def sub_layers(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A decoder layer's attention (or what stands in its place) and its MLP.

    Raises:
        ValueError: the layer does not have exactly one of each under a name that is known here.
    """
    children = dict(layer.named_children())
    found = [[children[name] for name in names if name in children] for names in (ATTENTION_NAMES, MLP_NAMES)]
    if [len(modules) for modules in found] != [1, 1]:
        raise ValueError(
            f"{type(layer).__name__}: expected one of {', '.join(ATTENTION_NAMES)} and one of {', '.join(MLP_NAMES)}, "
            f"found {', '.join(children)}: the updates of attention and MLP are not known, so they cannot be frozen"
        )
    return found[0][0], found[1][0]


def by_layer(model: str, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for the blank picture, and one for each kind of update and first layer: means over the samples."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.frozen, outcome.first), []).append(outcome)
    blank = float(np.mean([outcome.kl for outcome in groups[BLANK, 0]]))
    rows = []
    for (what, first), some in groups.items():
        kl = float(np.mean([outcome.kl for outcome in some]))
        rows.append(
            {
                "model": model,
                "frozen": what,
                "from layer": first,
                "KL (nats)": kl,
                "KL median": float(np.median([outcome.kl for outcome in some])),
                "over blank picture": kl / blank if blank >= SEES_PICTURES else None,
                "answer changes (%)": 100 * float(np.mean([outcome.rank > 1 for outcome in some])),
            }
        )
    return rows


def summarized(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kind of update, what freezing costs from the first, the middle and later layers on.

    `harmless from` is the first layer from which on, as from all later ones, freezing costs less than `HARMLESS` of
    what the blank picture does; a model whose blank picture changes nearly nothing has none.
    """
    summary = []
    for what in (WHOLE, ATTENTION, MLP):
        own = [row for row in rows if row["frozen"] == what]
        shares = [row["over blank picture"] for row in own]
        harmful = [row["from layer"] for row, share in zip(own, shares, strict=True) if (share or 0.0) >= HARMLESS]
        summary.append(
            {
                "model": own[0]["model"],
                "frozen": what,
                **{f"KL from {row['from layer']}": row["KL (nats)"] for row in own[:: max(1, len(own) // 4)]},
                "KL of blank picture": next(row["KL (nats)"] for row in rows if row["frozen"] == BLANK),
                "over blank picture": shares[0],
                "answer changes (%)": own[0]["answer changes (%)"],
                "harmless from": None if shares[0] is None else max(harmful, default=-1) + 1,
            }
        )
    return summary


def draw(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """KL over the first frozen layer, a panel for each kind of update; the blank picture's as a dotted line."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with figure(args, 1, 3, figsize=(13, 4), sharey=True) as (drawn, axes):
        for model, look in looks(models).items():
            own = [row for row in rows if row["model"] == model]
            (blank,) = [row["KL (nats)"] for row in own if row["frozen"] == BLANK]
            for axis, what in zip(axes, (WHOLE, ATTENTION, MLP), strict=True):
                points = [(row["from layer"], row["KL (nats)"]) for row in own if row["frozen"] == what]
                axis.plot(*zip(*points, strict=True), "o-", color=look["color"], label=model, markersize=4)
                axis.axhline(blank, color=look["color"], linestyle=":", linewidth=1.2)
        for axis, what in zip(axes, (WHOLE, ATTENTION, MLP), strict=True):
            axis.set(title=f"Without {what}", xlabel="frozen from this layer on")
            axis.set_yscale("symlog", linthresh=0.01)  # the last layer's update is read by no text: 0
            axis.set_ylim(bottom=0)
        axes[0].set(ylabel="KL from the untouched output (nats)\n(dotted: blank picture)")
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
