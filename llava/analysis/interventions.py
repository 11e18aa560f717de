"""What the norm of visual tokens does to a trained model at inference, with a blank picture and no picture as scale.

Visual tokens are scaled by alpha, or each set to the text norm, where they enter the first layer; the text norm is the
median norm of the text tokens that enter beside them. Attention sinks (see `measure`) count in no norm.

Shapes: S sequence, V visual tokens, K key/value heads, L layers, C vocabulary.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from llava.analysis import measure
from llava.analysis.attention import watched
from llava.analysis.measure import TEXT_GROUPS, Values, median, sink_mask
from llava.analysis.output import TableRow, draw_rows, write_result
from llava.analysis.probe import VISUAL, Batch, Edit, Probe
from llava.analysis.samples import PicturePrompt

UNTOUCHED, TEXT_NORM, BLANK, TEXT_ONLY = "untouched", "text norm", "blank picture", "no picture"
GREY = (127, 127, 127)


class Run(NamedTuple):
    """One run of one sample.

    Attributes:
        log_probs: of the next token [C].
        share: the visual tokens' share of the last token's attention, mean over layers with attention, and heads.
        cache: keys and values of the visual tokens [K, V, channels], by layer.
        visual_norm, text_norm: medians of tokens where they enter the first layer; NaN where there are none.
    """

    log_probs: torch.Tensor
    share: float
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]]
    visual_norm: float
    text_norm: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser, default=16)
    parser.add_argument(
        "--alphas", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 0.6, 2, 5, 10], help="factors of the sweep"
    )


def run(args: argparse.Namespace) -> None:
    """Writes one row per model and intervention, the figure, and prints one sentence per model."""
    if min(args.alphas) <= 0:
        raise ValueError("--alphas: expected positive factors; no picture at all is always among the controls")
    args.alphas = sorted(args.alphas)
    models, drawn = measure.begin(args)
    rows, sentences = [], []
    for model in models:
        values_of = partial(outcomes_of, alphas=args.alphas)
        parts = measure.batches("interventions", model, drawn, args, values_of, flags=("alphas",))
        own = {str(name): table_row(model.name, str(name), parts) for name in parts[0]["name"]}
        rows += own.values()
        if TEXT_ONLY not in own:
            print(f"{model.name}: not run: {TEXT_ONLY}; its processor makes no inputs of text alone")
        sentences.append(headline(model.name, own))
    write_result(args, rows)
    print("\n".join(sentences))
    axes = {"xscale": "log", "xlabel": "alpha (factor on visual tokens)"}
    panels = ("KL (nats)", "cos of keys", "cos of values")
    sweep = sorted((row for row in rows if row["alpha"] is not None), key=lambda row: row["alpha"])
    draw_rows(args, sweep, "alpha", {panel: axes | {"title": panel} for panel in panels})


def outcomes_of(probe: Probe, part: Sequence[PicturePrompt], alphas: list[float]) -> Values:
    """Every intervention's outcome for one sample, the untouched run's first, by `name`; see `compare`.

    Raises ValueError: the sample has no text that enters beside its picture.
    """
    (sample,), layers = part, len(probe.parts.layers)
    runs = interventions(probe, sample, alphas)
    _, untouched = first = next(runs)
    if not math.isfinite(untouched.text_norm):
        raise ValueError(f"{probe.name}, {sample.name}: no text enters beside the picture, so there is no text norm")
    outcomes = [compare(name, untouched, other, layers) for name, other in (first, *runs)]
    return {name: np.array([outcome[name] for outcome in outcomes]) for name in outcomes[0]}


def interventions(probe: Probe, sample: PicturePrompt, alphas: list[float]) -> Iterator[tuple[str, Run]]:
    """The untouched run of a sample, and every run that is compared with it, by name."""
    batch = probe.prepare([sample])
    untouched = run_of(probe, batch)
    yield UNTOUCHED, untouched
    for alpha in alphas:
        yield f"alpha {alpha:g}", run_of(probe, batch, at_visual(lambda tokens, alpha=alpha: alpha * tokens))
    yield TEXT_NORM, run_of(probe, batch, at_visual(lambda x: untouched.text_norm * F.normalize(x, dim=-1)))
    blank = sample._replace(image=Image.new("RGB", sample.image.size, GREY))
    yield BLANK, run_of(probe, probe.prepare([blank]))
    try:
        text_only = probe.prepare([sample._replace(image=None)])
    except (ValueError, TypeError):  # its processor makes no inputs without a picture (GOT-OCR)
        return
    yield TEXT_ONLY, run_of(probe, text_only)


def at_visual(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The edit that puts `change` of the visual tokens [N, D] in their place."""

    def edit(states: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        states, visual = states.clone(), (groups == VISUAL).to(states.device)
        states[visual] = change(states[visual])
        return states

    return edit


def run_of(probe: Probe, batch: Batch, edit: Edit | None = None) -> Run:
    """Runs a batch of one sample."""
    shares: list[torch.Tensor] = []
    visual = probe.groups(batch)[0].cpu() == VISUAL
    see = lambda index, weights: shares.append(weights[:, -1].mean(dim=0).double().cpu())  # noqa: E731
    with watched(probe.parts.layers, see):
        seen = probe.run(batch, edit, use_cache=True, **whole_cache(probe))
    if not shares:
        raise ValueError(f"{probe.name}: no decoder layer gives its attention weights, so none can be measured")
    cache = {}
    for index, layer in enumerate(getattr(seen.outputs.past_key_values, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and keys.shape[2] == len(visual):
            cache[index] = keys[0][:, visual].float(), values[0][:, visual].float()
    norms, counted = seen.hidden_states[0][0].float().norm(dim=-1).cpu(), ~sink_mask(seen)[0]
    text = torch.isin(seen.groups[0].cpu(), torch.tensor(TEXT_GROUPS))
    medians = (median(norms[of & counted].double().numpy()) for of in (visual, text))
    share = torch.stack(shares).mean(dim=0)[visual].sum().item()
    return Run(seen.logits[0, -1].double().log_softmax(dim=-1), share, cache, *medians)


def whole_cache(probe: Probe) -> dict[str, DynamicCache]:
    """The option of a forward that keeps all keys and values of layers with a sliding window; empty without such."""
    cache = DynamicCache(config=probe.model.config.get_text_config(decoder=True))
    sliding = [type(layer) is DynamicSlidingWindowLayer for layer in cache.layers]
    cache.layers = [DynamicLayer() if slides else layer for slides, layer in zip(sliding, cache.layers, strict=True)]
    return {"past_key_values": cache} if any(sliding) else {}


def compare(name: str, untouched: Run, other: Run, layers: int) -> dict[str, Any]:
    """What `other` differs in from the untouched run of the same sample: NaN where there is nothing to compare.

    `kl` is the divergence of its next token's distribution, in nats.
    Cosines of visual keys and values with the untouched ones are means per layer [L].
    """
    expected, actual = untouched.log_probs, other.log_probs
    kl = (expected.exp() * (expected - actual)).sum().item()
    if not math.isfinite(kl):
        raise ValueError(f"{name}: the KL divergence is {kl}; logits that are NaN or infinite cannot be compared")
    cosines = np.full((2, layers), np.nan)
    for index in untouched.cache.keys() & other.cache.keys():
        pairs = list(zip(untouched.cache[index], other.cache[index], strict=True))
        if all(a.shape == b.shape for a, b in pairs):
            cosines[:, index] = [F.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairs]
    rank = 1 + int((actual > actual[expected.argmax()]).sum())  # of the token that the untouched run chose
    outcome = {
        "name": name,
        "kl": max(kl, 0.0),
        "rank": rank,
        "share": other.share,
        "keys": cosines[0],
        "values": cosines[1],
    }
    return outcome | {"visual norm": other.visual_norm, "text norm": other.text_norm}


def _known(parts: list[Values], name: str, what: str) -> np.ndarray:
    """An intervention's values over the samples, without those that are not known."""
    values = np.concatenate([np.ravel(part[what][part["name"] == name]) for part in parts])
    return values[~np.isnan(values)]


def table_row(model: str, name: str, parts: list[Values]) -> TableRow:
    """Means over the samples, of norms medians; KL also as median, since a few answers may dominate the mean."""
    kl, rank = _known(parts, name, "kl"), _known(parts, name, "rank")
    alpha = 1.0 if name == UNTOUCHED else float(name.split()[1]) if name.startswith("alpha") else None
    row = {"model": model, "intervention": name, "alpha": alpha, "KL (nats)": float(kl.mean()), "KL median": median(kl)}
    row |= {"KL std": float(kl.std()), "rank of chosen": float(rank.mean())}
    row["answer changes (%)"] = 100 * float((rank > 1).mean())
    columns = {"visual attention": "share", "cos of keys": "keys", "cos of values": "values"}
    for column, what in columns.items():
        values = _known(parts, name, what)
        row[column] = float(values.mean()) if len(values) else None
    return row | {norm: median(_known(parts, name, norm)) for norm in ("visual norm", "text norm")}


def headline(model: str, rows: dict[str, TableRow]) -> str:
    """In one sentence with numbers, what setting visual tokens to the text norm does to one model."""
    first, blank, scaled = rows[UNTOUCHED], rows[BLANK], rows[TEXT_NORM]
    share = scaled["KL (nats)"] / blank["KL (nats)"] if blank["KL (nats)"] else math.nan
    return (
        f"{model}: visual tokens enter with {first['visual norm'] / first['text norm']:.2f} times the text norm "
        f"(medians); setting them to it at inference changes the output by {scaled['KL (nats)']:.3f} nats, "
        f"{100 * share:.0f} % of the {blank['KL (nats)']:.3f} of a blank picture, and "
        f"{scaled['answer changes (%)']:.0f} % of the answers"
    )
