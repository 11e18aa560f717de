"""Models with random weights in the shapes of real ones, in memory or as folders; made on the GPU if there is one.

`models/*.json` hold the sizes from the published `config.json` files. `python -m benchmarks.shapes PRESET FOLDER`
writes FOLDER/language_model and FOLDER/tower, which the recipes take as MODEL_PATH and VISION_TOWER.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from benchmarks.common import ROOT
from llava.model.language_model.families import LLAVA_CLASSES
from llava.model.multimodal_projector.builder import build_vision_projector
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, VISION_TOWER
from llava.utils.commands import Parser, whole

MODELS = Path(__file__).with_name("models")
TOKENIZER = ROOT / "tests/golden/train/inputs/qwen_untied"  # 600 tokens, so that its ids fit every vocabulary
STAGES = {1: {ADAPTER}, 2: {VISION_TOWER, ADAPTER, LANGUAGE_MODEL}}


def sizes_of(name: str) -> dict[str, Any]:
    """The content of `models/<name>.json`."""
    return json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))


class Preset(NamedTuple):
    """Shapes of a language model and a tower, each the name of a file in `models`."""

    name: str
    tower_name: str

    @property
    def language_model(self) -> dict[str, Any]:
        """Fields of the language model's config."""
        return {name: value for name, value in sizes_of(self.name).items() if name != "model_type"}


PRESETS = {
    "tiny": Preset("tiny", "siglip-small"),
    "demo": Preset("demo", "siglip-small"),
    "llama-3.2-3b": Preset("llama-3.2-3b", "siglip-so400m"),
    "qwen2.5-7b": Preset("qwen2.5-7b", "siglip-so400m"),
    "nano": Preset("qwen3-0.6b", "siglip2-base-384"),
    "0.5b": Preset("qwen2.5-0.5b", "siglip-so400m"),
    "1.5b": Preset("qwen2.5-1.5b", "siglip-so400m"),
    "3b-qwen": Preset("qwen2.5-3b", "siglip-so400m"),
}


def build_llava(preset: Preset, device: torch.device, dtype: torch.dtype, **fields: Any) -> Any:
    """A LLaVA with random weights, made on `device` (meta: without weights); its projector has no norm.

    Args:
        fields: fields of the language model's config that replace the preset's.
    """
    names = {"llama": "llava_llama", "qwen2": "llava_qwen", "qwen3": "llava_qwen3"}
    classes = LLAVA_CLASSES[names[sizes_of(preset.name)["model_type"]]]
    config = classes.config(**preset.language_model | fields)
    config.mm_vision_config = SiglipVisionConfig(**sizes_of(preset.tower_name)).to_dict()
    config.mm_projector_type, config.mm_projector_norm = "mlp2x_gelu", "none"
    config.tokenizer_model_max_length = 2048
    return made(lambda: classes.causal_lm(config), device, dtype).train()


def write_language_model(
    name: str, folder: Path, device: torch.device, dtype: torch.dtype, layers: int | None = None
) -> Path:
    """Writes a folder like a published language model's, with random weights and a tokenizer of 600 tokens.

    Args:
        layers: how many decoder layers, if not all.
    """
    special = {"bos_token_id": 597, "eos_token_id": 599}  # the tokenizer's
    fewer = {"num_hidden_layers": layers} if layers else {}
    config = AutoConfig.for_model(**sizes_of(name) | special | fewer)
    made(lambda: AutoModelForCausalLM.from_config(config), device, dtype).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder)
    return folder


def write_tower(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """Writes a folder like a published SigLIP's, with random weights and its image processor."""
    sizes = sizes_of(name)
    made(lambda: SiglipVisionModel(SiglipVisionConfig(**sizes)), device, dtype).save_pretrained(folder)
    side = sizes["image_size"]
    SiglipImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return folder


def projector_for(model: Any, norm: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A projector that ends in `norm`; the projectors of all norms have the same weights."""
    config = SimpleNamespace(
        mm_projector_type="mlp2x_gelu",
        mm_hidden_size=model.config.mm_hidden_size,
        hidden_size=model.config.hidden_size,
        mm_projector_norm=norm,
        mm_projector_norm_target=3.2,
    )
    torch.manual_seed(1)
    return build_vision_projector(config).to(device=device, dtype=dtype).train()


def made(make: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model that `make` returns, made on `device` in `dtype` from a fixed seed."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(before)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=whole(1), help="decoder layers; default: all")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    where = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    write_language_model(PRESETS[args.preset].name, args.folder / "language_model", *where, args.layers)
    write_tower(PRESETS[args.preset].tower_name, args.folder / "tower", *where)


if __name__ == "__main__":
    main()
