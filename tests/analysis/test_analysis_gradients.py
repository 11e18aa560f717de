"""Gradients of each arm against autograd on the parts put together by hand, and what compensation must change."""

from pathlib import Path

import pytest
import torch
from analysis_commands import arguments
from tiny_models import VISION_SIZES
from torch.nn import functional as F
from vision_language_models import our_checkpoint

from llava.analysis import gradients
from llava.analysis import models as loading
from llava.analysis.commands import NamedModel
from llava.analysis.gradients import BEFORE, FEATURES, INPUT
from llava.analysis.samples import choose
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.preprocess import preprocess
from llava.model.multimodal_encoder.towers import TOWERS


def setting(tiny, path):
    args = arguments("gradients", "--data", tiny / "data/finetune.json", "--samples", 3)
    args.output_dir = Path(path).parent / "out"
    return NamedModel("m", path), choose(args), args


def by_hand(named, samples, args, gain, bias):
    """Norms of the loss's gradients at LLM input, norm input and features, each a leaf of a graph of its own."""
    assistant = loading.load_ours(named, args)
    model = assistant.model
    batch, labels_of = gradients.training_batch(samples, assistant)
    batch = batch.inputs
    features = model.get_vision_tower()(batch["images"]).detach().requires_grad_(True)
    projected = model.model.mm_projector[2](F.gelu(model.model.mm_projector[0](features)))
    projected.retain_grad()
    visual = projected
    if gain is not None:
        mean, variance = projected.mean(-1, keepdim=True), projected.var(-1, correction=0, keepdim=True)
        visual = gain * (projected - mean) / (variance + 1e-5).sqrt() + bias
        visual.retain_grad()
    loss, count = 0.0, 0
    for index, ids in enumerate(batch["input_ids"]):
        keep = batch["attention_mask"][index]
        ids, labels = ids[keep], labels_of[index][keep]
        place = int((ids == IMAGE_TOKEN_INDEX).nonzero()[0])
        embed = model.model.embed_tokens
        row = torch.cat([embed(ids[:place]), visual[index], embed(ids[place + 1 :])])[None]
        hidden = torch.full((visual.shape[1],), IGNORE_INDEX)
        targets = torch.cat([labels[:place], hidden, labels[place + 1 :]])[1:]
        logits = model.lm_head(model.model(inputs_embeds=row, use_cache=False).last_hidden_state)[0, :-1]
        loss = loss + F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        count += int((targets != IGNORE_INDEX).sum())
    (loss / count).backward()
    points = ((INPUT, visual), (BEFORE, projected), (FEATURES, features))
    return {point: tensor.grad.norm().item() for point, tensor in points}


@pytest.mark.parametrize("norm", ["none", "gwc_layernorm"])
def test_each_arms_gradients_equal_those_of_the_parts_by_hand(tiny, tmp_path, norm):
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m", norm))
    arms = gradients.measure_gradients(named, samples, args)
    weight = loading.load_ours(named, args).model.get_input_embeddings().weight
    target = weight.norm(dim=1).mean().item()
    gain, bias = torch.full((32,), target / 32**0.5), torch.zeros(32)
    plain = by_hand(named, samples, args, None, None)
    layernorm = by_hand(named, samples, args, gain, bias)
    for point in (INPUT, BEFORE, FEATURES):
        assert arms["none"][point] == pytest.approx(plain[point], rel=1e-4)
        assert arms["layernorm"][point] == pytest.approx(layernorm[point], rel=1e-4)
    # Compensation divides everything below the norm by the mean gain (paper eq. 26), and nothing above it.
    assert arms["gwc_layernorm"][INPUT] == pytest.approx(arms["layernorm"][INPUT], rel=1e-6)
    for point in list(arms["none"])[1:]:
        assert arms["gwc_layernorm"][point] == pytest.approx(arms["layernorm"][point] / gain[0].item(), rel=1e-4)
    assert list(arms["none"])[3:] == ["tower layer 1", "tower layer 0"]


def test_a_trained_norm_keeps_its_gain_in_both_arms(tiny, tmp_path):
    path = our_checkpoint(tiny, tmp_path / "m", "gwc_layernorm")
    named, samples, args = setting(tiny, path)
    model = loading.load_ours(named, args).model
    with torch.no_grad():
        model.model.mm_projector[3].weight.copy_(torch.linspace(0.5, 2, 32))
        model.model.mm_projector[3].bias.fill_(0.1)
    model.save_pretrained(path)
    arms = gradients.measure_gradients(named, samples, args)
    expected = by_hand(named, samples, args, torch.linspace(0.5, 2, 32), torch.full((32,), 0.1))
    assert arms["layernorm"][BEFORE] == pytest.approx(expected[BEFORE], rel=1e-4)
    assert arms["gwc_layernorm"][BEFORE] == pytest.approx(expected[BEFORE] / 1.25, rel=1e-4)


@pytest.mark.parametrize("model_type", TOWERS)
def test_gradients_reach_every_layer_of_every_tower(tiny, tmp_path, model_type):
    tower = TOWERS[model_type]
    sizes = VISION_SIZES | ({"num_patches": 4} if model_type.startswith("siglip2") else {})
    tower.model_class(tower.config_class(**sizes)).save_pretrained(tmp_path / "tower")
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m", tower=str(tmp_path / "tower")))
    norms = gradients.measure_gradients(named, samples, args)["none"]
    assert list(norms)[3:] == ["tower layer 1", "tower layer 0"] and all(norm > 0 for norm in norms.values())


@pytest.mark.parametrize("masking", ["assistant", "upstream"])
def test_the_labels_are_those_that_the_model_was_trained_with(tiny, tmp_path, masking):
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m"))
    assistant = loading.load_ours(named, args)
    assistant.model.config.mm_label_masking = masking
    question = {"from": "human", "value": f"<image>\n{samples[0].prompt}"}
    turns = [question, {"from": "gpt", "value": samples[0].answer}]
    expected, other = (
        preprocess(turns, assistant.tokenizer, assistant.template, label_masking=kind).labels
        for kind in (masking, {"assistant": "upstream", "upstream": "assistant"}[masking])
    )
    _, labels = gradients.training_batch([samples[0]], assistant)
    assert torch.equal(labels[0], expected) and not torch.equal(expected, other)


def test_data_without_answers_and_other_models_are_refused(tiny, tmp_path):
    named, _, _ = setting(tiny, our_checkpoint(tiny, tmp_path / "m"))
    args = arguments("gradients", "--data", tiny / "data/images", "--samples", 1, "--conv-mode", "v1")
    with pytest.raises(ValueError, match="need an answer to learn"):
        gradients.measure_gradients(named, choose(args), args)
    with pytest.raises(ValueError, match="needs one of our checkpoints with a vision tower"):
        gradients.measure_gradients(NamedModel("x", str(tiny / "llama")), choose(args), args)
