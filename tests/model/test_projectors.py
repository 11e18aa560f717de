"""Projectors that merge patches: what they compute, and everything that counts their visual tokens."""

import pytest
import torch
from anyres_data import ANYRES, write_shapes
from counted_operations import assert_counted_operations_equal_pytorchs_counter, no_rotary_product
from tiny_models import SIZES, VISION_SIZES, make
from torch import nn
from training import build, flags
from transformers import InternVLConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector

MERGING, BEFORE = "pixel_shuffle_2x_mlp2x_gelu", "pre_layernorm_mlp2x_gelu"
SIDE = 4  # patches along a side of the tower `fine`


@pytest.fixture(scope="module")
def fine(tiny):
    """`tiny` with towers of 4 x 4 patches (`fine`) and of 3 x 3 (`odd`)."""
    for name, patch in (("fine", 4), ("odd", 5)):
        torch.manual_seed(0)
        SiglipVisionModel(SiglipVisionConfig(**VISION_SIZES | {"patch_size": patch})).save_pretrained(tiny / name)
        (tiny / name / "preprocessor_config.json").write_bytes((tiny / "siglip/preprocessor_config.json").read_bytes())
    return tiny


def built(fine, tmp_path, projector, **more):
    shapes = write_shapes(tmp_path / "data") | ANYRES
    return build(flags(fine, tmp_path / "run", 2, tower="fine", mm_projector_type=projector, **shapes, **more))


def bare(fine, projector: str, tower: str = "fine") -> nn.Sequential:
    return make(fine, tower=tower, norm="none", mm_projector_type=projector).get_model().mm_projector


@pytest.mark.numeric
@pytest.mark.parametrize(("projector", "ratio"), [(MERGING, 0.5), (BEFORE, 1.0)])
def test_pixel_shuffle_and_the_norm_before_the_mlp_equal_internvls_projector_on_the_same_weights(
    fine, projector, ratio
):
    """InternVL's own always begins with a LayerNorm, left out where ours has none; its shuffle takes squares."""
    ours = bare(fine, projector)
    vision, text = {"hidden_size": 24}, SIZES | {"model_type": "qwen2"}
    theirs = InternVLMultiModalProjector(InternVLConfig(vision_config=vision, text_config=text, downsample_ratio=ratio))
    theirs.layer_norm = ours[0] if projector == BEFORE else nn.Identity()
    theirs.linear_1, theirs.linear_2 = ours[1], ours[3]  # the order of the channels is the same
    features = 50 * torch.randn(3, SIDE**2, 24) + 7
    squares = InternVLModel.pixel_shuffle(None, features.view(3, SIDE, SIDE, 24), scale_factor=ratio)
    torch.testing.assert_close(ours(features), theirs(squares.flatten(1, 2)))
    assert projector == MERGING or (isinstance(ours[0], nn.LayerNorm) and ours[0].eps == 1e-5)


def test_an_odd_grid_or_a_class_token_cannot_be_merged(fine):
    with pytest.raises(ValueError, match=rf"--mm_projector_type {MERGING} merges 2 x 2 .* has 3 x 3; choose"):
        make(fine, tower="odd", mm_projector_type=MERGING)
    with pytest.raises(ValueError, match=f"{MERGING} merges squares .* --mm_vision_select_feature patch"):
        make(fine, tower="clip", mm_projector_type=MERGING, mm_vision_select_feature="cls_patch")


@no_rotary_product
@pytest.mark.parametrize("projector", [BEFORE, MERGING])
def test_counted_operations_equal_pytorchs_counter(fine, tmp_path, projector):
    model, trainer = built(fine, tmp_path, projector)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert_counted_operations_equal_pytorchs_counter(model.train(), batch)
