"""Sigmoid contrastive training of a picture tower and a text tower on pictures with true statements about them."""

import math
import re
from collections import Counter
from collections.abc import Iterator
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
    """Pictures with the statements that are true of them and of their quarters."""

    pixel_values: torch.Tensor  # float [N, 3, H, W]
    input_ids: torch.Tensor  # int64 [M, L]: the words of every different statement
    is_true: torch.Tensor  # bool [N, M]
    quarter_texts: torch.Tensor  # int64 [Q]: rows of `input_ids`
    true_of_quarter: torch.Tensor  # bool [N, 4, Q]


def words_of(text: str) -> list[str]:
    """Return the text's words in lower case, at most `MAX_WORDS`."""
    return re.findall(r"\w+", text.lower())[:MAX_WORDS]


def all_texts(described: dict[str, Description]) -> list[str]:
    """Return every different statement, sorted."""
    of_quarters = {text for description in described.values() for texts in description["quarters"] for text in texts}
    return sorted(of_quarters.union(*(description["picture"] for description in described.values())))


def load_pictures(
    described: dict[str, Description], images: Path, processor: "SiglipImageProcessorPil"
) -> DescribedPictures:
    """Return the pictures as the processor gives them, with their statements as ids of words, the frequent ones first.

    Ids 0 and 1 are padding and unknown. A row has one padding token more than the longest text: the text tower reads
    its summary at the last position.
    """
    pixels = []
    for image in progress(described, "tower: reading pictures", "pictures"):
        with Image.open(images / image) as picture:
            pixels.append(processor(picture, return_tensors="pt")["pixel_values"][0])
    texts = all_texts(described)
    words, row_of = [words_of(text) for text in texts], {text: row for row, text in enumerate(texts)}
    counts = Counter(word for text in words for word in text)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = {word: index for index, word in enumerate(frequent, start=UNKNOWN + 1)}
    input_ids = torch.full((len(texts), 1 + max(map(len, words))), PAD)
    for row, text in zip(input_ids, words, strict=True):
        row[: len(text)] = torch.tensor([vocabulary[word] for word in text])
    own = [[row_of[text] for text in description["picture"]] for description in described.values()]
    quarters = [
        [row_of[text] for text in texts] for description in described.values() for texts in description["quarters"]
    ]
    about_quarters = torch.tensor(sorted({row for rows in quarters for row in rows}), dtype=torch.int64)
    return DescribedPictures(
        pixel_values=torch.stack(pixels),
        input_ids=input_ids,
        is_true=_is_member(own, len(texts)),
        quarter_texts=about_quarters,
        true_of_quarter=_is_member(quarters, len(texts))[:, about_quarters].unflatten(0, (-1, 4)),
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
    pooled = model.vision_model.head(quarters(output.last_hidden_state).flatten(0, 1))
    of_quarters = train.true_of_quarter[pictures].flatten(0, 1)
    return (loss + sigmoid_loss(logits(pooled, text_embeds[len(texts) :]), of_quarters)) / len(pictures)


def quarters(tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B, G * G, D] of a picture's quarters in reading order, [B, 4, G * G / 4, D]."""
    batch, count, width = tokens.shape
    half = math.isqrt(count) // 2
    return tokens.view(batch, 2, half, 2, half, width).transpose(2, 3).reshape(batch, 4, half * half, width)


def fit(
    model: "SiglipModel", train: DescribedPictures, steps: int, batch_size: int, learning_rate: float, seed: int
) -> float:
    """Train `model` in place by AdamW, scale and bias faster and undecayed; return the last loss."""
    towers = [*model.vision_model.parameters(), *model.text_model.parameters()]
    scalars = {"params": [model.logit_scale, model.logit_bias], "lr": SCALE_AND_BIAS_SPEED * learning_rate}
    groups = [{"params": towers, "weight_decay": WEIGHT_DECAY}, scalars | {"weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step / steps))
    model.train()
    order = batches(len(train.pixel_values), batch_size, seed)
    for _ in progress(range(steps), "tower: training", "steps"):
        loss = contrastive_loss(model, train, next(order))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
    return loss.item()
