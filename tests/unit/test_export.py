"""An exported folder computes what the checkpoint does, by transformers alone, and comes back bit for bit."""

import json

import pytest
import torch
from decoder_families import NAMES, write_families
from tiny_models import make
from transformers import (
    AutoModelForImageTextToText,
    LlavaForConditionalGeneration,
)

from llava.constants import IMAGE_TOKEN_INDEX
from llava.export.hf import export
from llava.mm_utils import load_tokenizer
from llava.model.builder import load_language_model
from llava.model.multimodal_encoder.towers import TOWERS

VERSION = "chatml_direct"
TOWER_CONFIGS = {
    "siglip2_vision_model": {"num_patches": 4},
    "dinov2": {},
    "dinov2_with_registers": {"use_swiglu_ffn": True},
    "dinov3_vit": {"num_register_tokens": 3, "use_gated_mlp": True},
    "aimv2_vision_model": {},
}
TEXT = [5, 6, IMAGE_TOKEN_INDEX, 7, 8, IMAGE_TOKEN_INDEX, 9]
"""A prompt with two pictures."""


@pytest.fixture(scope="module")
def parts(tiny, tmp_path_factory):
    """`tiny` with every family's language model and every tower."""
    write_families(tiny)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
    for name, own in TOWER_CONFIGS.items():
        torch.manual_seed(0)
        tower = TOWERS[name]
        fields = sizes | {"image_size": 16, "intermediate_size": 32} | own
        if name == "siglip2_vision_model":
            fields.pop("image_size")
        tower.model_class(tower.config_class(**fields)).save_pretrained(tiny / name)
    return tiny


def save(parts, folder, language_model="llama", version=VERSION, aspect="pad", **options):
    """A checkpoint with noise on every parameter, so that no two are alike and the norm is not where it began."""
    model = make(parts, language_model, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.config.mm_conv_version, model.config.image_aspect_ratio = version, aspect
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(str(parts / language_model))
    tokenizer.save_pretrained(folder)
    model.get_vision_tower().default_image_processor().save_pretrained(folder)
    return load_language_model(str(folder)).eval()


def load_exported(folder):
    trust = json.loads((folder / "config.json").read_text())["model_type"] == "llava_norm"
    theirs, info = AutoModelForImageTextToText.from_pretrained(
        folder, trust_remote_code=trust, output_loading_info=True
    )
    assert not any(info.values())
    return theirs.eval()


def expanded(ids, theirs, visual_tokens):
    """The prompt as the processor writes it."""
    image = theirs.config.image_token_id
    return torch.tensor([[x for i in ids for x in ([image] * visual_tokens if i == IMAGE_TOKEN_INDEX else [i])]])


def pixels(n=2):
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def check_equal(ours, theirs):
    """Logits and greedy answers of both."""
    rows, images = ours.config.vocab_size, pixels()
    prompt = expanded(TEXT, theirs, ours.get_vision_tower().num_tokens)
    expected = ours(input_ids=torch.tensor([TEXT]), images=images).logits
    found = theirs(input_ids=prompt, pixel_values=images).logits
    torch.testing.assert_close(found[..., :rows], expected, rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = theirs.generate(input_ids=prompt, pixel_values=images, **options)[:, prompt.shape[1] :]
    assert answer.tolist() == ours.generate(torch.tensor([TEXT]), images=images, **options).tolist()


@pytest.mark.parametrize("norm", ["none", "gwc_layernorm"])
@pytest.mark.parametrize("tower", ["clip", "siglip"])
@pytest.mark.parametrize("family", NAMES)
def test_every_decoder_computes_the_same(parts, tmp_path, family, tower, norm):
    ours = save(parts, tmp_path / "ours", f"families/{family}", tower=tower, norm=norm)
    export(str(tmp_path / "ours"), tmp_path / "hf")
    theirs = load_exported(tmp_path / "hf")
    assert (type(theirs) is LlavaForConditionalGeneration) == (norm == "none" and family != "Granite")
    check_equal(ours, theirs)


@pytest.mark.parametrize("tower", TOWER_CONFIGS)
def test_every_tower_computes_the_same(parts, tmp_path, tower):
    ours = save(parts, tmp_path / "ours", tower=tower, norm="none")
    export(str(tmp_path / "ours"), tmp_path / "hf")
    check_equal(ours, load_exported(tmp_path / "hf"))


@pytest.mark.parametrize("projector", ["linear", "mlp3x_gelu"])
@pytest.mark.parametrize("norm", ["none", "rmsnorm"])
def test_every_projector_computes_the_same(parts, tmp_path, projector, norm):
    ours = save(parts, tmp_path / "ours", tower="clip", norm=norm, mm_projector_type=projector)
    export(str(tmp_path / "ours"), tmp_path / "hf")
    check_equal(ours, load_exported(tmp_path / "hf"))
