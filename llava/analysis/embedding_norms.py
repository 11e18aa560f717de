"""Norms of the text embeddings, read from the weight files alone: a base model and its descendants side by side.

Paper tables 6 (mean and standard deviation), 7 and 8 (tokens of the largest norm).
"""

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from llava.analysis.commands import NamedModel, required_models
from llava.analysis.output import TableRow, draw_rows, with_paper, write_result
from llava.analysis.weights import WeightFiles
from llava.mm_utils import load_tokenizer
from llava.utils.commands import whole

# Table 6 where it has the model, else Table 1; a key is a pattern that is searched in the last part of the path.
PAPER_NORMS = {
    r"qwen2-vl-7b": {"mean": 0.6820, "std": 0.1588},
    r"qwen2-7b": {"mean": 0.6908, "std": 0.1610},
    r"qwen2\.5-vl-7b": {"mean": 0.8965, "std": 0.1821},
    r"qwen2\.5-7b": {"mean": 0.8031, "std": 0.1801},
    r"qwen3-8b": {"mean": 1.38},
    r"llama-?3\.2-3b": {"mean": 1.09},
}
# Tables 7 and 8.
PAPER_TOKENS = {
    r"qwen2-vl-7b": {"<|vision_start|>": 2.46, "<|vision_end|>": 2.33},
    r"qwen2\.5-vl-7b": {"<|vision_start|>": 1.40, "<|vision_end|>": 2.15},
}


class EmbeddingNorms(NamedTuple):
    """L2 norms of all embedding rows [rows] (fp64, each computed in fp32), and what the rows stand for."""

    name: str
    tensor: str
    hidden_size: int
    norms: np.ndarray
    tokens: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--top", type=whole(1), default=10, help="tokens of largest norm to name, per model")
    parser.add_argument("--embedding-name", help="the tensor to read (default: by the families' names)")


def run(args: argparse.Namespace) -> None:
    """Writes the norms' table, the tokens' table (`embedding-norms-tokens`) and the figure."""
    models = [read_embedding_norms(model, args.embedding_name) for model in required_models(args.models)]
    papers = [[paper_of(table, model) for model in args.models] for table in (PAPER_NORMS, PAPER_TOKENS)]
    write_result(args, [with_paper(table_row(norms), paper) for norms, paper in zip(models, papers[0], strict=True)])
    write_result(args, token_rows(models, args.top, papers[1]), name="embedding-norms-tokens")
    edges, bins = np.linspace(0, 1.1 * max(float(np.percentile(model.norms, 99.9)) for model in models), 121), []
    for model in models:
        shares = 100 * np.histogram(np.clip(model.norms, 0, edges[-1]), edges)[0] / len(model.norms)
        pairs = zip(edges[:-1], shares, strict=True)
        bins += [{"model": model.name, "norm": edge, "share": share} for edge, share in pairs]
    axes = {"xlabel": "L2 norm of a token's embedding", "ylabel": "share of the vocabulary (%)"}
    draw_rows(args, bins, "norm", {"share": axes})


def read_embedding_norms(model: NamedModel, embedding_name: str | None = None) -> EmbeddingNorms:
    """Reads the embedding matrix of `model`.

    Raises FileNotFoundError, ValueError: see `WeightFiles`; a matrix of integers (quantised) or with NaN.
    """
    files = WeightFiles(model.path)
    name = files.embedding_name(embedding_name)
    norms = files.row_norms(name).numpy()
    return EmbeddingNorms(model.name, name, files.shape(name)[1], norms, token_names(model.path, len(norms)))


def token_names(path: str, rows: int) -> list[str]:
    """The text of every row, in quotes where its ends are blank; a row that no token uses says so."""
    try:
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError) as error:
        print(f"{path}: no tokenizer could be loaded, so tokens are shown by number ({str(error).splitlines()[0]})")
        return [f"#{index}" for index in range(rows)]
    return [_token_name(tokenizer, index) for index in range(rows)]


def _token_name(tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    if index >= len(tokenizer):
        return "(unused row)"
    text = str(tokenizer.decode([index]))
    if "\ufffd" in text or not text:  # a part of a character
        return str(tokenizer.convert_ids_to_tokens(index))
    return text if text == text.strip() and text.isprintable() else repr(text)


def table_row(model: EmbeddingNorms) -> TableRow:
    """Table 6's columns, and further ones that show what the mean is taken over."""
    norms, used = model.norms, model.norms[model.norms > 0]
    return {
        "model": model.name,
        "tensor": model.tensor,
        "rows": len(norms),
        "D": model.hidden_size,
        "mean": float(norms.mean()),
        "std": float(norms.std()),
        "median": float(np.median(norms)),
        "min": float(norms.min()),
        "max": float(norms.max()),
        "zero rows": len(norms) - len(used),
        "mean without zero rows": float(used.mean()) if len(used) else math.nan,
    }


def token_rows(models: list[EmbeddingNorms], top: int, papers: list[dict[str, float] | None]) -> list[TableRow]:
    """The `top` tokens of each model (Tables 7, 8), with the same token's norm in the other models."""
    rows = []
    for model, paper in zip(models, papers, strict=True):
        for rank, index in enumerate(np.argsort(-model.norms, kind="stable")[:top], 1):
            token = model.tokens[index]
            row = {"model": model.name, "rank": rank, "id": int(index), "token": token, "norm": model.norms[index]}
            row = with_paper(row, {"norm": paper[token]} if paper and token in paper else None)
            for other in models:
                if other is not model:
                    known = index < len(other.norms) and other.tokens[index] == token
                    row[f"norm in {other.name}"] = float(other.norms[index]) if known else None
            rows.append(row | {"norm": float(row["norm"])})
    return rows


def paper_of(table: Mapping[str, dict[str, Any]], model: NamedModel) -> dict[str, Any] | None:
    """The entry for the model in a table of the paper's numbers, by the last part of its path; None without one."""
    base = Path(model.path).name.lower()
    return next((entry for key, entry in table.items() if re.search(key, base)), None)
