"""Norms where vision meets language: encoder tokens, visual tokens after the projector, text, and embedding tables.

Paper tables 1 (encoders and LLMs on their own), 2 (before and after the projector) and 3 (Ovis' visual vocabulary).

The headline compares medians where both kinds of token enter the LLM. An LLM that scales its embeddings (Gemma by
sqrt(D), Granite, MiniCPM) sees other norms than those of its embedding matrix; the table then shows both.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llava.analysis import measure, models, samples
from llava.analysis.commands import NamedModel, required_models
from llava.analysis.embedding_norms import paper_of, read_embedding_norms
from llava.analysis.encoders import MODEL_TYPES, load_encoder
from llava.analysis.measure import SCALE, TEXT_GROUPS, WITH_SINKS, Values, median
from llava.analysis.output import TableRow, figure, with_paper, write_result
from llava.analysis.probe import VISUAL
from llava.analysis.weights import WeightFiles
from llava.families import family_of
from llava.utils.presentation import SPECIAL_COLOUR, TEXT_COLOUR, VISUAL_COLOUR

FEATURES, PROJECTED = "encoder tokens", "visual tokens after the projector"
ENTERING, TEXT_IN = "visual tokens entering the LLM", "text tokens entering the LLM"
TABLE, TABLE_IN, VOCABULARY = "text embedding matrix", "text embedding matrix as it enters the LLM", "visual vocabulary"
SINKLESS = ", without sinks"
COLOURS = {FEATURES: SPECIAL_COLOUR, ENTERING: VISUAL_COLOUR, VOCABULARY: VISUAL_COLOUR, TABLE: TEXT_COLOUR}
COLOURS |= {TABLE_IN: TEXT_COLOUR, TEXT_IN: TEXT_COLOUR}
UNSCALED, CONSTANT = 0.01, 0.02
"""Factors on the embeddings this close to 1 count as none, and tokens' factors this close together as one factor."""

# Tables 1 to 3; a key is a pattern that is searched in the last part of the model's path.
PAPER = {
    r"clip-vit-large-patch14": {FEATURES: (29.30, 17.12)},
    r"siglip-so400m-patch14-384": {FEATURES: (71.78, 13.95)},
    r"siglip2-so400m-patch14-384": {FEATURES: (59.37, 106.08)},
    r"moonvit-so-400m": {FEATURES: (72.17, 7.13)},
    r"qwen2\.5-7b": {TABLE: (0.80, None)},
    r"qwen3-8b": {TABLE: (1.38, None)},
    r"llama-?3\.2-3b": {TABLE: (1.09, None)},
    r"llava-(v?1\.5)": {FEATURES: (28.71, 16.87), PROJECTED: (39.96, 45.58), TABLE: (1.08, None)},
    r"qwen2\.5-vl": {FEATURES: (3484.24, 3882.82), PROJECTED: (56.88, 25.73), TABLE: (0.86, None)},
    r"kimi-?vl": {FEATURES: (137.93, 34.43), PROJECTED: (4.78, 2.21), TABLE: (0.85, None)},
    r"glm-4\.1v": {FEATURES: (47.44, 4.58), PROJECTED: (4.58, 2.03), TABLE: (0.80, None)},
    r"ovis2\.5": {VOCABULARY: (64.00, 0.71), TABLE: (1.38, 0.32)},
}


class Interface(NamedTuple):
    """One model's norms by the kind of token, and the factor of its embeddings (`embedding_factor`)."""

    name: str
    path: str
    norms: dict[str, np.ndarray]
    factor: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser, batches=True)
    parser.add_argument(
        "--vision-layer",
        type=int,
        default=-2,
        help="hidden state to take of an encoder on its own; LLaVA takes -2; of MoonViT its result is taken",
    )
    parser.add_argument("--embedding-name", help="the tensor of text embeddings (default: by the families' names)")


def run(args: argparse.Namespace) -> None:
    """Writes the table and the figure."""
    interfaces = [interface(model, args) for model in required_models(args.models)]
    write_result(args, [row for measured in interfaces for row in table_rows(measured)])
    for measured in interfaces:
        if ENTERING in measured.norms:
            print(headline(measured))
    draw(args, interfaces)


def interface(model: NamedModel, args: argparse.Namespace) -> Interface:
    """All norms that the model has: of an encoder its tokens, of a plain LLM its embeddings."""
    fields = models.config_fields(model.path, args.trust_remote_code)
    model_type = fields.get("model_type", "")
    if model_type in MODEL_TYPES:
        return Interface(model.name, model.path, {FEATURES: encoder_norms(model, args)})
    norms, factor = {}, None
    if models.sees(fields, args):
        measured = measure.measure_layers(model, samples.choose(args), args)
        norms[FEATURES], norms[PROJECTED] = measured.of(measure.FEATURES), measured.of(measure.PROJECTED)
        for what, groups in ((ENTERING, VISUAL), (TEXT_IN, TEXT_GROUPS)):
            norms[what] = measured.of("norm", groups, 0, WITH_SINKS)
            without = measured.of("norm", groups)
            norms |= {what + SINKLESS: without} if len(without) < len(norms[what]) else {}
        factor = embedding_factor(measured.of(SCALE, TEXT_GROUPS, 0, WITH_SINKS))
    files = NamedModel(model.name, models.base_of(model.path, args) or model.path)
    table = read_embedding_norms(files, args.embedding_name).norms
    norms[TABLE] = table[table > 0]
    if factor not in (None, 1.0):
        norms[TABLE_IN] = factor * norms[TABLE]
    if vocabulary := family_of(model_type).vocabulary:
        norms[VOCABULARY] = vocabulary_norms(model.path, vocabulary)
    return Interface(model.name, model.path, {name: values for name, values in norms.items() if len(values)}, factor)


def embedding_factor(scales: np.ndarray) -> float | None:
    """The factor between the embedding matrix and what enters the LLM; None where text tokens do not share one."""
    if not len(scales) or np.percentile(scales, 95) > (1 + CONSTANT) * np.percentile(scales, 5):
        return None
    return median(scales) if abs(median(scales) - 1) > UNSCALED else 1.0


def ratio(measured: Interface, ending: str = "") -> float:
    """Median norm of visual tokens over that of text tokens, where they enter the LLM; NaN where no text does.

    Args:
        ending: `SINKLESS`, or nothing for all tokens.
    """
    norms, nothing = measured.norms, np.empty(0)
    visual, text = (norms.get(what + ending, norms.get(what, nothing)) for what in (ENTERING, TEXT_IN))
    return median(visual) / median(text)


def headline(measured: Interface) -> str:
    """One sentence: how far apart visual and text tokens are where they enter the LLM."""
    norms = measured.norms
    if TEXT_IN not in norms:
        return f"{measured.name}: no text enters the LLM beside the pictures, so there is no norm to compare with"
    table = ""
    if measured.factor is not None:
        visual, embedding = norms.get(ENTERING + SINKLESS, norms[ENTERING]), norms.get(TABLE_IN, norms[TABLE])
        table = f"; {median(visual) / embedding.mean():.3g} times the mean embedding as it enters"
    return (
        f"{measured.name}: visual tokens enter the LLM with {ratio(measured, SINKLESS):.3g} times the norm of text "
        f"tokens (medians without sinks; with sinks {ratio(measured):.3g}{table})"
    )


def encoder_norms(model: NamedModel, args: argparse.Namespace) -> np.ndarray:
    """Norms of an encoder's tokens over the samples."""

    def start() -> Callable[[Sequence[samples.PicturePrompt]], Values]:
        encode = load_encoder(model, args)
        return lambda part: {FEATURES: encode(part).float().norm(dim=-1).cpu().numpy()}

    drawn, size = samples.choose(args), args.batch_size
    parts = measure.batches("encoder", model, drawn, args, start, flags=("vision_layer",), size=size)
    norms = {FEATURES: np.concatenate([values[FEATURES] for values in parts]).astype(np.float64)}
    measure.refuse_nonfinite(model.name, norms)
    return norms[FEATURES]


def vocabulary_norms(path: str, module: str) -> np.ndarray:
    """Norms of a visual vocabulary's rows, read from the files.

    Raises ValueError: not exactly one tensor has its name.
    """
    files, ending = WeightFiles(path), module.rsplit(".", 1)[-1] + ".weight"
    names = [name for name in files.names if f".{name}".endswith("." + ending)]
    if len(names) != 1:
        raise ValueError(f"{path}: expected one tensor that ends in {ending}, found {', '.join(names) or 'none'}")
    return np.concatenate([chunk.float().norm(dim=-1).double().numpy() for chunk in files.rows(names[0])])


def table_rows(measured: Interface) -> list[TableRow]:
    """A row per kind of token, with the paper's mean and standard deviation where it has them."""
    paper = paper_of(PAPER, NamedModel(measured.name, measured.path)) or {}
    rows = []
    for what, norms in measured.norms.items():
        mean, std = paper.get(what, (None, None))
        numbers = {name: value for name, value in (("mean", mean), ("std", std)) if value is not None}
        rows.append(with_paper({"model": measured.name, "norms of": what} | measure.summary(norms), numbers))
    return rows


def draw(args: argparse.Namespace, interfaces: list[Interface]) -> None:
    """A row per model, one above the other on a common logarithmic axis: how its tokens' norms are distributed."""
    shown = [norms for measured in interfaces for what, norms in measured.norms.items() if what in COLOURS]
    low = min(float(np.percentile(norms, 1)) for norms in shown) / 1.5
    high = max(float(np.percentile(norms, 99)) for norms in shown) * 1.5
    edges = np.geomspace(max(low, high / 1e6), high, 120)
    size = (7.5, 1.75 * len(interfaces) + 1.2)
    with figure(args, len(interfaces), 1, figsize=size, sharex=True, squeeze=False) as (drawn, axes):
        for axis, measured in zip(axes[:, 0], interfaces, strict=True):
            for what, colour in COLOURS.items():
                norms = measured.norms.get(what)
                if norms is None or (what == TABLE and TABLE_IN in measured.norms):
                    continue
                share = 100 * np.histogram(norms, edges)[0] / len(norms)
                outline = what == TEXT_IN
                axis.stairs(share, edges, color=colour, fill=not outline, alpha=1 if outline else 0.55, label=what)
                axis.axvline(median(norms), color=colour, linewidth=1.2, linestyle=":" if outline else "--")
            apart = ratio(measured, SINKLESS)
            title = f"{measured.name}: visual / text = {apart:.3g}" if math.isfinite(apart) else measured.name
            axis.set(xscale="log", yticks=[], ylabel="share of tokens", title=title)
            axis.spines["left"].set_visible(False)
        axes[-1, 0].set_xlabel("L2 norm (dashed: median)")
        handles = {label: h for axis in axes[:, 0] for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
