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

from llava.analysis import inputs, layer_statistics, loading
from llava.analysis.commands import Needs
from llava.analysis.embedding_norms import paper_of, read_embedding_norms
from llava.analysis.encoders import MODEL_TYPES, load_encoder
from llava.analysis.layer_statistics import SCALE, TEXT_GROUPS, WITH_SINKS, Measurement
from llava.analysis.models import NamedModel, required_models
from llava.analysis.output import TableRow, figure, with_paper, write_result
from llava.analysis.probe import VISUAL
from llava.analysis.resume import resumed
from llava.analysis.statistics import Stream
from llava.analysis.weights import WeightFiles
from llava.families import family_of
from llava.utils.presentation import SPECIAL_COLOUR, TEXT_COLOUR, VISUAL_COLOUR

NEEDS = Needs()

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
    """One model's streams of norms, by the kind of token, and the factor of its embeddings (`embedding_factor`)."""

    name: str
    path: str
    streams: dict[str, Stream]
    factor: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layer_statistics.add_arguments(parser)
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
    rows = [row for measured in interfaces for row in table_rows(measured)]
    write_result(args, rows)
    for measured in interfaces:
        if ENTERING in measured.streams:
            print(headline(measured))
    draw(args, interfaces)


def interface(model: NamedModel, args: argparse.Namespace) -> Interface:
    """All norms that the model has: of an encoder its tokens, of a plain LLM its embeddings."""
    fields = loading.config_fields(model.path, args.trust_remote_code)
    model_type = fields.get("model_type", "")
    if model_type in MODEL_TYPES:
        return Interface(model.name, model.path, {FEATURES: encoder_norms(model, args)})
    streams, factor = {}, None
    if loading.sees(fields, args):
        measured = layer_statistics.measure_layers(model, inputs.choose(args), args)
        streams[FEATURES] = measured.stream("vision features")
        streams[PROJECTED] = measured.stream("projector output")
        for what, groups in ((ENTERING, VISUAL), (TEXT_IN, TEXT_GROUPS)):
            streams[what] = measured.stream("norm", groups, 0, WITH_SINKS)
            without = measured.stream("norm", groups)
            streams |= {what + SINKLESS: without} if without.count < streams[what].count else {}
        factor = embedding_factor(measured.stream(SCALE, TEXT_GROUPS, 0, WITH_SINKS))
    files = NamedModel(model.name, loading.base_of(model.path, args) or model.path)
    norms = read_embedding_norms(files, args.embedding_name).norms
    streams[TABLE] = stream_of(norms[norms > 0])
    if factor not in (None, 1.0):
        streams[TABLE_IN] = stream_of(factor * norms[norms > 0])
    vocabulary = family_of(model_type).vocabulary
    if vocabulary:
        streams[VOCABULARY] = stream_of(vocabulary_norms(model.path, vocabulary))
    return Interface(model.name, model.path, {name: stream for name, stream in streams.items() if stream.count}, factor)


def embedding_factor(scales: Stream) -> float | None:
    """The factor between the embedding matrix and what enters the LLM; None where text tokens do not share one."""
    if not scales.count or scales.percentile(95) > (1 + CONSTANT) * scales.percentile(5):
        return None
    return scales.median if abs(scales.median - 1) > UNSCALED else 1.0


def ratio(measured: Interface, ending: str = "") -> float:
    """Median norm of visual tokens over that of text tokens, where they enter the LLM; NaN where no text does.

    Args:
        ending: `SINKLESS`, or nothing for all tokens.
    """
    visual, text = (
        measured.streams.get(what + ending, measured.streams.get(what, Stream())) for what in (ENTERING, TEXT_IN)
    )
    return visual.median / text.median


def headline(measured: Interface) -> str:
    """One sentence: how far apart visual and text tokens are where they enter the LLM."""
    if TEXT_IN not in measured.streams:
        return (
            f"{measured.name}: no text enters the LLM beside the pictures, so their norms have nothing to compare with"
        )
    visual = measured.streams.get(ENTERING + SINKLESS, measured.streams[ENTERING])
    table = ""
    if measured.factor is not None:
        times = visual.median / measured.streams.get(TABLE_IN, measured.streams[TABLE]).mean
        table = f"; {times:.3g} times the mean embedding as it enters"
    without, with_sinks = ratio(measured, SINKLESS), ratio(measured)
    return (
        f"{measured.name}: visual tokens enter the LLM with {without:.3g} times the norm of text tokens "
        f"(medians without sinks; with sinks {with_sinks:.3g}{table})"
    )


def encoder_norms(model: NamedModel, args: argparse.Namespace) -> Stream:
    """Norms of an encoder's tokens over the samples."""
    samples = inputs.choose(args)

    def start() -> Callable[[Measurement, Sequence[inputs.PicturePrompt]], None]:
        encode = load_encoder(model, args)
        return lambda state, some: state.add(FEATURES, VISUAL, 0, False, encode(some).float().norm(dim=-1))

    flags = ("vision_layer",)
    measured = resumed(Measurement(), "encoder", model, samples, start, args, flags=flags, size=args.batch_size)
    return measured.stream(FEATURES)


def vocabulary_norms(path: str, module: str) -> np.ndarray:
    """Norms of a visual vocabulary's rows, read from the files.

    Raises:
        ValueError: not exactly one tensor has its name.
    """
    files, ending = WeightFiles(path), module.rsplit(".", 1)[-1] + ".weight"
    names = [name for name in files.names if f".{name}".endswith("." + ending)]
    if len(names) != 1:
        raise ValueError(f"{path}: expected one tensor that ends in {ending}, found {', '.join(names) or 'none'}")
    return np.concatenate([chunk.float().norm(dim=-1).double().numpy() for chunk in files.rows(names[0])])


def stream_of(values: np.ndarray) -> Stream:
    stream = Stream()
    stream.add(values)
    return stream


def table_rows(measured: Interface) -> list[TableRow]:
    """A row per kind of token, with the paper's mean and standard deviation where it has them."""
    paper = paper_of(PAPER, NamedModel(measured.name, measured.path)) or {}
    rows = []
    for what, stream in measured.streams.items():
        mean, std = paper.get(what, (None, None))
        numbers = {name: value for name, value in (("mean", mean), ("std", std)) if value is not None}
        rows.append(with_paper({"model": measured.name, "norms of": what} | stream.summary(), numbers))
    return rows


def draw(args: argparse.Namespace, interfaces: list[Interface]) -> None:
    """A row per model, one above the other on a common logarithmic axis: how its tokens' norms are distributed."""
    shown = [(what, s) for measured in interfaces for what, s in measured.streams.items() if what in COLOURS]
    low = min(stream.percentile(1) for _, stream in shown) / 1.5
    high = max(stream.percentile(99) for _, stream in shown) * 1.5
    edges = np.geomspace(max(low, high / 1e6), high, 120)
    size = (7.5, 1.75 * len(interfaces) + 1.2)
    with figure(args, len(interfaces), 1, figsize=size, sharex=True, squeeze=False) as (drawn, axes):
        for axis, measured in zip(axes[:, 0], interfaces, strict=True):
            for what, colour in COLOURS.items():
                stream = measured.streams.get(what)
                if stream is None or (what == TABLE and TABLE_IN in measured.streams):
                    continue
                share = 100 * stream.histogram(edges) / stream.count
                outline = what == TEXT_IN
                axis.stairs(share, edges, color=colour, fill=not outline, alpha=1 if outline else 0.55, label=what)
                axis.axvline(stream.median, color=colour, linewidth=1.2, linestyle=":" if outline else "--")
            axis.set(xscale="log", yticks=[], ylabel="share of tokens", title=heading(measured))
            axis.spines["left"].set_visible(False)
        axes[-1, 0].set_xlabel("L2 norm (dashed: median)")
        handles = {label: h for axis in axes[:, 0] for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)


def heading(measured: Interface) -> str:
    """The model's name, with how far apart visual and text tokens are."""
    apart = ratio(measured, SINKLESS)
    return f"{measured.name}: visual / text = {apart:.3g}" if math.isfinite(apart) else measured.name
