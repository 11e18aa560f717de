"""Projectors that merge patches: what they compute, and everything that counts their visual tokens."""

import numpy as np
import pytest
import torch
from anyres_data import GRIDS, write_shapes
from batches import BACKENDS, trained_on
from rotary_product import no_rotary_product
from tiny_models import SIZES, VISION_SIZES, V, make
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import build, flags, greedy_tokens, load, training_arguments
from transformers import Idefics3Config, InternVLConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLMultiModalProjector

from llava.analysis.models import our_batch
from llava.anyres import Picture
from llava.constants import IMAGE_TOKEN_INDEX
from llava.export.hf import exportable_config
from llava.model.builder import load_pretrained_model
from llava.model.multimodal_projector.builder import MergePatches
from llava.train import train as train_module
from llava.train.arguments import ModelArguments
from llava.train.memory import estimate_memory
from llava.train.telemetry import batch_work, flop_costs, required_flops

MERGING, BEFORE = "pixel_shuffle_2x_mlp2x_gelu", "pre_layernorm_mlp2x_gelu"
SIDE = 4  # patches along a side of the tower `fine`
MODES = [
    {"image_aspect_ratio": "square"},
    {"image_aspect_ratio": "pad", "mm_patch_merge_type": "spatial_unpad"},
    {"image_aspect_ratio": "anyres", "image_grid_pinpoints": GRIDS},
    {"image_aspect_ratio": "anyres_max_2", "image_grid_pinpoints": GRIDS, "mm_patch_merge_type": "spatial_unpad"},
]
NAMES = ["square", "newline", "flat", "unpad"]


@pytest.fixture(scope="module")
def fine(tiny):
    """`tiny` with towers of 4 x 4 patches (`fine`) and of 3 x 3 (`odd`)."""
    for name, patch in (("fine", 4), ("odd", 5)):
        torch.manual_seed(0)
        SiglipVisionModel(SiglipVisionConfig(**VISION_SIZES | {"patch_size": patch})).save_pretrained(tiny / name)
        (tiny / name / "preprocessor_config.json").write_bytes((tiny / "siglip/preprocessor_config.json").read_bytes())
    return tiny


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes") / "data")


def built(fine, tmp_path, shapes, mode, projector, **more):
    return build(flags(fine, tmp_path / "run", 2, tower="fine", mm_projector_type=projector, **shapes, **mode, **more))


# --- what they compute ------------------------------------------------------------------------------------------------


def bare(fine, projector: str, tower: str = "fine") -> nn.Sequential:
    return make(fine, tower=tower, norm="none", mm_projector_type=projector).get_model().mm_projector


def test_pixel_shuffle_equals_internvls_projector_on_the_same_weights(fine):
    """InternVL's own begins with a LayerNorm, which is left out; its shuffle takes [N, rows, columns, E]."""
    ours = bare(fine, "pixel_shuffle_2x_mlp2x_gelu")
    vision, text = {"hidden_size": 24}, SIZES | {"model_type": "qwen2"}
    theirs = InternVLMultiModalProjector(InternVLConfig(vision_config=vision, text_config=text, downsample_ratio=0.5))
    theirs.layer_norm = nn.Identity()
    theirs.linear_1, theirs.linear_2 = ours[1], ours[3]  # the order of the channels is the same
    features = torch.randn(3, SIDE**2, 24)
    shuffled = InternVLModel.pixel_shuffle(None, features.view(3, SIDE, SIDE, 24), scale_factor=0.5)
    torch.testing.assert_close(ours(features), theirs(shuffled.flatten(1, 2)))


def test_pixel_shuffle_and_linear_equal_idefics3s_connector_on_the_same_weight():
    config = Idefics3Config(
        vision_config={"hidden_size": 24},
        text_config=SIZES | {"model_type": "llama", "pad_token_id": 0},
        scale_factor=2,
    )
    theirs = Idefics3Connector(config)
    features = torch.randn(3, SIDE**2, 24)
    torch.testing.assert_close(theirs.modality_projection.proj(MergePatches(2)(features)), theirs(features))


def test_the_norm_before_the_mlp_equals_internvls_projector_on_the_same_weights(fine):
    ours = bare(fine, "pre_layernorm_mlp2x_gelu")
    vision, text = {"hidden_size": 24}, SIZES | {"model_type": "qwen2"}
    theirs = InternVLMultiModalProjector(InternVLConfig(vision_config=vision, text_config=text, downsample_ratio=1.0))
    theirs.layer_norm, theirs.linear_1, theirs.linear_2 = ours[0], ours[1], ours[3]
    features = 50 * torch.randn(3, SIDE**2, 24) + 7
    torch.testing.assert_close(ours(features), theirs(features))
    assert isinstance(ours[0], nn.LayerNorm) and ours[0].eps == 1e-5


def test_a_merged_token_holds_its_own_square_of_patches():
    places = torch.arange(36.0).view(1, 36, 1)  # 6 x 6 patches, each with its number
    joined = MergePatches(2)(places)[0]
    assert joined[1].tolist() == [2, 3, 8, 9] and joined[3].tolist() == [12, 13, 18, 19]


@pytest.mark.parametrize(("projector", "width"), [(MERGING, 96), ("pixel_shuffle_2x_mlp1x_gelu", 96)])
def test_the_norm_stays_the_last_element(fine, projector, width):
    state = make(fine, tower="fine", mm_projector_type=projector).get_model().mm_projector.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name.endswith("weight")}
    deep = {"1.weight": (32, width), "3.weight": (32, 32), "4.weight": (32,)}
    assert shapes == ({"1.weight": (32, width), "2.weight": (32,)} if "mlp1x" in projector else deep)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", [MERGING])
def test_an_odd_grid_is_refused_with_flag_and_sizes(fine, projector):
    with pytest.raises(ValueError, match=rf"--mm_projector_type {projector} merges 2 x 2 .* has 3 x 3; choose"):
        make(fine, tower="odd", mm_projector_type=projector)


def test_a_class_token_cannot_be_merged(fine):
    with pytest.raises(ValueError, match=f"{MERGING} merges squares .* --mm_vision_select_feature patch"):
        make(fine, tower="clip", mm_projector_type=MERGING, mm_vision_select_feature="cls_patch")


def test_an_unknown_projector_is_refused_with_the_known_ones():
    for name in ("mlp0x_gelu", "pixel_shuffle_3x_mlp2x_gelu", "mlpNx_geluu", ""):
        with pytest.raises(ValueError, match="--mm_projector_type: expected one of linear, identity, mlpNx_gelu"):
            ModelArguments(model_name_or_path="", mm_projector_type=name)


# --- what counts their tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", [MERGING])
@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_lengths_layout_and_rows_agree_in_every_mode(fine, tmp_path, shapes, mode, projector):
    model, trainer = built(fine, tmp_path, shapes, mode, projector)
    data = trainer.train_dataset
    items = [data[index] for index in range(len(data))]
    layout = trainer.data_collator(items)["layout"]
    assert layout.lengths == np.abs(data.modality_lengths()).tolist()
    rules = model.crop_rules()
    assert rules.tokens_per_crop == 4 and rules.visual_tokens(Picture()) == 4 + rules.has_newline
    crops = torch.randn(sum(picture.crops for picture in layout.pictures), 3, 16, 16)
    with torch.no_grad():
        assert model.encode_images(crops).shape == (len(crops), 4, 32)
        assert model.splice(layout, crops).shape[1] == sum(layout.lengths)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=["square", "unpad"])
@pytest.mark.parametrize("projector", [MERGING])
def test_packed_padded_and_one_by_one_give_the_same_loss_and_gradients(fine, tmp_path, shapes, mode, projector):
    model, trainer = built(fine, tmp_path, shapes, mode, projector)
    data = trainer.train_dataset
    items = [data[index] for index in range(len(data))]
    expected_loss, expected = trained_on(model, trainer, [[item] for item in items], False, "eager")
    for padding_free, backend in [(False, "sdpa"), (True, BACKENDS[0])]:
        loss, gradients = trained_on(model, trainer, [items], padding_free, backend)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=1e-3)


@no_rotary_product
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=["square", "unpad"])
@pytest.mark.parametrize("projector", [MERGING, BEFORE])
def test_counted_operations_equal_pytorchs_counter(fine, tmp_path, shapes, mode, projector):
    model, trainer = built(fine, tmp_path, shapes, mode, projector, attn_implementation="eager")
    model.get_vision_tower().vision_model.set_attn_implementation("eager")
    batch = trainer.data_collator([trainer.train_dataset[0]])
    inputs = {k: v for k, v in batch.items() if k != "indices"}
    with FlopCounterMode(display=False) as counter:
        model.train()(**inputs).loss.backward()
    work = batch_work(batch)
    work = work.__class__(**vars(work) | {"pairs": work.tokens**2})
    assert counter.get_total_flops() == required_flops(flop_costs(model), work)


def test_the_memory_estimate_knows_that_more_pictures_fit_into_the_same_tokens(fine, tmp_path):
    estimates = {
        projector: estimate_memory(
            make(fine, tower="fine", mm_projector_type=projector).train(), training_arguments(tmp_path), 64
        )
        for projector in ("mlp2x_gelu", MERGING)
    }
    assert estimates[MERGING].tower_layer == 4 * estimates["mlp2x_gelu"].tower_layer
    more = estimates[MERGING].embeddings - estimates["mlp2x_gelu"].embeddings
    assert more == (16 - 4) * 16 * 24 * 4  # the features of 16 pictures, not 4; as many visual tokens


# --- through training, loading and the analyses -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(fine, shapes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    captions = {"data_path": shapes["data_path"].with_name("pretrain.json"), "image_folder": shapes["image_folder"]}
    shared = {"tower": "fine", "mm_projector_type": MERGING} | MODES[2]
    train_module.train(flags(fine, folder / "s1", 1, **captions, **shared))
    adapter = {"pretrain_mm_mlp_adapter": folder / "s1/mm_projector.bin"}
    train_module.train(flags(fine, folder / "s2", 2, **shapes, **shared, **adapter))
    return folder / "s2"


def test_both_stages_train_and_the_checkpoint_answers(checkpoint):
    model = load(checkpoint, None)
    assert model.crop_rules().tokens_per_crop == 4 and len(greedy_tokens(model)) == 12


@pytest.mark.parametrize("projector", [BEFORE])
def test_both_stages_train_other_projectors_and_the_checkpoint_answers(fine, shapes, tmp_path, projector):
    captions = {"data_path": shapes["data_path"].with_name("pretrain.json"), "image_folder": shapes["image_folder"]}
    shared = {"tower": "fine", "mm_projector_type": projector, "norm": "none"}
    train_module.train(flags(fine, tmp_path / "s1", 1, **captions, **shared))
    adapter = {"pretrain_mm_mlp_adapter": tmp_path / "s1/mm_projector.bin"}
    with pytest.raises(ValueError, match=f"mm_projector_type: adapter '{projector}' .* flags 'mlp2x_gelu'"):
        train_module.train(flags(fine, tmp_path / "s2", 2, **shapes, tower="fine", norm="none", **adapter))
    train_module.train(flags(fine, tmp_path / "s2", 2, **shapes, **shared, **adapter))
    assert len(greedy_tokens(load(tmp_path / "s2", None))) == 12
    with pytest.raises(ValueError, match=f"mm_projector_type={projector}, which the exported classes do not have"):
        exportable_config(str(tmp_path / "s2"))


def test_export_refuses_a_projector_that_the_library_lacks(checkpoint):
    with pytest.raises(
        ValueError, match=r"mm_projector_type=\w+_2x_mlp2x_gelu, which the exported classes do not have"
    ):
        exportable_config(str(checkpoint))


def test_the_analyses_count_merged_tokens(checkpoint):
    from PIL import Image

    _, model, processor, _ = load_pretrained_model(str(checkpoint), None, "anything", device="cpu")
    batch = our_batch(model, [torch.tensor([5, IMAGE_TOKEN_INDEX, 6])], [Image.new("RGB", (64, 17))], processor)
    assert model(**batch.inputs).logits.shape[:2] == batch.input_ids.shape
    rules, count = model.crop_rules(), int((batch.input_ids == IMAGE_TOKEN_INDEX).sum())
    assert count == rules.visual_tokens(rules.picture((64, 17))) and count % rules.tokens_per_crop == 0


def test_the_tiny_towers_four_patches_become_one_token(tiny):
    assert make(tiny, mm_projector_type=MERGING).crop_rules().tokens_per_crop == V // 4
