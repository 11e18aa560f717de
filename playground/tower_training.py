"""Sigmoid contrastive training of a picture tower and a text tower on pictures with true statements about them."""

import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch.nn.functional import logsigmoid
from tqdm import tqdm

if TYPE_CHECKING:
    from transformers import SiglipImageProcessorPil, SiglipModel

# Shapes: N pictures, M different statements, B pictures and 2B texts of a step, L words per text, H and W picture side.
PAD, UNKNOWN = 0, 1
MAX_WORDS = 32
WARMUP, WEIGHT_DECAY, BETAS, MAX_GRAD_NORM = 0.05, 1e-4, (0.9, 0.95), 1.0
SCALE_AND_BIAS_SPEED = 10.0  # their learning rate is so many times higher: a short run cannot wait for two scalars
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"


@dataclass
class DescribedPictures:
    """Pictures with the statements that are true of them."""

    pixel_values: torch.Tensor  # float [N, 3, H, W]
    input_ids: torch.Tensor  # int64 [M, L]: the words of every different statement
    is_true: torch.Tensor  # bool [N, M]
    statements: list[list[int]]  # per picture the rows of `input_ids` that are true of it, the caption first


def words_of(text: str) -> list[str]:
    """Return the text's words in lower case, at most `MAX_WORDS`."""
    return re.findall(r"\w+", text.lower())[:MAX_WORDS]


def build_vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """Return word -> id for all words of the texts, the frequent ones first; ids 0 and 1 are padding and unknown."""
    counts = Counter(word for text in texts for word in words_of(text))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: index for index, word in enumerate(words, start=UNKNOWN + 1)}


def load_pictures(
    described: dict[str, list[str]],
    images: Path,
    vocabulary: dict[str, int],
    processor: "SiglipImageProcessorPil",
    length: int,
) -> DescribedPictures:
    """Return the pictures as the processor gives them, with their statements cut or padded to `length` words."""
    pixels = []
    for image in tqdm(described, desc="tower: reading pictures", unit="picture"):
        with Image.open(images / image) as picture:
            pixels.append(processor(picture, return_tensors="pt")["pixel_values"][0])
    texts = sorted({text for texts in described.values() for text in texts})
    row_of = {text: row for row, text in enumerate(texts)}
    input_ids = torch.full((len(texts), length), PAD)
    for row, text in zip(input_ids, texts, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in words_of(text)[: length - 1]]
        row[: len(ids)] = torch.tensor(ids)
    statements = [[row_of[text] for text in texts] for texts in described.values()]
    is_true = torch.zeros(len(statements), len(texts), dtype=torch.bool)
    for row, own in zip(is_true, statements, strict=True):
        row[own] = True
    return DescribedPictures(torch.stack(pixels), input_ids, is_true, statements)


def sigmoid_loss(logits: torch.Tensor, is_true: torch.Tensor) -> torch.Tensor:
    """Return SigLIP's loss, -1/B sum_ij log sigmoid(z_ij logits_ij), of logits [B, 2B] (Zhai et al. 2023, sec. 3.2).

    z_ij is 1 where text j is true of picture i and -1 elsewhere; `is_true` bool [B, 2B] says so, since one text can be
    true of several pictures of a batch.
    """
    signs = 2.0 * is_true - 1.0
    return -logsigmoid(signs * logits).sum() / len(logits)


def batches(count: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Give index batches int64 [B] forever: every epoch a new order, its incomplete last batch left out."""
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


def step_texts(train: DescribedPictures, indices: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Return rows int64 [2B] of `train.input_ids`: the caption and one random true statement of every picture."""
    own = [train.statements[index] for index in indices.tolist()]
    return torch.tensor([rows[0] for rows in own] + [rng.choice(rows) for rows in own])


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
    batch: tuple[torch.Tensor, torch.Tensor],
    progress: float,
) -> float:
    """Do one step on `batch`, rows of pictures [B] and of texts [2B], at `progress` of the run; return the loss."""
    pictures, texts = batch
    for group in optimizer.param_groups:
        group["lr"] = group["top_lr"] * learning_rate_factor(progress)
    output = model(input_ids=train.input_ids[texts], pixel_values=train.pixel_values[pictures])
    loss = sigmoid_loss(output.logits_per_image, train.is_true[pictures][:, texts])
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
    optimizer, rng = optimizer_for(model, learning_rate), random.Random(seed)
    model.train()
    total = seconds or steps
    start, step, loss = time.monotonic(), 0, math.nan
    bar = tqdm(total=total, desc="tower: training", unit="s" if seconds else "steps", bar_format=BAR_FORMAT)
    for pictures in batches(len(train.statements), batch_size, seed):
        done = time.monotonic() - start if seconds else step
        bar.update(min(done, total) - bar.n)
        if done >= total:
            break
        loss = train_step(model, optimizer, train, (pictures, step_texts(train, pictures, rng)), done / total)
        step += 1
        bar.set_postfix_str(f"step {step}, loss {loss:.2f}", refresh=False)
    bar.close()
    return step, loss


def retrieval_accuracy(model: "SiglipModel", heldout: DescribedPictures) -> tuple[float, float]:
    """Return how many per cent of the pictures rank their own caption first among all captions, and chance."""
    own = torch.tensor([rows[0] for rows in heldout.statements])  # [N]
    captions = own.unique()
    model.eval()
    with torch.no_grad():
        output = model(input_ids=heldout.input_ids[captions], pixel_values=heldout.pixel_values)
    found = captions[output.logits_per_image.argmax(dim=1)]  # [N]
    return 100 * (found == own).float().mean().item(), 100 / len(captions)
