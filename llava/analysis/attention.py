"""Where a query looks in the picture, and how much of the attention visual tokens get (paper appendix G).

Heatmaps (one row per model, in the order given), by mean over layers and heads or by roll-out; the raster position
profile; entropy; and the visual tokens' share of the attention per layer, beside the share that uniform attention would
give them under the mask that the layer applies (causal, sliding, chunked, or open to a whole prefix).

Layers keep their numbers: one without attention (convolution, linear attention, state space) has empty values, and the
roll-out passes over it.

Shapes: L layers, H heads, S sequence, Q query tokens, V visual tokens.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from llava.analysis import attention_watch, inputs, loading, resume
from llava.analysis.attention_figures import draw_heatmaps, draw_profiles
from llava.analysis.attention_watch import Attention
from llava.analysis.commands import Needs
from llava.analysis.inputs import PicturePrompt
from llava.analysis.layer_statistics import sink_mask
from llava.analysis.models import NamedModel, required_models
from llava.analysis.output import TableRow, write_result
from llava.analysis.probe import TEXT_AFTER, VISUAL, Batch, Observation, Probe
from llava.analysis.resume import Rows, resumed
from llava.analysis.seen_area import WHOLE, Area
from llava.analysis.visual_grid import NoMap, Place, picture_map

NEEDS = Needs()

SHOWN = 5
METHODS = ("mean", "rollout")


class Picture(NamedTuple):
    """What one sample's attention says.

    Attributes:
        maps: per method, the picture's attention over its places [rows, columns], summing to 1; empty where the
            places of its tokens are not known.
        no_map: why there are none; empty where there are.
        area: of the picture, which the maps cover.
        share: per layer, the visual tokens' share of the attention; NaN where a layer has none.
        entropy: per layer, of the distribution over the visual tokens, divided by ln of how many of them the query may
            look at, so that 1 is uniform; NaN where it may look at none.
        top: per layer, the most seen visual token's share of the picture's attention; large where it serves as a sink.
        share_without_sinks, entropy_without_sinks: the same for the visual tokens that are not sinks (see
            `layer_statistics`).
        sinks: which visual tokens are sinks, by their place in the picture.
        uniform: per layer, the visual tokens' share of the tokens that a query token may look at.
    """

    maps: dict[str, np.ndarray]
    no_map: str
    area: Area
    share: np.ndarray
    entropy: np.ndarray
    top: np.ndarray
    share_without_sinks: np.ndarray
    entropy_without_sinks: np.ndarray
    sinks: list[int]
    uniform: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=40)
    parser.add_argument(
        "--query",
        default="question",
        help="the tokens that look: `question` (all text after the picture), `last` (the one that answers), or words "
        "that occur in every question",
    )
    parser.add_argument("--layers", default="all", help="layers that the mean takes: `all`, or as in 4-11,20 (from 0)")
    parser.add_argument("--heads", default="all", help="heads that mean and roll-out take, written as for --layers")
    resume.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes the table, heatmaps by both methods, and the profiles' figure."""
    samples = inputs.choose(args)
    results = {}
    for model in required_models(args.models):
        results[model.name] = measure_attention(model, samples, args)
    rows = [table_row(name, pictures) for name, pictures in results.items()]
    profiles = {name: curves(pictures) for name, pictures in results.items()}
    write_result(args, rows, profiles)
    for name, curve in profiles.items():
        without = [layer for layer, share in enumerate(curve["share per layer"]["mean"]) if math.isnan(share)]
        if without:
            print(f"{name}: no attention, so no values, in layers {', '.join(map(str, without))}")
    draw_maps(args, samples, results)
    draw_profiles(args, profiles)


def draw_maps(args: argparse.Namespace, samples: inputs.Samples, results: dict[str, list[Picture]]) -> None:
    """Draws the first pictures that have a map of every model that gives any, and prints what has none."""
    for name, pictures in results.items():
        for line in map_notes(name, pictures):
            print(line)
    gridded = {name: pictures for name, pictures in results.items() if any(picture.maps for picture in pictures)}
    columns = mapped_by_all(gridded)[:SHOWN]
    if gridded and not columns:
        print(f"no heat maps: no picture has one of every model ({', '.join(gridded)})")
    readable = [index for index in range(len(samples)) if str(index) not in samples.unreadable]
    shown = [samples[readable[column]] for column in columns]
    for method in METHODS if shown else ():
        maps = {
            name: [(pictures[column].maps[method], pictures[column].area) for column in columns]
            for name, pictures in gridded.items()
        }
        draw_heatmaps(args, shown, maps, method)


def mapped_by_all(results: dict[str, list[Picture]]) -> list[int]:
    """The pictures of which every model has a map; none where there are no models."""
    rows = enumerate(zip(*results.values(), strict=True))
    return [index for index, row in rows if all(picture.maps for picture in row)]


def map_notes(name: str, pictures: list[Picture]) -> list[str]:
    """What maps and profiles over rows leave out, or bring to a common form, in sentences."""
    notes, without = [], Counter(picture.no_map for picture in pictures if picture.no_map)
    if without:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in without.most_common())
        rest = len(pictures) - without.total()
        notes.append(f"{name}: no map of {without.total()} of {len(pictures)} pictures: {reasons}")
        if rest:
            notes[-1] += f". Heat maps, `upper half` and shares per row are of the other {rest}"
    rows = {len(picture.maps["mean"]) for picture in pictures if picture.maps}
    if len(rows) > 1:
        notes.append(f"{name}: its pictures have {min(rows)} to {max(rows)} rows of tokens; profiles have {max(rows)}")
    return notes


def measure_attention(named: NamedModel, samples: inputs.Samples, args: argparse.Namespace) -> list[Picture]:
    """Each sample's attention, continuing from what `--output-dir` has."""

    def start() -> Callable[[Rows, Sequence[PicturePrompt]], None]:
        probe = loading.load_with_vision(named, args)
        return lambda state, some: state.rows.extend(look(probe, sample, args) for sample in some)

    flags = ("query", "layers", "heads")
    return resumed(Rows(Picture), "attention", named, samples, start, args, flags=flags).rows


def look(probe: Probe, sample: PicturePrompt, args: argparse.Namespace) -> Picture:
    """Runs one sample and reduces its attention, layer by layer."""
    batch = probe.prepare([sample])
    texts = [probe.token_text(token) if token >= 0 else "" for token in batch.input_ids[0].tolist()]
    asking = query_positions(probe.groups(batch)[0].cpu(), texts, args.query, sample.name)
    called = f"{probe.name}, {sample.name}: no layer lets the query {args.query!r}"
    return attention_of(probe, batch, asking, called, args.layers, args.heads)[0]


def attention_of(
    probe: Probe, batch: Batch, asking: torch.Tensor, called: str, layers: str = "all", heads: str = "all"
) -> tuple[Picture, Observation]:
    """Reduces the attention of a batch of one sample; also returns what else passed through the model.

    Args:
        asking: [S] bool, True at the tokens that look.
        called: how the error message begins where no layer lets these tokens look at the picture.
        layers, heads: values of the flags of these names.

    Raises:
        ValueError: no layer lets the tokens look at the picture, or a named layer has no attention.
    """
    groups, count = probe.groups(batch), len(probe.parts.layers)
    state = _Reducer(groups[0].cpu() == VISUAL, asking, count, chosen(layers, count, "--layers"), heads)
    seen = attention_watch.run(probe, batch, see=state.see)
    if layers != "all" and not state.layers <= state.seen.keys():
        without = ", ".join(map(str, sorted(state.layers - state.seen.keys())))
        raise ValueError(f"--layers {layers}: {probe.name} has no attention in layers {without}")
    if not state.mean.any():
        raise ValueError(f"{called} look at the picture")
    try:
        place, no_map = picture_map(probe.model, batch, groups), ""
    except NoMap as error:
        place, no_map = None, str(error)
    area = batch.areas[0] if batch.areas else WHOLE
    return state.result(place, no_map, area, sink_mask(seen)[0]), seen


class _Look(NamedTuple):
    # The query's attention to the visual tokens [H, V], which of them it may look at [V], and their share of all that
    # it may look at.
    weights: torch.Tensor
    visible: torch.Tensor
    uniform: float


class _Reducer:
    # Sums what is needed while the layers pass; only the roll-out's product [S, S] is kept between them.
    def __init__(self, visual: torch.Tensor, asking: torch.Tensor, count: int, layers: set[int], heads: str) -> None:
        self.visual, self.asking, self.count, self.layers, self.heads = visual, asking, count, layers, heads
        self.mean = torch.zeros(int(visual.sum()), dtype=torch.float64)
        self.rollout: torch.Tensor | None = None
        self.seen: dict[int, _Look] = {}

    def see(self, index: int, attention: Attention) -> None:
        heads = sorted(chosen(self.heads, len(attention.weights), "--heads"))
        weights = attention.weights[heads].double().cpu()
        looks = weights[:, self.asking][:, :, self.visual].mean(dim=1)  # [H, V]
        allowed = attention.allowed.expand(len(attention.weights), -1, -1)[heads].cpu()[:, self.asking]  # [H, Q, S]
        inside = allowed[:, :, self.visual]
        uniform = (inside.sum(dim=-1) / allowed.sum(dim=-1)).mean().item()
        self.seen[index] = _Look(looks, inside.any(dim=0).any(dim=0), uniform)
        if index in self.layers:
            self.mean += looks.mean(dim=0)
        # Half of each layer's output is the residual stream, which keeps a token at its place.
        step = (weights.mean(dim=0) + torch.eye(weights.shape[-1], dtype=torch.float64)) / 2
        self.rollout = step if self.rollout is None else step @ self.rollout

    def result(self, place: Place | None, no_map: str, area: Area, sinks: torch.Tensor) -> Picture:
        rolled = self.rollout[self.asking][:, self.visual].mean(dim=0)
        maps = {"mean": self.mean / self.mean.sum(), "rollout": rolled / rolled.sum()}
        sinks = sinks[self.visual]
        looks = [self.seen.get(index) for index in range(self.count)]
        return Picture(
            {method: place(shares).numpy() for method, shares in maps.items()} if place else {},
            no_map,
            area,
            *per_layer([look and look.weights[:, look.visible] for look in looks]),
            *per_layer([look and look.weights[:, look.visible & ~sinks] for look in looks])[:2],
            sinks.nonzero().flatten().tolist(),
            np.array([look.uniform if look else math.nan for look in looks]),
        )


def per_layer(looks: list[torch.Tensor | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per layer, from looks [H, V], means over heads: share of the attention, entropy / ln V, largest share.

    NaN where a layer has no attention; the entropy and the largest share also where there is nothing to look at.
    """
    values = []
    for look in looks:
        if look is None or not look.shape[1]:
            values.append((math.nan if look is None else 0.0, math.nan, math.nan))
            continue
        share = look.sum(dim=1)
        within = look / share.clamp(min=1e-30)[:, None]
        entropy = -(within * within.clamp(min=1e-30).log()).sum(dim=1) / math.log(max(look.shape[1], 2))
        values.append((share.mean().item(), entropy.mean().item(), within.amax(dim=1).mean().item()))
    return tuple(np.array(values).T)


def query_positions(groups: torch.Tensor, token_texts: list[str], query: str, name: str = "sample") -> torch.Tensor:
    """True at the tokens that look [S]: text after the picture, which alone can see it.

    Args:
        groups: of one sample [S], see `Probe.groups`.
        query: `question`, `last` or words.

    Raises:
        ValueError: the words do not occur after the picture.
    """
    after = groups == TEXT_AFTER
    if query == "question":
        return after
    positions = after.nonzero().flatten().tolist()
    if query == "last":
        looking = [len(groups) - 1]
    else:
        texts = [token_texts[position] for position in positions]
        start = "".join(texts).lower().find(query.lower())
        if start < 0:
            raise ValueError(f"--query {query!r}: {name} does not have it after its picture: {''.join(texts)!r}")
        ends = np.cumsum([len(text) for text in texts])
        inside = (ends > start) & (ends - [len(text) for text in texts] < start + len(query))
        looking = [position for position, takes in zip(positions, inside, strict=True) if takes]
    mask = torch.zeros_like(after)
    mask[looking] = True
    return mask


def chosen(selection: str, count: int, flag: str) -> set[int]:
    """The indices, from 0 to `count` - 1, that `all` or a list such as `4-11,20` names.

    Raises:
        ValueError: the selection is not of that form, or an index is too large.
    """
    if selection == "all":
        return set(range(count))
    try:
        bounds = [[int(number) for number in part.split("-")] for part in selection.split(",")]
        indices = {index for bound in bounds for index in range(bound[0], bound[-1] + 1)}
    except ValueError:
        raise ValueError(f"{flag} {selection}: expected `all` or a list such as 4-11,20") from None
    if not indices or max(indices) >= count:
        raise ValueError(f"{flag} {selection}: there are {count}, from 0 to {count - 1}")
    return indices


def table_row(name: str, pictures: list[Picture]) -> TableRow:
    """Means and medians over samples and layers; the picture's upper half by the mean map."""
    maps = [picture.maps["mean"] for picture in pictures if picture.maps]
    return {
        "model": name,
        "samples": len(pictures),
        "with a map": len(maps),
        **_mean_and_median("visual share of attention", [picture.share for picture in pictures]),
        **_mean_and_median("visual share without sinks", [picture.share_without_sinks for picture in pictures]),
        "share if uniform": float(np.nanmean([picture.uniform for picture in pictures])),
        **_mean_and_median("entropy / ln V", [picture.entropy for picture in pictures]),
        **_mean_and_median("entropy without sinks", [picture.entropy_without_sinks for picture in pictures]),
        "upper half": _mean([upper_half(row_profile(heat)) for heat in maps]),
        "upper half without the most seen": _mean([upper_half(row_profile(without_most_seen(heat))) for heat in maps]),
        "most seen token": float(np.nanmean([picture.top for picture in pictures])),
        "visual sinks a picture": float(np.mean([len(picture.sinks) for picture in pictures])),
    }


def _mean_and_median(name: str, values: list[np.ndarray]) -> dict[str, float]:
    values = np.array(values)[~np.isnan(values)]
    mean, median = (float(np.mean(values)), float(np.median(values))) if len(values) else (math.nan, math.nan)
    return {name: mean, f"{name}, median": median}


def row_profile(heatmap: np.ndarray) -> np.ndarray:
    """Share of the picture's attention per row of tokens, from the top."""
    return heatmap.sum(axis=1)


def with_rows(profile: np.ndarray, rows: int) -> np.ndarray:
    """A profile over the picture's height in another number of rows, each row's share spread evenly over its height."""
    bounds = np.linspace(0, 1, len(profile) + 1)
    return np.diff(np.interp(np.linspace(0, 1, rows + 1), bounds, np.cumsum([0, *profile])))


def without_most_seen(heatmap: np.ndarray) -> np.ndarray:
    """The map without its largest token, which may be an attention sink, summing to 1 again."""
    rest = np.where(heatmap == heatmap.max(), 0.0, heatmap)
    return rest / rest.sum() if rest.any() else heatmap


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def upper_half(profile: np.ndarray) -> float:
    """The part of a profile over rows that lies in the upper half; a middle row counts half."""
    return float((profile * np.clip(len(profile) / 2 - np.arange(len(profile)), 0, 1)).sum())


def curves(pictures: list[Picture]) -> dict[str, Any]:
    """Mean, standard deviation and median over the samples of each layer's values, and the places of the sinks."""
    places = Counter(place for picture in pictures for place in picture.sinks)
    result: dict[str, Any] = {"visual sinks: pictures by place": dict(sorted(places.items()))}
    for name, values in (
        ("share per layer", [picture.share for picture in pictures]),
        ("entropy per layer", [picture.entropy for picture in pictures]),
        ("share per layer without sinks", [picture.share_without_sinks for picture in pictures]),
        ("entropy per layer without sinks", [picture.entropy_without_sinks for picture in pictures]),
        ("most seen token per layer", [picture.top for picture in pictures]),
        ("share per layer if uniform", [picture.uniform for picture in pictures]),
    ):
        result[name] = _moments(values)
    maps = [picture.maps for picture in pictures if picture.maps]
    rows = max((len(heat["mean"]) for heat in maps), default=0)
    for method in METHODS if maps else ():
        result[f"share per row, {method}"] = _moments([with_rows(row_profile(heat[method]), rows) for heat in maps])
    return result


def _moments(values: list[np.ndarray]) -> dict[str, list[float]]:
    # Of each column over the samples that have it; NaN where none has.
    columns = [column[~np.isnan(column)] for column in np.array(values).T]
    kinds = {"mean": np.mean, "std": np.std, "median": np.median}
    return {name: [float(of(c)) if len(c) else math.nan for c in columns] for name, of in kinds.items()}
