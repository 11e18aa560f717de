"""Sigmoid contrastive training of a picture tower and a text tower on pictures with true statements about them."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch.nn.functional import logsigmoid, normalize

from llava.utils.progress import progress

if TYPE_CHECKING:
    from transformers import SiglipImageProcessorPil, SiglipModel

# Shapes: N pictures, M different statements, Q of them about quarters, B pictures and T texts of a step, L words per
# text, H and W picture side, G x G patches, D width.
PAD, UNKNOWN = 0, 1
MAX_WORDS = 32
WARMUP, WEIGHT_DECAY, BETAS, MAX_GRAD_NORM = 0.05, 1e-4, (0.9, 0.95), 1.0
SCALE_AND_BIAS_SPEED = 10.0  # factor on their learning rate: a short run cannot wait for two scalars
Description = dict[str, list]  # a picture's entry in the file STATEMENTS


@dataclass
class DescribedPictures:
    """Pictures with the statements that are true of them and, where the set says so, of their quarters."""

    pixel_values: torch.Tensor  # float [N, 3, H, W]
    input_ids: torch.Tensor  # int64 [M, L]: the words of every different statement
    statements: list[list[int]]  # per picture the rows of `input_ids` that are true of it, the caption first
    is_true: torch.Tensor  # bool [N, M]
    quarter_texts: torch.Tensor  # int64 [Q]: rows of `input_ids`
    true_of_quarter: torch.Tensor | None  # bool [N, 4, Q]; None where the set says nothing about quarters


def words_of(text: str) -> list[str]:
    """Return the text's words in lower case, at most `MAX_WORDS`."""
    return re.findall(r"\w+", text.lower())[:MAX_WORDS]


def all_texts(described: dict[str, Description]) -> list[str]:
    """Return every different statement, sorted."""
    of_quarters = {text for description in described.values() for texts in description["quarters"] for text in texts}
    return sorted(of_quarters.union(*(description["picture"] for description in described.values())))


def build_vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """Return word -> id for all words of the texts, the frequent ones first; ids 0 and 1 are padding and unknown."""
    counts = Counter(word for text in texts for word in words_of(text))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: index for index, word in enumerate(words, start=UNKNOWN + 1)}


def load_pictures(
    described: dict[str, Description],
    images: Path,
    vocabulary: dict[str, int],
    processor: "SiglipImageProcessorPil",
    length: int,
) -> DescribedPictures:
    """Return the pictures as the processor gives them, with their statements cut or padded to `length` words."""
    pixels = []
    for image in progress(described, "tower: reading pictures", "pictures"):
        with Image.open(images / image) as picture:
            pixels.append(processor(picture, return_tensors="pt")["pixel_values"][0])
    texts = all_texts(described)
    row_of = {text: row for row, text in enumerate(texts)}
    input_ids = torch.full((len(texts), length), PAD)
    for row, text in zip(input_ids, texts, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in words_of(text)[: length - 1]]
        row[: len(ids)] = torch.tensor(ids)
    own = [[row_of[text] for text in description["picture"]] for description in described.values()]
    quarters = [
        [row_of[text] for text in texts] for description in described.values() for texts in description["quarters"]
    ]
    about_quarters = torch.tensor(sorted({row for rows in quarters for row in rows}), dtype=torch.int64)
    return DescribedPictures(
        pixel_values=torch.stack(pixels),
        input_ids=input_ids,
        statements=own,
        is_true=_is_member(own, len(texts)),
        quarter_texts=about_quarters,
        true_of_quarter=_is_member(quarters, len(texts))[:, about_quarters].unflatten(0, (-1, 4)) if quarters else None,
    )


def _is_member(lists: list[list[int]], count: int) -> torch.Tensor:
    """Return bool [len(lists), count]: whether a number below `count` is in the list."""
    member = torch.zeros(len(lists), count, dtype=torch.bool)
    for row, numbers in zip(member, lists, strict=True):
        row[numbers] = True
    return member


def sigmoid_loss(logits: torch.Tensor, is_true: torch.Tensor) -> torch.Tensor:
    """Return SigLIP's loss, -sum_ij log sigmoid(z_ij logits_ij), of logits [..., T] (Zhai et al. 2023, sec. 3.2).

    z_ij is 1 where text j is true of picture (or quarter) i and -1 elsewhere; `is_true` bool [..., T] says so, since
    one text can be true of several. The paper's mean over pictures is left to the caller.
    """
    signs = 2.0 * is_true - 1.0
    return -logsigmoid(signs * logits).sum()


def batches(count: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield index batches int64 [B] forever: every epoch in a new order, without its incomplete last batch."""
    generator = torch.Generator().manual_seed(seed)
    size = min(batch_size, count)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % size].split(size)


def learning_rate_factor(progress: float) -> float:
    """Return the share of the highest learning rate at `progress` (0 to 1): linear warm-up, then cosine to zero."""
    if progress < WARMUP:
        return progress / WARMUP + 1e-2
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def contrastive_loss(model: "SiglipModel", train: DescribedPictures, pictures: torch.Tensor) -> torch.Tensor:
    """Return the loss of the pictures [B] against all statements true of any of them, and of their quarters likewise.

    The whole picture teaches where things are; the quarters, pooled by the same head, teach each token what it shows
    with far fewer pictures than the whole would take.
    """
    texts = train.is_true[pictures].any(dim=0).nonzero().flatten()  # [T]
    rows = torch.cat([texts, train.quarter_texts])
    text_embeds = normalize(model.text_model(input_ids=train.input_ids[rows]).pooler_output, dim=-1)
    output = model.vision_model(pixel_values=train.pixel_values[pictures])

    def logits(pooled: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        return normalize(pooled, dim=-1) @ embeds.T * model.logit_scale.exp() + model.logit_bias

    loss = sigmoid_loss(logits(output.pooler_output, text_embeds[: len(texts)]), train.is_true[pictures][:, texts])
    if train.true_of_quarter is not None:
        pooled = model.vision_model.head(quarters(output.last_hidden_state).flatten(0, 1))
        of_quarters = train.true_of_quarter[pictures].flatten(0, 1)
        loss = loss + sigmoid_loss(logits(pooled, text_embeds[len(texts) :]), of_quarters)
    return loss / len(pictures)


def quarters(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B, G * G, D] of a picture's quarters in reading order, [B, 4, G * G / 4, D]."""
    batch, count, width = tokens.shape
    half = math.isqrt(count) // 2
    return tokens.view(batch, 2, half, 2, half, width).transpose(2, 3).reshape(batch, 4, half * half, width)


def optimizer_for(model: "SiglipModel", learning_rate: float) -> torch.optim.AdamW:
    """Return AdamW over the towers and, faster and undecayed, scale and bias; each group keeps its `top_lr`."""
    scalars = [model.logit_scale, model.logit_bias]
    towers = [*model.vision_model.parameters(), *model.text_model.parameters()]
    groups = [
        {"params": towers, "top_lr": learning_rate, "weight_decay": WEIGHT_DECAY},
        {"params": scalars, "top_lr": SCALE_AND_BIAS_SPEED * learning_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def train_step(
    model: "SiglipModel",
    optimizer: torch.optim.Optimizer,
    train: DescribedPictures,
    pictures: torch.Tensor,
    progress: float,
) -> float:
    """Do one step on the pictures [B], at `progress` of the run; return the loss."""
    for group in optimizer.param_groups:
        group["lr"] = group["top_lr"] * learning_rate_factor(progress)
    loss = contrastive_loss(model, train, pictures)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


def fit(
    model: "SiglipModel",
    train: DescribedPictures,
    *,
    batch_size: int,
    learning_rate: float,
    steps: int,
    seconds: float,
    seed: int,
) -> tuple[int, float]:
    """Train `model` in place for `seconds`, or for `steps` where `seconds` is 0; return steps done and last loss."""
    optimizer = optimizer_for(model, learning_rate)
    model.train()
    total = seconds or steps
    start, step, loss = time.monotonic(), 0, math.nan
    bar = progress(total, "tower: training", "s" if seconds else "steps")
    for pictures in batches(len(train.statements), batch_size, seed):
        done = time.monotonic() - start if seconds else step
        bar.update(min(done, total) - bar.n)
        if done >= total:
            break
        loss = train_step(model, optimizer, train, pictures, done / total)
        step += 1
        bar.note(f"step {step}, loss {loss:.2f}")
    bar.close()
    return step, loss


def retrieval_accuracy(model: "SiglipModel", heldout: DescribedPictures) -> tuple[float, float]:
    """Return how many per cent of the pictures rank their own caption first among all captions, and chance."""
    own = torch.tensor([rows[0] for rows in heldout.statements])  # [N]
    captions = own.unique()
    model.eval()
    with torch.no_grad():
        output = model(input_ids=heldout.input_ids[captions], pixel_values=heldout.pixel_values)
    ranked_first = captions[output.logits_per_image.argmax(dim=1)]  # [N]
    return 100 * (ranked_first == own).float().mean().item(), 100 / len(captions)
