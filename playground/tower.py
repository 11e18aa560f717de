"""A small SigLIP vision tower, trained on one of the picture sets and saved in the Hugging Face format."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from tqdm import tqdm

from playground.options import option
from playground.store import PlaygroundError, build, read_manifest

if TYPE_CHECKING:
    import torch
    from transformers import SiglipImageProcessorPil, SiglipModel

# Shapes: B batch, N held-out pictures, L words per caption, H and W picture side.
FORMAT = 1  # raise it when the same settings give another tower
PAD, UNKNOWN = 0, 1
MAX_WORDS = 32
WARMUP, WEIGHT_DECAY, BETAS, MAX_GRAD_NORM = 0.05, 1e-4, (0.9, 0.95), 1.0
INITIAL_SCALE, INITIAL_BIAS = 10.0, -10.0  # of the sigmoid loss (SigLIP, section 3.2)


BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"


@dataclass
class Settings:
    """What `python -m playground tower` trains."""

    data: str = option("scenes", "prepared picture set to train on", ("scenes", "stamps"))
    image_size: int = option(64, "side of the tower's input in pixels")
    patch_size: int = option(16, "side of a patch; one patch is one visual token")
    layers: int = option(5, "encoder layers; the visual tokens are read before the last one")
    width: int = option(192, "hidden size")
    heads: int = option(4, "attention heads")
    seconds: float = option(90.0, "training time; ignored with --steps")
    steps: int = option(0, "train exactly so many steps instead, the same on every run; 0: train by time")
    batch_size: int = option(128, "pictures per step")
    learning_rate: float = option(1e-3, "highest learning rate of AdamW, after warm-up and before cosine decay")
    seed: int = option(0, "seed of weights and batches")


@dataclass
class CaptionedPictures:
    """Pictures float [N, 3, H, W], captions as words int64 [N, L] and as strings."""

    pixel_values: "torch.Tensor"
    input_ids: "torch.Tensor"
    captions: list[str]


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the tower's folder `<root>/siglip-<data>`, trained unless it is complete.

    The pictures in `<root>/<data>` must be there; the tower is trained again when they were made with other settings.
    """
    check(settings)
    data = root / settings.data
    manifest = read_manifest(data)
    if manifest is None:
        raise PlaygroundError(f"{data}: no prepared pictures there. Run `python -m playground {settings.data}` first.")

    def write(folder: Path) -> dict[str, Any]:
        return train_tower(settings, data, folder)

    described = {**asdict(settings), "format": FORMAT, "data_settings": manifest["settings"]}
    return build(root / f"siglip-{settings.data}", "tower", described, write, force)


def check(settings: Settings) -> None:
    """Raise `PlaygroundError` for settings that do not fit together."""
    if settings.image_size % settings.patch_size:
        raise PlaygroundError(
            f"--image-size {settings.image_size}: expected a multiple of --patch-size {settings.patch_size}."
        )
    if settings.width % settings.heads:
        raise PlaygroundError(f"--width {settings.width}: expected a multiple of --heads {settings.heads}.")
    if settings.layers < 2:
        raise PlaygroundError(f"--layers {settings.layers}: the layer before the last is read, so give at least 2.")
    if settings.steps <= 0 and settings.seconds <= 0:
        raise PlaygroundError(f"--seconds {settings.seconds}: expected a positive time, or --steps.")


def train_tower(settings: Settings, data: Path, folder: Path) -> dict[str, Any]:
    """Train on the captions of `data`, write vision tower and image processor to `folder`; return the facts."""
    import torch

    torch.manual_seed(settings.seed)
    captioned = load_captions(data / "pretrain.json")
    vocabulary = build_vocabulary([caption for _, caption in captioned])
    processor = image_processor(settings.image_size)
    # one padding token more than the longest caption: the text tower reads its summary at the last position
    length = 1 + max(len(words_of(caption)) for _, caption in captioned)
    train = load_pictures(captioned, data, vocabulary, processor, length)
    heldout = load_pictures(load_captions(data / "heldout.json"), data, vocabulary, processor, length)
    model = siglip_model(settings, len(vocabulary) + 2, length)
    steps, loss = fit(model, train, settings)
    accuracy, chance = retrieval_accuracy(model, heldout)
    print(
        f"tower: {steps} steps, loss {loss:.3f}; finds the caption of a held-out picture among "
        f"{len(set(heldout.captions))} in {accuracy:.1f} % of the cases (chance {chance:.1f} %)"
    )
    model.vision_model.save_pretrained(folder)
    processor.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.vision_model.parameters())
    return {
        "steps": steps,
        "final_loss": round(loss, 4),
        "retrieval_percent": round(accuracy, 1),
        "retrieval_chance_percent": round(chance, 1),
        "parameters": parameters,
        "visual_tokens": (settings.image_size // settings.patch_size) ** 2,
        "note": "weights are not bit-equal across machines, with --seconds not across runs either",
    }


def load_captions(path: Path) -> list[tuple[str, str]]:
    """Return (image, caption) of every picture in a record file, each picture once."""
    pairs = {}
    for record in json.loads(path.read_text(encoding="utf-8")):
        pairs[record["image"]] = record.get("caption") or record["conversations"][1]["value"]
    if not pairs:
        raise PlaygroundError(f"{path}: no pictures in it; prepare the set with some training and held-out pictures.")
    return list(pairs.items())


def words_of(caption: str) -> list[str]:
    """Return the caption's words in lower case, at most `MAX_WORDS`."""
    return re.findall(r"\w+", caption.lower())[:MAX_WORDS]


def build_vocabulary(captions: Sequence[str]) -> dict[str, int]:
    """Return word -> id for all words of the captions, the frequent ones first; ids 0 and 1 are padding and unknown."""
    counts = Counter(word for caption in captions for word in words_of(caption))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: index for index, word in enumerate(words, start=UNKNOWN + 1)}


def image_processor(image_size: int) -> "SiglipImageProcessorPil":
    """Return SigLIP's image processor for square pictures of `image_size`, with Pillow as everywhere in this tree."""
    from transformers import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": image_size, "width": image_size})


def load_pictures(
    captioned: list[tuple[str, str]],
    data: Path,
    vocabulary: dict[str, int],
    processor: "SiglipImageProcessorPil",
    length: int,
) -> CaptionedPictures:
    """Return the pictures as the processor gives them, with their captions cut or padded to `length` words."""
    import torch

    pixels = []
    for image, _ in tqdm(captioned, desc="tower: reading pictures", unit="picture"):
        with Image.open(data / "images" / image) as picture:
            pixels.append(processor(picture, return_tensors="pt")["pixel_values"][0])
    input_ids = torch.full((len(captioned), length), PAD)
    for row, (_, caption) in zip(input_ids, captioned, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in words_of(caption)[: length - 1]]
        row[: len(ids)] = torch.tensor(ids)
    return CaptionedPictures(torch.stack(pixels), input_ids, [caption for _, caption in captioned])


def siglip_model(settings: Settings, vocab_size: int, length: int) -> "SiglipModel":
    """Return the untrained pair of vision tower and two-layer text tower, with SigLIP's initial scale and bias."""
    import torch
    from transformers import SiglipConfig, SiglipModel

    shared = {
        "hidden_size": settings.width,
        "intermediate_size": 4 * settings.width,
        "num_attention_heads": settings.heads,
    }
    text = {
        **shared,
        "num_hidden_layers": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": length,
        "projection_size": settings.width,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        **shared,
        "num_hidden_layers": settings.layers,
        "image_size": settings.image_size,
        "patch_size": settings.patch_size,
    }
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    with torch.no_grad():
        model.logit_scale.fill_(math.log(INITIAL_SCALE))
        model.logit_bias.fill_(INITIAL_BIAS)
    return model


def sigmoid_loss(logits: "torch.Tensor", same_caption: "torch.Tensor") -> "torch.Tensor":
    """Return SigLIP's loss, -1/B sum_ij log sigmoid(z_ij logits_ij), for logits [B, B] (Zhai et al. 2023, eq. in 3.2).

    z_ij is 1 where picture and caption belong together and -1 elsewhere. `same_caption` bool [B, B] says so: short
    captions repeat within a batch, and a repeated caption fits too.
    """
    from torch.nn.functional import logsigmoid

    signs = 2.0 * same_caption - 1.0
    return -logsigmoid(signs * logits).sum() / len(logits)


def batches(count: int, batch_size: int, seed: int) -> Iterator["torch.Tensor"]:
    """Give index batches int64 [B] forever: every epoch a new order, its incomplete last batch left out."""
    import torch

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


def fit(model: "SiglipModel", train: CaptionedPictures, settings: Settings) -> tuple[int, float]:
    """Train `model` in place; return the number of steps and the last loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
    caption_ids = torch.unique(train.input_ids, dim=0, return_inverse=True)[1]  # [N]
    model.train()
    by_steps = settings.steps > 0
    start, total = time.monotonic(), settings.steps if by_steps else settings.seconds
    step, loss_value = 0, math.nan
    bar = tqdm(total=total, desc="tower: training", unit="step" if by_steps else "s", bar_format=BAR_FORMAT)
    for indices in batches(len(train.captions), settings.batch_size, settings.seed):
        done = step if by_steps else time.monotonic() - start
        bar.update(min(done, total) - bar.n)
        if done >= total:
            break
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_factor(done / total)
        logits = model(input_ids=train.input_ids[indices], pixel_values=train.pixel_values[indices]).logits_per_image
        ids = caption_ids[indices]
        loss = sigmoid_loss(logits, ids[:, None] == ids[None, :])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        step, loss_value = step + 1, loss.item()
        bar.set_postfix(steps=step, loss=f"{loss_value:.3f}")
    bar.close()
    return step, loss_value


def retrieval_accuracy(model: "SiglipModel", heldout: CaptionedPictures) -> tuple[float, float]:
    """Return how many per cent of the pictures rank their own caption first among the different ones, and chance."""
    import torch

    captions = sorted(set(heldout.captions))
    first = [heldout.captions.index(caption) for caption in captions]
    own = torch.tensor([captions.index(caption) for caption in heldout.captions])  # [N]
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=heldout.input_ids[first], pixel_values=heldout.pixel_values).logits_per_image
    hits = (logits.argmax(dim=1) == own).float().mean().item()
    return 100 * hits, 100 / len(captions)
