"""The figures of `attention`: heatmaps over the pictures, and profiles over image rows and layers."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from llava.analysis.inputs import PicturePrompt
from llava.analysis.output import figure
from llava.analysis.seen_area import WHOLE, Area
from llava.utils.presentation import NEUTRAL, import_pyplot, looks

COLOUR_MAP, OPACITY = "inferno", 0.65


def draw_heatmaps(
    args: argparse.Namespace,
    samples: Sequence[PicturePrompt],
    results: dict[str, list[tuple[np.ndarray, Area]]],
    method: str,
) -> None:
    """One column per sample: the picture, then a row per model in the given order; one colour scale per column.

    Args:
        results: per model the attention over each picture's tokens [rows, columns], and the area that they cover.
        method: `mean` or `rollout`.
    """
    import_pyplot()
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    shown = range(len(samples))
    size = (2.3 * len(shown) + 0.8, 2.2 * len(results) + 2.6)
    name = f"{args.command}-heatmaps" if method == "mean" else f"{args.command}-{method}"
    with figure(args, 1 + len(results), len(shown), figsize=size, squeeze=False, name=name) as (drawn, axes):
        for column in shown:
            picture = samples[column].image
            axes[0, column].imshow(picture.convert("RGB"))
            axes[0, column].set_title(_wrapped(samples[column].prompt), fontsize=9)
            top = max(maps[column][0].max() for maps in results.values())
            for row, (model, maps) in enumerate(results.items(), 1):
                axis = axes[row, column]
                shares, area = maps[column]
                axis.imshow(overlaid(picture, shares, top, area))
                axis.set_ylabel(model if column == 0 else "")
            for axis in axes[:, column]:
                axis.set(xticks=[], yticks=[])
                axis.grid(False)
        bar = drawn.colorbar(ScalarMappable(Normalize(0, 1), COLOUR_MAP), ax=axes[1:], shrink=0.8, ticks=[0, 1])
        bar.ax.set_yticklabels(["0", "most"])
        bar.set_label("share of the picture's attention")


def overlaid(picture: Image.Image, shares: np.ndarray, most: float, area: Area = WHOLE) -> Image.Image:
    """The picture in grey under its heatmap, in RGB and its own size; what the encoder does not see stays grey.

    Args:
        shares: each place's share of the attention [rows, columns].
        most: the share that gets the brightest colour.
        area: of the picture, which the heatmap covers; margins are cut off.
    """
    import_pyplot()
    from matplotlib import colormaps

    colours = colormaps[COLOUR_MAP](shares / most)[:, :, :3]
    grey = picture.convert("L").point(lambda value: (value + 200) * 255 / 500).convert("RGB")  # neither black nor white
    left, top, right, bottom = (round(part * side) for part, side in zip(area, picture.size * 2, strict=True))
    size = max(1, right - left), max(1, bottom - top)
    heat = grey.copy()
    heat.paste(Image.fromarray(np.uint8(255 * colours)).resize(size, Image.Resampling.NEAREST), (left, top))
    return Image.blend(grey, heat, OPACITY)


def _wrapped(text: str, width: int = 26, lines: int = 2) -> str:
    wrapped = textwrap.wrap(text, width)
    return "\n".join(wrapped[:lines]) + ("..." if len(wrapped) > lines else "")


def draw_profiles(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Share of attention per image row, visual share per layer, entropy per layer; bands are one std over samples.

    Args:
        results: per model what `attention.curves` returns.
    """
    look = looks(results)
    references = [np.array(curve["share per layer if uniform"]["mean"]) for curve in results.values()]
    alike = all(np.array_equal(reference, references[0], equal_nan=True) for reference in references)
    with figure(args, 1, 3, figsize=(12, 3.8), name=f"{args.command}-profiles") as (drawn, axes):
        for (name, curve), uniform in zip(results.items(), references, strict=True):
            colour = look[name]["color"]
            panels = ("share per row, mean", "share per layer", "entropy per layer")
            for axis, key in zip(axes, panels, strict=True):
                if key not in curve:
                    continue
                mean, std = np.array(curve[key]["mean"]), np.array(curve[key]["std"])
                there = ~np.isnan(mean)  # a layer without attention gets no point; the others keep their number
                at, mean, std = np.flatnonzero(there) + (1 if axis is axes[0] else 0), mean[there], std[there]
                axis.plot(at, mean, "o-", markersize=3, color=colour, label=name)
                axis.fill_between(at, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
            at = np.flatnonzero(~np.isnan(uniform))
            axes[1].plot(at, uniform[at], ":", color=NEUTRAL if alike else colour)
            if panels[0] in curve:
                rows = len(curve[panels[0]]["mean"])
                axes[0].xaxis.get_major_locator().set_params(integer=True)
                axes[0].axhline(1 / rows, color=NEUTRAL, linestyle=":")
        axes[0].set(xlabel="row of visual tokens, from the top", ylabel="share of the picture's attention")
        axes[0].set_title("Raster position (dotted: uniform)")
        axes[1].set(xlabel="layer", ylabel="share of the query's attention", ylim=(0, None))
        axes[1].set_title("Attention to visual tokens\n(dotted: if uniform under the mask)")
        axes[2].set(xlabel="layer", ylabel="entropy / ln V", title="Entropy over the picture (1: uniform)")
        drawn.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
