"""A small SigLIP vision tower, trained on one of the picture sets and saved in the Hugging Face format."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.options import PICTURES, option
from playground.records import STATEMENTS
from playground.store import PlaygroundError, build, read_manifest

if TYPE_CHECKING:
    from transformers import SiglipImageProcessorPil, SiglipModel

FORMAT = 5  # raise it when the same settings give another tower
INITIAL_SCALE = 10.0  # as SigLIP's
# Position embeddings start as large as the patch embeddings. At their usual size such a short training leaves tokens
# that do not tell where they are, and a language model can hardly count what they show.
POSITION_SCALE = 8.0
# The meaning of a 0 in the settings. The marks on probes need more pixels, and more steps until they are read.
USUAL = {"image_size": 64, "patch_size": 32, "steps": 240}
OWN = {"probes": {"image_size": 96, "patch_size": 24, "steps": 600}}
QUARTERED = ("scenes", "probes")  # sets that say what each quarter of a picture shows


@dataclass
class Settings:
    """What `python -m playground tower` trains."""

    data: str = option(PICTURES[0], "prepared picture set to train on", PICTURES)
    image_size: int = option(0, "side of the tower's input in pixels; 0: 64, for probes 96")
    patch_size: int = option(0, "side of a patch, which is one visual token; 0: 32, for probes 24")
    layers: int = option(5, "encoder layers; the visual tokens are read before the last one")
    width: int = option(192, "hidden size")
    heads: int = option(4, "attention heads")
    steps: int = option(
        0, "training steps; the same number gives the same tower on one machine; 0: 240, for probes 600"
    )
    seconds: float = option(0.0, "train for this time instead; how good the tower gets then depends on the machine")
    batch_size: int = option(32, "pictures per step, each compared with every statement about any of them")
    learning_rate: float = option(5e-4, "highest learning rate of AdamW, after warm-up and before cosine decay")
    seed: int = option(0, "seed of weights and batches")

    def __post_init__(self):
        for name, value in (USUAL | OWN.get(self.data, {})).items():
            setattr(self, name, getattr(self, name) or value)


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
    side = settings.image_size // settings.patch_size
    if settings.data in QUARTERED and side % 2:
        raise PlaygroundError(
            f"--patch-size {settings.patch_size}: {side} patches per side make no quarters, by which "
            f"{settings.data} are described; give a size that makes this number even."
        )
    if settings.width % settings.heads:
        raise PlaygroundError(f"--width {settings.width}: expected a multiple of --heads {settings.heads}.")
    if settings.layers < 2:
        raise PlaygroundError(f"--layers {settings.layers}: the layer before the last is read, so give at least 2.")
    if settings.steps <= 0 and settings.seconds <= 0:
        raise PlaygroundError(f"--steps {settings.steps}: expected a positive number, or --seconds.")
    if settings.batch_size < 2:
        raise PlaygroundError(f"--batch-size {settings.batch_size}: the loss compares pictures, so give at least 2.")


def train_tower(settings: Settings, data: Path, folder: Path) -> dict[str, Any]:
    """Train on the captions of `data`, write vision tower and image processor to `folder`; return the facts."""
    import torch

    from llava.mm_utils import follow_umask
    from playground.tower_training import all_texts, build_vocabulary, fit, load_pictures, retrieval_accuracy, words_of

    torch.manual_seed(settings.seed)
    described = load_statements(data / STATEMENTS)
    texts = all_texts(described["train"])
    vocabulary = build_vocabulary(texts)
    # one padding token more than the longest text: the text tower reads its summary at the last position
    length = 1 + max(len(words_of(text)) for text in texts)
    processor = image_processor(settings.image_size)
    train, heldout = (
        load_pictures(described[split], data / "images", vocabulary, processor, length)
        for split in ("train", "heldout")
    )
    model = siglip_model(settings, len(vocabulary) + 2, length)
    steps, loss = fit(
        model,
        train,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        steps=settings.steps,
        seconds=settings.seconds,
        seed=settings.seed,
    )
    accuracy, chance = retrieval_accuracy(model, heldout)
    print(
        f"tower: {steps} steps, loss {loss:.3f}; finds the caption of a held-out picture among "
        f"{100 / chance:.0f} in {accuracy:.1f} % of the cases (chance {chance:.1f} %)"
    )
    model.vision_model.save_pretrained(folder)
    follow_umask(folder)
    processor.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.vision_model.parameters())
    return {
        "steps": steps,
        "final_loss": round(loss, 4),
        "retrieval_percent": round(accuracy, 1),
        "retrieval_chance_percent": round(chance, 1),
        "parameters": parameters,
        "visual_tokens": (settings.image_size // settings.patch_size) ** 2,
        "note": "weights need not be bit-equal across machines, nor across runs with --seconds",
    }


def load_statements(path: Path) -> dict[str, dict[str, dict[str, list]]]:
    """Return split -> image -> what is true of it; raises `PlaygroundError` where a split has no pictures."""
    if not path.exists():
        raise PlaygroundError(f"{path} is missing: the pictures are of an older version, prepare them again.")
    described = json.loads(path.read_text(encoding="utf-8"))
    for split in ("train", "heldout"):
        if not described[split]:
            raise PlaygroundError(f"{path}: no {split} pictures; prepare the set with training and held-out pictures.")
    return described


def image_processor(image_size: int) -> "SiglipImageProcessorPil":
    """Return SigLIP's image processor for square pictures of `image_size`, with Pillow as everywhere in this tree."""
    from transformers import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": image_size, "width": image_size})


def siglip_model(settings: Settings, vocab_size: int, length: int) -> "SiglipModel":
    """Return vision tower and one-layer text tower, untrained; the bias starts at the log-odds of a match."""
    import torch
    from transformers import SiglipConfig, SiglipModel

    from playground.tower_training import PAD

    shared = {
        "hidden_size": settings.width,
        "intermediate_size": 4 * settings.width,
        "num_attention_heads": settings.heads,
    }
    text = {
        **shared,
        "num_hidden_layers": 1,
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
        model.vision_model.embeddings.position_embedding.weight.mul_(POSITION_SCALE)
        model.logit_bias.fill_(-math.log(2 * settings.batch_size - 1))
    return model
