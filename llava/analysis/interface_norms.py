"""Norms where vision meets language: encoder tokens, visual tokens after the projector, text, and embedding tables.

Paper tables 1 (encoders and LLMs on their own), 2 (before and after the projector) and 3 (Ovis' visual vocabulary). To
compare, take the tokens that enter the LLM: it may scale its embeddings (Gemma by sqrt(D)).
"""

import argparse
from collections.abc import Callable
from functools import cache

import numpy as np

from llava.analysis import measure, models, samples
from llava.analysis.commands import NamedModel, required_models
from llava.analysis.embedding_norms import paper_of, read_embedding_norms
from llava.analysis.measure import TEXT_GROUPS
from llava.analysis.output import TableRow, draw_rows, with_paper, write_result
from llava.analysis.probe import VISUAL
from llava.analysis.weights import WeightFiles
from llava.families import family_of

FEATURES, PROJECTED = "encoder tokens", "visual tokens after the projector"
ENTERING, TEXT_IN = "visual tokens entering the LLM", "text tokens entering the LLM"
TABLE, VOCABULARY = "text embedding matrix", "visual vocabulary"
SINKLESS = ", without sinks"

Norms = dict[str, np.ndarray]
"""One model's norms by the kind of token."""

# Tables 1 to 3; a key is a pattern that is searched in the last part of the model's path.
PAPER = {
    r"clip-vit-large-patch14$": {FEATURES: (29.30, 17.12)},
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser)
    layer = "hidden state to take of an encoder on its own; LLaVA takes -2; of MoonViT its result is taken"
    parser.add_argument("--vision-layer", type=int, default=-2, help=layer)
    parser.add_argument("--embedding-name", help="the tensor of text embeddings (default: by the families' names)")


def run(args: argparse.Namespace) -> None:
    """Writes the table and the figure."""
    drawn = cache(lambda: samples.choose(args))  # language models alone need no samples
    measured = {model: norms_of(model, args, drawn) for model in required_models(args.models)}
    rows = [row for model, norms in measured.items() for row in table_rows(model, norms)]
    write_result(args, rows)
    draw_rows(args, rows, "norms of", {"p50": {"ylabel": "median L2 norm", "yscale": "log"}}, figsize=(6.5, 6.5))


def norms_of(model: NamedModel, args: argparse.Namespace, drawn: Callable[[], samples.Samples]) -> Norms:
    """All norms that the model has: of an encoder its tokens, of a plain LLM its embeddings."""
    fields = models.config_fields(model.path, args.trust_remote_code)
    model_type = fields.get("model_type", "")
    if models.is_encoder(model_type):
        return {FEATURES: encoder_norms(model, drawn(), args)}
    norms = {}
    if models.sees(fields, args):
        measured = measure.measure_layers(model, drawn(), args)
        norms[FEATURES], norms[PROJECTED] = measured.of(measure.FEATURES), measured.of(measure.PROJECTED)
        for what, groups in ((ENTERING, VISUAL), (TEXT_IN, TEXT_GROUPS)):
            norms[what] = measured.of("norm", groups, 0, with_sinks=True)
            without = measured.of("norm", groups)
            norms |= {what + SINKLESS: without} if len(without) < len(norms[what]) else {}
    files = NamedModel(model.name, models.base_of(model.path, args) or model.path)
    table = read_embedding_norms(files, args.embedding_name).norms
    norms[TABLE] = table[table > 0]
    if vocabulary := family_of(model_type).vocabulary:
        norms[VOCABULARY] = vocabulary_norms(model.path, vocabulary)
    return {name: values for name, values in norms.items() if len(values)}


def encoder_norms(model: NamedModel, drawn: samples.Samples, args: argparse.Namespace) -> np.ndarray:
    """Norms of an encoder's tokens over the samples."""

    def measured(encode: Callable, sample: samples.PicturePrompt) -> measure.Values:
        values = {FEATURES: encode(sample).float().norm(dim=-1).cpu().numpy()}
        measure.refuse_nonfinite(model.name, values)
        return values

    what = f"encoder{args.vision_layer}"
    parts = measure.per_sample(what, model, drawn, args, measured, load=models.load_encoder)
    return np.concatenate([part[FEATURES] for part in parts]).astype(np.float64)


def vocabulary_norms(path: str, module: str) -> np.ndarray:
    """Norms of a visual vocabulary's rows, read from the files.

    Raises ValueError: not exactly one tensor has its name.
    """
    files, ending = WeightFiles(path), module.rsplit(".", 1)[-1] + ".weight"
    names = [name for name in files.names if f".{name}".endswith("." + ending)]
    if len(names) != 1:
        raise ValueError(f"{path}: expected one tensor that ends in {ending}, found {', '.join(names) or 'none'}")
    return files.row_norms(names[0]).numpy()


def table_rows(model: NamedModel, norms: Norms) -> list[TableRow]:
    """A row per kind of token, with the paper's mean and standard deviation where it has them."""
    paper, rows = paper_of(PAPER, model) or {}, []
    for what, values in norms.items():
        printed = zip(("mean", "std"), paper.get(what, ()), strict=False)
        numbers = {name: value for name, value in printed if value is not None}
        rows.append(with_paper({"model": model.name, "norms of": what} | measure.summary(values), numbers))
    return rows
