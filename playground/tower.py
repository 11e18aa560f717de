"""A small SigLIP vision tower, trained on one of the picture sets and saved in the Hugging Face format."""

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.options import PICTURES
from playground.records import STATEMENTS
from playground.store import PlaygroundError, build, read_manifest

if TYPE_CHECKING:
    from transformers import SiglipModel

FORMAT = 5  # raise it when the same settings give another tower
INITIAL_SCALE = 10.0  # as SigLIP's
# Position embeddings start as large as the patch embeddings. At their usual size such a short training leaves tokens
# that do not tell where they are, and a language model can hardly count what they show.
POSITION_SCALE = 8.0
# The meaning of a 0 in the settings. The marks on probes need more pixels, and more steps until they are read.
USUAL = {"image_size": 64, "patch_size": 32, "steps": 240}
OWN = {"probes": {"image_size": 96, "patch_size": 24, "steps": 600}}


@dataclass
class Settings:
    """What `python -m playground tower` trains; 0 stands for the value in `USUAL`, for probes in `OWN`.

    Attributes:
        data: prepared picture set to train on.
        image_size: side of the tower's input in pixels.
        patch_size: side of a patch, which is one visual token.
        layers: encoder layers; the visual tokens are read before the last one.
        steps: training steps; the same number gives the same tower on one machine.
        batch_size: pictures per step, each compared with every statement about any of them.
        learning_rate: the highest of AdamW, after warm-up and before cosine decay.
        seed: seed of weights and batches.
    """

    data: str = PICTURES[0]
    image_size: int = 0
    patch_size: int = 0
    layers: int = 5
    width: int = 192
    heads: int = 4
    steps: int = 0
    batch_size: int = 32
    learning_rate: float = 5e-4
    seed: int = 0

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
    # "seconds" is part of how towers are recorded: without it those that are there would be trained again.
    described = {**asdict(settings), "seconds": 0.0, "format": FORMAT, "data_settings": manifest["settings"]}
    return build(root / f"siglip-{settings.data}", "tower", described, partial(train_tower, settings, data), force)


def check(settings: Settings) -> None:
    """Raise `PlaygroundError` for a patch size that does not fit the pictures, or steps below zero."""
    if settings.steps < 0:
        raise PlaygroundError(f"--steps {settings.steps}: expected a positive number.")
    side, rest = divmod(settings.image_size, settings.patch_size)
    if rest or side % 2:
        expected = "an even number of patches per side, as quarters are described" if not rest else "a divisor"
        raise PlaygroundError(
            f"--patch-size {settings.patch_size}: expected {expected}, of {settings.image_size} pixels."
        )


def train_tower(settings: Settings, data: Path, folder: Path) -> dict[str, Any]:
    """Train on the captions of `data`, write vision tower and image processor to `folder`; return the facts."""
    import torch
    from transformers import SiglipImageProcessorPil

    from llava.mm_utils import follow_umask
    from playground.tower_training import fit, load_pictures

    torch.manual_seed(settings.seed)
    described = json.loads((data / STATEMENTS).read_text(encoding="utf-8"))["train"]
    side = settings.image_size
    processor = SiglipImageProcessorPil(size={"height": side, "width": side})  # Pillow, as everywhere in this tree
    train = load_pictures(described, data / "images", processor)
    model = siglip_model(settings, 1 + int(train.input_ids.max()), train.input_ids.shape[1])
    loss = fit(model, train, settings.steps, settings.batch_size, settings.learning_rate, settings.seed)
    print(f"tower: {settings.steps} steps, loss {loss:.3f}")
    model.vision_model.save_pretrained(folder)
    follow_umask(folder)
    processor.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.vision_model.parameters())
    return {
        "steps": settings.steps,
        "final_loss": round(loss, 4),
        "parameters": parameters,
        "visual_tokens": (side // settings.patch_size) ** 2,
    }


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
