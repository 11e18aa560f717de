"""The probe on every family against the same model run part by part, and what it says of models it does not know."""

import argparse
from types import SimpleNamespace

import pytest
import torch
import vision_language_models as models
from PIL import Image
from torch import nn
from vision_language_models import our_checkpoint

from llava.analysis import models as loading
from llava.analysis.commands import NamedModel
from llava.analysis.probe import PADDING, SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL, Probe
from llava.families import Family, Features, family_of, find_parts


def arguments(*flags) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    loading.add_arguments(parser)
    return parser.parse_args(["--device", "cpu", *map(str, flags)])


def same_rows(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two matrices have the same rows, in any order."""
    nearest = torch.cdist(rows.double(), expected.double()).argmin(dim=1)
    return (
        rows.shape == expected.shape
        and sorted(nearest.tolist()) == list(range(len(rows)))
        and torch.allclose(rows, expected[nearest], atol=1e-6)
    )


@pytest.mark.parametrize("family", models.CASES, ids=lambda case: case.__name__)
@torch.no_grad()
def test_what_the_probe_sees_equals_the_model_run_part_by_part(family):
    case = family()
    model, ids = case.model, case.inputs["input_ids"]
    probe = Probe("x", model, find_parts(model, family_of(model.config.model_type)), special_ids=[5])
    seen = probe.run(models.batch_of(**case.inputs))

    assert same_rows(seen.vision_features, case.features)
    assert torch.allclose(seen.projector_output, case.projected, atol=1e-6)
    assert torch.allclose(seen.hidden_states[0][seen.visual], case.inserted, atol=1e-6)
    assert torch.equal(seen.visual, ids == models.IMAGE)
    mask = seen.groups != PADDING
    text = mask & ~seen.visual
    weight = model.state_dict()[next(n for n in model.state_dict() if n.endswith("embed_tokens.weight"))]
    assert torch.equal(probe.embedding_weight, weight)
    assert torch.allclose(seen.hidden_states[0][text], weight[ids[text]] * case.scale, atol=1e-5)

    plain = model(**case.inputs, output_hidden_states=True, use_cache=False)
    assert torch.allclose(seen.logits, plain.logits, atol=1e-5)
    assert len(seen.hidden_states) == len(plain.hidden_states) == 4
    for layer, (states, expected) in enumerate(zip(seen.hidden_states[:-1], plain.hidden_states, strict=False)):
        if layer == 0 or model.config.model_type != "qwen3_vl":
            assert torch.allclose(states[mask], expected[mask], atol=1e-5)
    decoder = next(m for m in model.modules() if any(c is model.get_input_embeddings() for c in m.children()))
    last = decoder.norm(seen.hidden_states[-1])
    assert torch.allclose(last[mask], plain.hidden_states[-1][mask], atol=1e-5)


def test_every_position_has_its_group():
    probe = SimpleNamespace(parts=SimpleNamespace(image_token_id=9), special_ids=torch.tensor([1, 2]))
    ids = torch.tensor([[1, 5, 2, 9, 9, 2, 6, 7], [1, 9, 5, 9, 6, 0, 0, 0]])
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    groups = Probe.groups(probe, SimpleNamespace(input_ids=ids, mask=mask))
    after, before = TEXT_AFTER, TEXT_BEFORE
    assert groups.tolist() == [
        [SPECIAL, before, SPECIAL, VISUAL, VISUAL, SPECIAL, after, after],
        [SPECIAL, VISUAL, after, VISUAL, after, PADDING, PADDING, PADDING],
    ]


@pytest.mark.parametrize("language_model", ["llama", "qwen"])
@torch.no_grad()
def test_our_checkpoints_run_as_their_parts_do(tiny, tmp_path, language_model):
    path = our_checkpoint(tiny, tmp_path / "m", "gwc_layernorm", language_model)
    probe = loading.load(NamedModel("ours", path), arguments())
    batch = probe.prepare(SimpleNamespace(image=Image.new("RGB", (16, 16), "red"), prompt="Which one is it?"))
    seen = probe.run(batch)
    assert seen.visual.sum() == 4
    text = ~seen.visual
    assert torch.equal(seen.hidden_states[0][text], probe.embedding_weight[batch.input_ids[text]])
    features = probe.model.get_vision_tower()(batch.inputs["images"])
    visual = probe.model.get_model().mm_projector(features).flatten(0, 1)
    assert torch.equal(seen.vision_features, features.flatten(0, 1))
    assert torch.equal(seen.projector_output, visual)
    assert torch.equal(seen.hidden_states[0][seen.visual], visual)


def test_a_stage_1_folder_with_its_base_runs_as_the_whole_checkpoint(tiny, tmp_path):
    path = our_checkpoint(tiny, tmp_path / "m", "gwc_layernorm")
    whole = loading.load(NamedModel("whole", path), arguments())
    adapter = {f"model.mm_projector.{k}": v for k, v in whole.model.model.mm_projector.state_dict().items()}
    torch.save(adapter, tmp_path / "m/mm_projector.bin")
    (tmp_path / "m/model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds a projector alone; name its language model by --model-base"):
        loading.load(NamedModel("one", path), arguments())
    based = arguments("--model-base", tiny / "llama")
    stage_1 = loading.load(NamedModel("one", path), based)
    assert loading.base_of(our_checkpoint(tiny, tmp_path / "whole"), based) is None  # beside a stage-1 folder
    batch = whole.prepare(SimpleNamespace(image=Image.new("RGB", (16, 16)), prompt="What?"))
    assert torch.allclose(whole.run(batch).logits, stage_1.run(batch).logits, atol=1e-5)


def test_a_part_that_is_not_found_says_what_to_name():
    model = models.llava().model
    model.config = SimpleNamespace(model_type="odd")
    with pytest.raises(ValueError, match=r"--layers-path nowhere: Llava.* has no such module. Modules: model"):
        find_parts(model, family_of("llava", layers="nowhere"))
    with pytest.raises(ValueError, match="visual positions are unknown; .* by --image-token-id"):
        find_parts(model, family_of("llava"))
    model.second = nn.ModuleDict({"multi_modal_projector": nn.Linear(2, 32)})
    with pytest.raises(ValueError, match="found model.multi_modal_projector, second.* Name it by --projector-path"):
        find_parts(model, Family())
    parts = find_parts(model, Family("model.vision_tower.encoder.layers", "second"), image_token_id=7)
    assert len(parts.layers) == 3 and parts.image_token_id == 7 and parts.projector is model.second


def test_a_wrong_image_token_and_a_wrong_list_of_layers_are_noticed():
    case = models.llava()
    for family, token, message in (
        (Family(), 310, "no position of the input holds the image token 310"),
        (Family(layers="model.vision_tower.encoder.layers"), None, "is --layers-path the list of decoder layers"),
    ):
        probe = Probe("x", case.model, find_parts(case.model, family, token))
        with pytest.raises(ValueError, match=message):
            probe.run(models.batch_of(**case.inputs))


@torch.no_grad()
def test_visual_positions_must_hold_what_the_projector_gave():
    def run(case, **named):
        parts = find_parts(case.model, family_of(case.model.config.model_type, **named.pop("family", {})), **named)
        probe = Probe("x", case.model, parts)
        return probe.run(models.batch_of(**case.inputs))

    case = models.llava()
    common = int(case.inputs["input_ids"][0, 0])  # a word that stands in the first prompt
    own = r"the \d+ positions of token {} hold that token's own text embedding, .*cross-attention: .* --image-token-id"
    with pytest.raises(ValueError, match=own.format(common)):
        run(case, image_token_id=common)
    with pytest.raises(ValueError, match=own.format(models.IMAGE)):
        run(models.mllama())
    scaled = models.gemma3()
    with pytest.raises(ValueError, match="own text embedding"):
        run(scaled, image_token_id=int(scaled.inputs["input_ids"][0, 0]))
    with pytest.raises(ValueError, match="hold none of the 32 rows that the projector gave: .* --projector-path"):
        inner = torch.nn.Linear(32, 32)
        case.model.model.multi_modal_projector.register_forward_hook(lambda _, args, output: inner(output))
        run(case, family={"projector": "model.multi_modal_projector.linear_2"})


@pytest.mark.parametrize("size", [1, 300])
@torch.no_grad()
def test_pictures_added_to_their_tokens_embedding_are_visual_tokens(size):
    case = models.llava()  # as Molmo 2 does
    row = case.model.get_input_embeddings().weight[models.IMAGE].mul_(size)
    visual = (case.inputs["input_ids"] == models.IMAGE)[..., None]

    def add(_, args, kwargs):
        return args, kwargs | {"inputs_embeds": kwargs["inputs_embeds"] + visual * row}

    case.model.model.language_model.register_forward_pre_hook(add, with_kwargs=True)
    probe = Probe("x", case.model, find_parts(case.model, Family()))
    seen = probe.run(models.batch_of(**case.inputs))
    assert torch.allclose(seen.hidden_states[0][seen.visual], case.inserted + row, atol=1e-5)


def test_vision_path_names_the_module_whose_result_is_the_encoders_tokens():
    case = models.llava()
    case.model.idle = nn.Linear(1, 1)
    probe = Probe("x", case.model, find_parts(case.model, family_of("llava", vision="idle")))
    with pytest.raises(ValueError, match="its vision.* never ran; name the one that does by --vision-path"):
        probe.run(models.batch_of(**case.inputs))
    parts = find_parts(case.model, family_of("llava", vision="model.vision_tower.encoder.layers.0"))
    seen = Probe("x", case.model, parts).run(models.batch_of(**case.inputs))
    states = case.model.model.vision_tower(case.inputs["pixel_values"], output_hidden_states=True).hidden_states
    assert torch.equal(seen.vision_features, states[1].flatten(0, 1))
    assert family_of("aria", vision="tower").tokens is None  # the projector's mask is not the tower's


@pytest.mark.parametrize("tokens", ["mask", "~mask"])
def test_padding_is_not_a_token_of_the_encoder(tokens):
    rows, mask = torch.arange(24.0).view(2, 2, 6), torch.tensor([[True, False], [True, True]])
    features = Features("input", nn.Identity(), tokens, width=3)
    tokens_of = features.of((rows,), {"mask": mask if tokens == "mask" else ~mask}, None)
    assert torch.equal(tokens_of, rows[mask])
    assert features.may_join_patches(rows) and not features.may_join_patches(rows[..., :3])
    assert not features.may_join_patches(rows[..., :4])
    assert not Features("output", nn.Identity(), width=3).may_join_patches(rows)  # the rows of a named module are whole


class Joined(nn.Module):
    """LLaVA's projector behind a layer that puts four tokens side by side."""

    def __init__(self, projector: nn.Module):
        super().__init__()
        self.multi_modal_projector = projector
        projector.linear_1 = nn.Linear(96, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.multi_modal_projector(tokens.reshape(len(tokens), -1, 96))


@torch.no_grad()
def test_wide_rows_are_cut_only_for_a_family_that_joins_patches():
    case = models.llava()
    case.model.model.multi_modal_projector = Joined(case.model.model.multi_modal_projector)
    path = "model.multi_modal_projector.multi_modal_projector"
    batch = models.batch_of(**models.ids_for([4, 4]), pixel_values=case.inputs["pixel_values"])
    probe = Probe("x", case.model, find_parts(case.model, family_of("llava", projector=path)))
    with pytest.raises(ValueError, match=r"x: LlavaM\w+ takes rows of 96 numbers, .* vision encoder have 24; name"):
        probe.run(batch)
    probe = Probe("x", case.model, find_parts(case.model, Family(projector=path, joins_patches=True)))
    assert torch.equal(probe.run(batch).vision_features, case.features)
