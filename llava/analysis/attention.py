"""Where a query looks in the picture, and how much of the attention visual tokens get (paper appendix G).

Heatmaps (one row per model, in the order given) are the mean over layers and heads. The profiles are, per layer, the
visual tokens' share, the share that uniform attention would give them under the layer's mask, the entropy, and the
share of the most seen visual token. Weights are those of transformers' eager attention, one layer at a time. Layers
keep their numbers: one without attention (convolution, linear attention, state space) has empty values.

Shapes: L layers, H heads, S sequence, Q query tokens, V visual tokens.
"""

import argparse
import contextlib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from llava.analysis import measure, samples
from llava.analysis.measure import Values
from llava.analysis.output import TableRow, draw_rows, figure, write_result
from llava.analysis.probe import TEXT_AFTER, VISUAL, Batch, Probe
from llava.utils.presentation import import_pyplot

SHOWN, LONGEST = 5, 512
"""Pictures in the figure, and pixels of the longer side of a picture under a map."""
COLOUR_MAP, OPACITY = "inferno", 0.65
COLUMNS = {
    "share": "visual share of attention",
    "uniform": "share if uniform",
    "entropy": "entropy / ln V",
    "top": "most seen token",
}
"""What a layer's values are called in the tables."""

_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "hyperclovax_vision_v2")
_PATCHES += ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "kimi_k25", "cosmos3_edge")
_PIXELS = ("llava", "llava_next", "llava_onevision", "vipllava", "paligemma", "gemma3", "got_ocr2", "deepseek_vl")
_PIXELS += ("ovis2", "internvl", "aya_vision", "cohere2_vision", "idefics3", "smolvlm", "llama4", "fast_vlm")
SHAPE_INPUTS = dict.fromkeys(_PATCHES, "image_grid_thw") | dict.fromkeys((*_PIXELS, "perception_lm"), "pixel_values")
SHAPE_INPUTS |= {"mistral3": "image_sizes", "lfm2_vl": "spatial_shapes", "minicpmv4_6": "target_sizes"}
SHAPE_INPUTS |= {"gemma4": "image_position_ids"}
"""The model input that says how large the picture is, by model_type, for the families whose visual tokens are places of
the picture, row by row. A family that is not here has no map."""

PIXELS = ("images", "pixel_values")
"""Inputs of pixels [..., channels, rows, columns]; `images` is our checkpoints'."""

add_arguments = measure.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes the table, the heatmaps, and the profiles' figure."""
    models, drawn = measure.begin(args)
    results = {model.name: measure.per_sample("attention", model, drawn, args, look_of) for model in models}
    layers = [
        {"model": name, "layer": layer} | cells(pictures, layer)
        for name, pictures in results.items()
        for layer in range(len(pictures[0]["share"]))
    ]
    table = []
    for name, pictures in results.items():
        mapped = sum(bool(picture["map"].size) for picture in pictures)
        table.append({"model": name, "samples": len(pictures), "with a map": mapped} | cells(pictures))
    write_result(args, table)
    write_result(args, layers, name=f"{args.command}-layers", show=False)
    for name in results:
        if without := [row["layer"] for row in layers if row["model"] == name and COLUMNS["share"] not in row]:
            print(f"{name}: no attention, so no values, in layers {', '.join(map(str, without))}")
    draw_maps(args, drawn, results)
    draw_rows(args, layers, "layer", {column: {} for column in COLUMNS.values()}, name=f"{args.command}-profiles")


def look_of(probe: Probe, sample: samples.PicturePrompt) -> Values:
    """What `attention_of` says of the text after one sample's picture, which alone can see it."""
    batch = probe.prepare(sample)
    asking = probe.groups(batch)[0].cpu() == TEXT_AFTER
    if not asking.any():
        raise ValueError(f"{probe.name}, {sample.name}: no text follows the picture, so nothing looks at it")
    return attention_of(probe, batch, asking, sample.image, f"{probe.name}, {sample.name}: no layer lets the question")


# --- one picture ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(layers: Sequence[nn.Module], see: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Within the block, attention is eager, and `see` gets each layer's index and the first sample's weights [H, S, S].

    A layer's weights are freed after that.
    """
    modules = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
    attentions = {module: index for module, index in modules.items() if hasattr(module, "layer_idx")}
    configs = {id(m.config): m.config for m in attentions if hasattr(m, "config")}.values()

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, torch.Tensor) or weights.ndim != 4:
            return None  # a layer without attention
        see(attentions[module], weights[0])
        return (output[0], None, *output[2:])

    before = [config._attn_implementation for config in configs]
    handles = [module.register_forward_hook(hook) for module in attentions]
    for config in configs:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def attention_of(probe: Probe, batch: Batch, asking: torch.Tensor, picture: Image.Image, called: str) -> Values:
    """What the attention in a batch of one sample says.

    A token that a mask hides has a weight of exactly 0.

    Args:
        asking: [S] bool, True at the tokens that look.
        called: how the error message begins where no layer lets these tokens look at the picture.

    Returns:
        per layer [L], NaN where a layer has no attention: `share` of the visual tokens; `entropy` over them, divided by
        ln of how many the query may look at, so that 1 is uniform; `top`, the most seen one's share of the picture's
        attention; `uniform`, the visual tokens' share of the tokens that the query may look at. `map` [rows, columns],
        the mean over layers and heads, summing to 1, empty where the tokens' places in the picture are not known;
        `picture` [rows, columns] that the map covers, in grey.

    Raises:
        ValueError: no layer lets the tokens look at the picture, or no layer gives its attention.
    """
    visual = probe.groups(batch)[0].cpu() == VISUAL
    values = {name: np.full(len(probe.parts.layers), np.nan) for name in COLUMNS}
    total, layers = torch.zeros(int(visual.sum()), dtype=torch.float64), set()

    def see(index: int, weights: torch.Tensor) -> None:
        if weights.dtype == torch.float16:  # its smallest weights would be 0, as masked ones are
            raise ValueError(f"{probe.name}: float16 loses small attention weights; add --dtype bfloat16 or float32")
        weights = weights.double().cpu()[:, asking]  # [H, Q, S]
        looked = weights[:, :, visual].mean(dim=1)
        if not looked.isfinite().all() or index in layers:
            fault = "several attentions" if index in layers else "weights that are NaN or infinite"
            raise ValueError(f"{probe.name}: attention of layer {index} has {fault}, so it cannot be measured")
        layers.add(index)
        total.add_(looked.mean(dim=0))
        allowed = (weights > 0).any(dim=0)  # [Q, S]
        values["uniform"][index] = (allowed[:, visual].sum(dim=-1) / allowed.sum(dim=-1)).mean().item()
        visible = allowed[:, visual].any(dim=0)
        values["share"][index], values["entropy"][index], values["top"][index] = shares(looked[:, visible])

    with watched(probe.parts.layers, see):
        probe.run(batch)
    if not layers:
        raise ValueError(f"{probe.name}: no decoder layer gives its attention weights, so none can be measured")
    if not total.any():
        raise ValueError(f"{called} look at the picture")
    grid = picture_grid(probe.model, batch.inputs, len(total))
    if grid is None:
        return values | {"map": np.empty((0, 0)), "picture": np.empty((0, 0), np.uint8)}
    heat = (total / total.sum()).view(grid).numpy()
    return values | {"map": heat, "picture": seen_picture(probe.model, batch.inputs, picture)}


def shares(looks: torch.Tensor) -> tuple[float, float, float]:
    """From looks [H, V], means over heads: share of the attention, entropy / ln V, and the largest share.

    The last two are NaN where there is nothing to look at.
    """
    if not looks.shape[1]:
        return 0.0, math.nan, math.nan
    share = looks.sum(dim=1)
    within = looks / share.clamp(min=1e-30)[:, None]
    entropy = -(within * within.clamp(min=1e-30).log()).sum(dim=1) / math.log(max(looks.shape[1], 2))
    return share.mean().item(), entropy.mean().item(), within.amax(dim=1).mean().item()


# --- places in the picture --------------------------------------------------------------------------------------------


def shape_input(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """The input that says how large the picture is; None where it is not known that tokens are places of the picture.

    Tokens of several crops of a picture, or of tiles, are not.
    """
    if hasattr(model, "crop_rules"):
        return None if model.crop_rules().is_anyres else "images"
    model_type = model.config.model_type
    # LLaVA around Pixtral pads the pictures of a batch, and says their own sizes.
    return "image_sizes" if model_type == "llava" and "image_sizes" in inputs else SHAPE_INPUTS.get(model_type)


def picture_grid(model: Any, inputs: Mapping[str, Any], count: int) -> tuple[int, int] | None:
    """Rows and columns of one picture's visual tokens, from the shape that the processor gave the picture.

    Args:
        inputs: of the model, for one sample.
        count: of its visual tokens.
    """
    if (name := shape_input(model, inputs)) is None:
        return None
    (rows, columns), *tiles = _shapes(name, inputs[name])
    sides = [] if tiles else range(math.isqrt(rows * columns // count), 0, -1)  # of a token, in patches or pixels
    grids = [(rows // side, columns // side) for side in sides]
    return next((grid for grid in grids if math.prod(grid) == count), None)


def seen_picture(model: Any, inputs: Mapping[str, Any], picture: Image.Image) -> np.ndarray:
    """The picture in grey [rows, columns], as the encoder sees it: a processor may pad, squeeze or crop it."""
    name, grey = shape_input(model, inputs), picture.convert("L")
    if name in PIXELS:
        pixels = inputs[name].float().cpu().flatten(0, -4)[0].mean(dim=0)
        low, high = pixels.aminmax()
        grey = Image.fromarray((255 * (pixels - low) / (high - low).clamp(min=1e-6)).round().byte().numpy())
    grey.thumbnail((LONGEST, LONGEST))
    return np.asarray(grey)


def _shapes(name: str, value: torch.Tensor) -> list[tuple[int, int]]:
    """Rows and columns of each picture, or of each tile or frame of one, that a model input tells."""
    if name in PIXELS:
        return [(value.shape[-2], value.shape[-1])] * math.prod(value.shape[:-3])
    if name == "image_position_ids":  # [pictures, patches, 2], x before y, -1 at padding
        return [(1 + int(places[:, 1].max()), 1 + int(places[:, 0].max())) for places in value]
    return [(rows, columns) for *frames, rows, columns in value.tolist() for _ in range(math.prod(frames))]


# --- tables and figures -----------------------------------------------------------------------------------------------


def cells(pictures: list[Values], layer: int | None = None) -> TableRow:
    """Mean, std and median over the samples of one layer's values, or of all layers'; none without attention."""
    row: TableRow = {}
    for what, column in COLUMNS.items():
        own = [picture[what] if layer is None else picture[what][layer] for picture in pictures]
        values = np.concatenate(list(map(np.ravel, own)))
        values = values[~np.isnan(values)]
        if len(values):
            row |= {column: float(values.mean()), f"{column}, std": float(values.std())}
            row[f"{column}, median"] = float(np.median(values))
    return row


def draw_maps(args: argparse.Namespace, drawn: samples.Samples, results: dict[str, list[Values]]) -> None:
    """Draws the first pictures that have a map of every model that gives any; the table counts them.

    One column per sample: the picture, then a row per model in the given order; one colour scale per column.
    """
    gridded = {name: pictures for name, pictures in results.items() if any(p["map"].size for p in pictures)}
    of_all = enumerate(zip(*gridded.values(), strict=True))
    shown = [index for index, pictures in of_all if all(picture["map"].size for picture in pictures)][:SHOWN]
    if not shown:
        print("no heat maps: no picture has one of every model")
        return
    size, name = (2.3 * len(shown) + 0.8, 2.2 * len(gridded) + 2.6), f"{args.command}-heatmaps"
    with figure(args, 1 + len(gridded), len(shown), figsize=size, squeeze=False, name=name) as (made, axes):
        for column, index in enumerate(shown):
            sample = drawn[index]
            axes[0, column].imshow(sample.image)
            axes[0, column].set_title("\n".join(textwrap.wrap(sample.prompt, 26, max_lines=2)), fontsize=9)
            most = max(pictures[index]["map"].max() for pictures in gridded.values())
            for axis, (model, pictures) in zip(axes[1:, column], gridded.items(), strict=True):
                axis.imshow(overlaid(pictures[index]["picture"], pictures[index]["map"], most))
                axis.set_ylabel(model if column == 0 else "")
        for axis in axes.flat:
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
        made.supxlabel("brightness: share of the picture's attention, from 0 to the most in the column", fontsize=9)


def overlaid(picture: np.ndarray, heat: np.ndarray, most: float) -> Image.Image:
    """A picture under its heatmap, in RGB and its own size.

    Args:
        picture: in grey [rows, columns] of 8 bits.
        heat: each place's share of the attention [rows, columns].
        most: the share that gets the brightest colour.
    """
    import_pyplot()  # says how to install it
    from matplotlib import colormaps

    colours = colormaps[COLOUR_MAP](heat / most)[:, :, :3]
    grey = Image.fromarray(picture).point(lambda value: (value + 200) * 255 / 500).convert("RGB")  # no black, no white
    above = Image.fromarray(np.uint8(255 * colours)).resize(grey.size, Image.Resampling.NEAREST)
    return Image.blend(grey, above, OPACITY)
