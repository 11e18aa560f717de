"""Every family of vision towers: equal to the library's encoder, described rightly, saved, loaded and trained."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_towers import CONFIGS, LAYERS, PATCH, SIDE, E
from torch import nn
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from llava.mm_utils import process_images
from llava.model.multimodal_encoder.builder import build_vision_tower, load_image_processor
from llava.model.multimodal_encoder.towers import TOWERS

# (tokens before the patches, width of the MLP)
FACTS = {
    "siglip_vision_model": (0, 48),
    "siglip2_vision_model": (0, 48),
    "clip_vision_model": (1, 48),
    "dinov2": (1, 4 * E),
}


class Flags:
    """What `build_vision_tower` reads of a model's config."""

    def __init__(self, vision_tower, layer: int = -2, feature: str = "patch"):
        self.mm_vision_tower, self.mm_vision_config = str(vision_tower), None
        self.mm_vision_select_layer, self.mm_vision_select_feature = layer, feature


@pytest.fixture(scope="module", params=TOWERS)
def saved(request, tmp_path_factory):
    """(model type, folder, encoder): a random encoder in the library's own format."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    tower_class = TOWERS[request.param]
    encoder = tower_class.model_class(tower_class.config_class(**CONFIGS[request.param])).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    encoder.save_pretrained(folder)
    return request.param, folder, encoder


def load(folder, layer: int = -2, feature: str = "patch"):
    flags = Flags(folder, layer, feature)
    with torch.device("meta"):
        tower = build_vision_tower(flags)
    tower.load_pretrained(str(folder))
    return tower.eval()


def patches_of(images):
    """The pixels [N, 3, side, side] as NaFlex's processor cuts them [N, patches, pixels]."""
    rows = images.reshape(len(images), 3, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    return rows.permute(0, 2, 4, 3, 5, 1).reshape(len(images), -1, 3 * PATCH**2)


def library_states(model_type, encoder, images):
    """The library's own hidden states; NaFlex takes patches that its processor cuts."""
    inputs = {"pixel_values": images}
    if model_type == "siglip2_vision_model":
        inputs["pixel_values"] = patches_of(images)
        inputs["spatial_shapes"] = torch.full((len(images), 2), SIDE // PATCH)
        inputs["pixel_attention_mask"] = torch.ones(len(images), (SIDE // PATCH) ** 2)
    with torch.no_grad():
        return encoder(**inputs, output_hidden_states=True).hidden_states


@pytest.mark.slow
@pytest.mark.parametrize("layer", [-2, -1, 2])
def test_tokens_are_the_librarys_hidden_state_at_the_layer(saved, layer):
    model_type, folder, encoder = saved
    images = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    state = library_states(model_type, encoder, images)[layer]
    prefix = FACTS[model_type][0]
    with torch.no_grad():
        for feature in TOWERS[model_type].select_features:
            tokens = load(folder, layer, feature)(images)
            wanted = state[:, prefix:] if feature == "patch" else torch.cat([state[:, :1], state[:, prefix:]], dim=1)
            torch.testing.assert_close(tokens, wanted, rtol=1e-5, atol=1e-5)


def test_a_tower_describes_its_sizes_and_layers(saved):
    model_type, folder, _ = saved
    tower, (prefix, width) = load(folder), FACTS[model_type]
    patches = (SIDE // PATCH) ** 2
    assert (tower.image_size, tower.num_tokens) == (SIDE, patches)
    assert (tower.num_prefix_tokens, tower.num_inner_tokens) == (prefix, patches + prefix)
    assert tower.mlp_width == width
    layer = tower.layers[0]
    products = [m for m in (layer.mlp if hasattr(layer, "mlp") else layer.ffn).modules() if isinstance(m, nn.Linear)]
    assert tower.gated_mlp == (len(products) == 3 or products[0].out_features == 2 * width)  # two products in one
    assert tower.patch_embedding().weight.numel() == E * 3 * PATCH**2
    assert len(tower.layers) == LAYERS - 1
    with pytest.raises(ValueError, match=f"expected pictures of {SIDE} x {SIDE} pixels"):
        tower(torch.randn(2, 3, 2 * SIDE, 2 * SIDE))


def test_exactly_the_parameters_listed_as_used_get_a_gradient(saved):
    _, folder, _ = saved
    tower = load(folder).train()
    unused = {id(p) for p in tower.unused_parameters()}
    tower(torch.randn(2, 3, SIDE, SIDE)).square().sum().backward()
    without = [name for name, p in tower.named_parameters() if (p.grad is None) != (id(p) in unused)]
    assert without == []


def test_naflex_square_gets_the_pixels_of_its_own_processor(tmp_path):
    tower_class = TOWERS["siglip2_vision_model"]
    tower = tower_class(tower_class.config_class(**CONFIGS["siglip2_vision_model"]))
    own = Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=(SIDE // PATCH) ** 2)
    own.save_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    theirs = own(picture, return_tensors="pt")
    assert theirs["spatial_shapes"].tolist() == [[SIDE // PATCH, SIDE // PATCH]]
    pixels = process_images([picture], load_image_processor(str(tmp_path), tower), Flags("."))
    torch.testing.assert_close(patches_of(pixels), theirs["pixel_values"])
