"""Where a query looks in the picture, and how much of the attention visual tokens get (paper appendix G).

Heatmaps (one row per model, in the order given), by mean over layers and heads or by roll-out; the raster position
profile; entropy; and the visual tokens' share of the attention per layer.

Shapes: H heads, S sequence, Q query tokens, V visual tokens.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from llava.analysis import inputs, loading
from llava.analysis.attention_watch import watched
from llava.analysis.inputs import Sample
from llava.analysis.models import required_models
from llava.analysis.output import COLOURS, figure, write_result
from llava.analysis.probe import TEXT_AFTER, VISUAL, Probe
from llava.analysis.statistics import Stream
from llava.analysis.visual_grid import visual_grid

SHOWN = 5
METHODS = ("mean", "rollout")


class Picture(NamedTuple):
    """What one sample's attention says.

    Attributes:
        maps: per method, the picture's attention over its tokens [rows, columns], summing to 1; empty where the tokens
            form no grid.
        share: per layer, the visual tokens' share of the attention.
        entropy: per layer, of the distribution over the visual tokens, in units of ln V (1 is uniform).
        top: per layer, the most seen visual token's share of the picture's attention; large where it serves as sink.
        token_share: the visual tokens' share of the tokens that a query token may look at.
    """

    maps: dict[str, np.ndarray]
    share: np.ndarray
    entropy: np.ndarray
    top: np.ndarray
    token_share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=40)
    parser.add_argument(
        "--query",
        default="question",
        help="the tokens that look: `question` (all text after the picture), `last` (the one that answers), or words "
        "that occur in every question",
    )
    parser.add_argument("--layers", default="all", help="of the mean: `all`, or as in 4-11,20 (the first is 0)")
    parser.add_argument("--heads", default="all", help="of mean and roll-out, as --layers")


def run(args: argparse.Namespace) -> None:
    """Writes the table, heatmaps by both methods, and the profiles' figure."""
    samples = inputs.choose(args)
    results = {}
    for model in required_models(args.models):
        probe = loading.load_with_vision(model, args)
        results[model.name] = [look(probe, one, args) for one in tqdm(samples, desc=f"attention, {model.name}")]
        del probe  # before the next one is loaded
    rows = [table_row(name, pictures) for name, pictures in results.items()]
    write_result(args, rows, {name: curves(pictures) for name, pictures in results.items()})
    gridded = {name: pictures for name, pictures in results.items() if all(one.maps for one in pictures)}
    if len(gridded) < len(results):
        print(f"no heatmap, visual tokens form no single grid: {', '.join(results.keys() - gridded.keys())}")
    for method in METHODS if gridded else ():
        draw_heatmaps(args, samples[:SHOWN], gridded, method)
    draw_profiles(args, results)


def look(probe: Probe, sample: Sample, args: argparse.Namespace) -> Picture:
    """Runs one sample and reduces its attention, layer by layer."""
    batch = probe.prepare([sample])
    groups = probe.groups(batch)
    texts = [probe.token_text(token) if token >= 0 else "" for token in batch.input_ids[0].tolist()]
    asking = query_positions(groups[0].cpu(), texts, args.query, sample.name)
    layers = chosen(args.layers, len(probe.parts.layers), "--layers")
    state = _Reducer(groups[0].cpu() == VISUAL, asking, layers, args.heads)
    with watched(probe.parts.layers, see=state.see):
        probe.run(batch)
    return state.result(visual_grid(probe.model, batch, groups))


class _Reducer:
    # Sums what is needed while the layers pass; only the roll-out's product [S, S] is kept between them.
    def __init__(self, visual: torch.Tensor, asking: torch.Tensor, layers: set[int], heads: str) -> None:
        self.visual, self.asking, self.layers, self.heads = visual, asking, layers, heads
        self.mean = torch.zeros(int(visual.sum()), dtype=torch.float64)
        self.rollout: torch.Tensor | None = None
        self.per_layer: list[tuple[float, float, float]] = []

    def see(self, index: int, weights: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        heads = sorted(chosen(self.heads, len(weights), "--heads"))
        weights = weights[heads].double().cpu()
        looks = weights[:, self.asking][:, :, self.visual].mean(dim=1)  # [H, V]
        share = looks.sum(dim=1)
        within = looks / share.clamp(min=1e-30)[:, None]
        entropy = -(within * within.clamp(min=1e-30).log()).sum(dim=1) / math.log(max(within.shape[1], 2))
        self.per_layer.append((share.mean().item(), entropy.mean().item(), within.amax(dim=1).mean().item()))
        if index in self.layers:
            self.mean += looks.mean(dim=0)
        # Half of each layer's output is the residual stream, which keeps a token at its place.
        step = (weights.mean(dim=0) + torch.eye(weights.shape[-1], dtype=torch.float64)) / 2
        self.rollout = step if self.rollout is None else step @ self.rollout

    def result(self, grid: tuple[int, int] | None) -> Picture:
        rolled = self.rollout[self.asking][:, self.visual].mean(dim=0)
        maps = {"mean": self.mean / self.mean.sum(), "rollout": rolled / rolled.sum()}
        positions = self.asking.nonzero().flatten()
        before = torch.cumsum(self.visual, 0)[positions].double()
        share, entropy, top = np.array(self.per_layer).T
        return Picture(
            {method: one.reshape(grid).numpy() for method, one in maps.items()} if grid else {},
            share,
            entropy,
            top,
            (before / (positions + 1)).mean().item(),
        )


def query_positions(groups: torch.Tensor, token_texts: list[str], query: str, name: str = "sample") -> torch.Tensor:
    """True at the tokens that look [S]: text after the picture, which alone can see it.

    Args:
        groups: of one sample [S], see `Probe.groups`.
        query: `question`, `last` or words.

    Raises:
        ValueError: the words do not occur there.
    """
    after = groups == TEXT_AFTER
    if query == "question":
        return after
    positions = after.nonzero().flatten().tolist()
    if query == "last":
        wanted = [len(groups) - 1]
    else:
        texts = [token_texts[position] for position in positions]
        start = "".join(texts).lower().find(query.lower())
        if start < 0:
            raise ValueError(f"--query {query!r}: {name} does not have it after its picture: {''.join(texts)!r}")
        ends = np.cumsum([len(text) for text in texts])
        inside = (ends > start) & (ends - [len(text) for text in texts] < start + len(query))
        wanted = [position for position, takes in zip(positions, inside, strict=True) if takes]
    mask = torch.zeros_like(after)
    mask[wanted] = True
    return mask


def chosen(selection: str, count: int, flag: str) -> set[int]:
    """The indices that `all` or a list such as `4-11,20` names.

    Raises:
        ValueError: not of that form, or an index that is not there.
    """
    if selection == "all":
        return set(range(count))
    try:
        bounds = [[int(number) for number in part.split("-")] for part in selection.split(",")]
        found = {index for bound in bounds for index in range(bound[0], bound[-1] + 1)}
    except ValueError:
        raise ValueError(f"{flag} {selection}: expected `all` or a list such as 4-11,20") from None
    if not found or max(found) >= count:
        raise ValueError(f"{flag} {selection}: there are {count}, from 0 to {count - 1}")
    return found


def table_row(name: str, pictures: list[Picture]) -> dict[str, Any]:
    """Means over samples and layers; the picture's upper half by the mean map."""
    maps = [one.maps["mean"] for one in pictures if one.maps]
    return {
        "model": name,
        "samples": len(pictures),
        "visual share of attention": float(np.mean([one.share for one in pictures])),
        "of tokens": float(np.mean([one.token_share for one in pictures])),
        "entropy / ln V": float(np.mean([one.entropy for one in pictures])),
        "upper half": _mean([upper_half(row_profile(one)) for one in maps]),
        "upper half without the most seen": _mean([upper_half(row_profile(without_most_seen(one))) for one in maps]),
        "most seen token": float(np.mean([one.top for one in pictures])),
    }


def row_profile(heatmap: np.ndarray) -> np.ndarray:
    """Share of the picture's attention per row of tokens, from the top."""
    return heatmap.sum(axis=1)


def without_most_seen(heatmap: np.ndarray) -> np.ndarray:
    """The map without its largest token, which may be an attention sink, summing to 1 again."""
    rest = np.where(heatmap == heatmap.max(), 0.0, heatmap)
    return rest / rest.sum() if rest.any() else heatmap


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def upper_half(profile: np.ndarray) -> float:
    """What the upper half of the rows has of a profile; a middle row counts half."""
    return float((profile * np.clip(len(profile) / 2 - np.arange(len(profile)), 0, 1)).sum())


def curves(pictures: list[Picture]) -> dict[str, Any]:
    """Means and standard deviations over the samples of what the profiles' figure shows."""
    result: dict[str, Any] = {}
    for name, values in (
        ("share per layer", [one.share for one in pictures]),
        ("entropy per layer", [one.entropy for one in pictures]),
        ("most seen token per layer", [one.top for one in pictures]),
    ):
        result[name] = _moments(values)
    maps = [one.maps for one in pictures if one.maps]
    if len({one["mean"].shape for one in maps}) == 1:  # pictures of different sizes have no common rows
        for method in METHODS:
            result[f"share per row, {method}"] = _moments([row_profile(one[method]) for one in maps])
    result["visual share of tokens"] = float(np.mean([one.token_share for one in pictures]))
    return result


def _moments(values: list[np.ndarray]) -> dict[str, list[float]]:
    streams = [Stream() for _ in values[0]]
    for row in values:
        for stream, value in zip(streams, row, strict=True):
            stream.add(value)
    return {"mean": [stream.mean for stream in streams], "std": [stream.std for stream in streams]}


def draw_heatmaps(
    args: argparse.Namespace, samples: Sequence[Sample], results: dict[str, list[Picture]], method: str
) -> None:
    """One column per sample: the picture, then one row per model in the given order; one colour scale per column."""
    shown = range(len(samples))
    size = (2.3 * len(shown) + 0.8, 2.2 * len(results) + 2.6)
    name = f"{args.command}-heatmaps" if method == "mean" else f"{args.command}-{method}"
    with figure(args, 1 + len(results), len(shown), figsize=size, squeeze=False, name=name) as (drawn, axes):
        for column in shown:
            picture = samples[column].image.convert("RGB")
            extent = (0, picture.width, picture.height, 0)
            axes[0, column].imshow(picture, extent=extent)
            axes[0, column].set_title(_wrapped(samples[column].prompt), fontsize=9)
            top = max(pictures[column].maps[method].max() for pictures in results.values())
            for row, (model, pictures) in enumerate(results.items(), 1):
                axis = axes[row, column]
                axis.imshow(picture.convert("L"), cmap="gray", extent=extent, vmin=-200, vmax=300)
                image = axis.imshow(
                    pictures[column].maps[method], cmap="inferno", alpha=0.65, extent=extent, vmin=0, vmax=top
                )
                axis.set_ylabel(model if column == 0 else "")
            for axis in axes[:, column]:
                axis.set(xticks=[], yticks=[])
                axis.grid(False)
        bar = drawn.colorbar(image, ax=axes[1:], shrink=0.8, ticks=[0, top])
        bar.ax.set_yticklabels(["0", "most"])
        bar.set_label("share of the picture's attention")


def _wrapped(text: str, width: int = 26, lines: int = 2) -> str:
    import textwrap

    found = textwrap.wrap(text, width)
    return "\n".join(found[:lines]) + ("..." if len(found) > lines else "")


def draw_profiles(args: argparse.Namespace, results: dict[str, list[Picture]]) -> None:
    """Share of attention per image row, visual share per layer, entropy per layer; bands are one std over samples."""
    with figure(args, 1, 3, figsize=(12, 3.8), name=f"{args.command}-profiles") as (drawn, axes):
        for (name, pictures), colour in zip(results.items(), COLOURS * len(results), strict=False):
            found = curves(pictures)
            panels = ("share per row, mean", "share per layer", "entropy per layer")
            for axis, key in zip(axes, panels, strict=True):
                if key not in found:
                    continue
                mean, std = np.array(found[key]["mean"]), np.array(found[key]["std"])
                at = np.arange(len(mean)) + (1 if axis is axes[0] else 0)
                axis.plot(at, mean, "o-", markersize=3, color=colour, label=name)
                axis.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
            axes[1].axhline(found["visual share of tokens"], color=colour, linestyle=":", linewidth=1)
            if panels[0] in found:
                rows = len(found[panels[0]]["mean"])
                axes[0].xaxis.get_major_locator().set_params(integer=True)
                axes[0].axhline(1 / rows, color="black", linestyle=":", linewidth=1)
        axes[0].set(xlabel="row of visual tokens, from the top", ylabel="share of the picture's attention")
        axes[0].set_title("Raster position (dotted: uniform)")
        axes[1].set(xlabel="layer", ylabel="share of the query's attention", ylim=(0, None))
        axes[1].set_title("Attention to visual tokens\n(dotted: their share of the tokens)")
        axes[2].set(xlabel="layer", ylabel="entropy / ln V", title="Entropy over the picture (1: uniform)")
        drawn.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
