"""Gradients of each arm against autograd on the parts put together by hand, and what compensation must change."""

import json
from pathlib import Path

import pytest
import torch
from analysis_commands import arguments, run
from anyres_data import ANYRES, write_shapes
from safetensors.torch import load_file, save_file
from tiny_models import VISION_SIZES
from torch.nn import functional as F
from vision_language_models import our_checkpoint

from llava.analysis import gradients, inputs, loading
from llava.analysis.gradients import ARMS, BEFORE, FEATURES, INPUT
from llava.analysis.models import NamedModel
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import get_template
from llava.model.multimodal_encoder.towers import TOWERS


def setting(tiny, path):
    args = arguments("gradients", "--data", tiny / "data/finetune.json", "--samples", 3)
    args.output_dir = Path(path).parent / "out"
    return NamedModel("m", path), inputs.choose(args), args


def by_hand(named, samples, args, gain, bias, tokens=slice(None)):
    """Norms of the loss's gradients at LLM input, norm input and features, each a leaf of a graph of its own."""
    tokenizer, model, image_processor = loading.load_ours(named, args)
    batch, labels_of = gradients.training_batch(samples[:], tokenizer, image_processor, model, get_template("chatml"))
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
    return {point: tensor.grad.flatten(0, 1)[tokens].norm().item() for point, tensor in points}


@pytest.mark.parametrize("norm", ["none", "gwc_layernorm"])
def test_each_arms_gradients_equal_those_of_the_parts_by_hand(tiny, tmp_path, norm):
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m", norm))
    arms = gradients.measure_gradients(named, samples, args)
    weight = loading.load_ours(named, args)[1].get_input_embeddings().weight
    target = weight.norm(dim=1).mean().item()
    gain, bias = torch.full((32,), target / 32**0.5), torch.zeros(32)
    plain = by_hand(named, samples, args, None, None)
    layernorm = by_hand(named, samples, args, gain, bias)
    for point in (INPUT, BEFORE, FEATURES):
        assert arms["none"].norms[point] == pytest.approx(plain[point], rel=1e-4)
        assert arms["layernorm"].norms[point] == pytest.approx(layernorm[point], rel=1e-4)
    # Compensation divides everything below the norm by the mean gain (paper eq. 26), and nothing above it.
    assert arms["gwc_layernorm"].norms[INPUT] == pytest.approx(arms["layernorm"].norms[INPUT], rel=1e-6)
    for point in list(arms["none"].norms)[1:]:
        assert arms["gwc_layernorm"].norms[point] == pytest.approx(
            arms["layernorm"].norms[point] / gain[0].item(), rel=1e-4
        )
    assert list(arms["none"].norms)[3:] == ["tower layer 1", "tower layer 0"]


def test_a_trained_norm_keeps_its_gain_in_both_arms(tiny, tmp_path):
    path = our_checkpoint(tiny, tmp_path / "m", "gwc_layernorm")
    named, samples, args = setting(tiny, path)
    model = loading.load_ours(named, args)[1]
    with torch.no_grad():
        model.model.mm_projector[3].weight.copy_(torch.linspace(0.5, 2, 32))
        model.model.mm_projector[3].bias.fill_(0.1)
    model.save_pretrained(path)
    arms = gradients.measure_gradients(named, samples, args)
    expected = by_hand(named, samples, args, torch.linspace(0.5, 2, 32), torch.full((32,), 0.1))
    assert arms["layernorm"].norms[BEFORE] == pytest.approx(expected[BEFORE], rel=1e-4)
    assert arms["gwc_layernorm"].norms[BEFORE] == pytest.approx(expected[BEFORE] / 1.25, rel=1e-4)


def test_above_the_tower_gradients_are_also_measured_without_sinks(tiny, tmp_path, monkeypatch):
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m"))
    sinks = torch.zeros(3 * 4, dtype=torch.bool)
    sinks[[1, 7]] = True
    monkeypatch.setattr(gradients, "visual_sinks", lambda model, batch: sinks)
    arms = gradients.measure_gradients(named, samples, args)
    expected = by_hand(named, samples, args, None, None, ~sinks)
    assert arms["none"].without_sinks == pytest.approx(expected, rel=1e-4)
    assert all(arm.sinks == 2 and arm.without_sinks[BEFORE] < arm.norms[BEFORE] for arm in arms.values())


def test_a_visual_token_of_large_norm_is_a_sink(tiny, tmp_path):
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m"))
    tokenizer, model, image_processor = loading.load_ours(named, args)
    batch, _ = gradients.training_batch(samples[:], tokenizer, image_processor, model, get_template("chatml"))
    assert not gradients.visual_sinks(model, batch).any()

    def enlarge(module, args, output):
        output = output.clone()
        output[1, 2] *= 1000
        return output

    model.model.mm_projector.register_forward_hook(enlarge)
    assert gradients.visual_sinks(model, batch).nonzero().flatten().tolist() == [4 + 2]


def in_crops(tiny, tmp_path, aspect_ratio):
    """The setting of a checkpoint that cuts pictures of several shapes into crops, and its model and batch."""
    path = our_checkpoint(tiny, tmp_path / "m")
    rules = {name: value for name, value in ANYRES.items() if name != "image_aspect_ratio"}
    config = json.loads((tmp_path / "m/config.json").read_text()) | rules | {"image_aspect_ratio": aspect_ratio}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "m/model.safetensors")
    save_file(weights | {"model.image_newline": torch.randn(config["hidden_size"])}, tmp_path / "m/model.safetensors")
    data = write_shapes(tmp_path / "shapes")["data_path"]
    args = arguments("gradients", "--data", data, "--samples", 4)
    args.output_dir, named = tmp_path / "out", NamedModel("m", path)
    samples = inputs.choose(args)
    tokenizer, model, image_processor = loading.load_ours(named, args)
    batch, _ = gradients.training_batch(samples[:], tokenizer, image_processor, model, get_template("chatml"))
    return named, samples, args, model, batch


def test_every_visual_token_of_crops_is_traced_to_the_projector(tiny, tmp_path):
    named, samples, args, model, batch = in_crops(tiny, tmp_path, "anyres")
    rows = gradients.projector_rows(model, batch)
    passed = batch.inputs
    layout, crops = model.lay_out(
        passed["input_ids"], passed["attention_mask"], None, passed["images"], passed["image_sizes"]
    )
    with torch.no_grad():
        tokens, entered = model.encode_images(crops).flatten(0, 1), model.splice(layout, crops)[0]
        expected = torch.cat([tokens, model.model.image_newline[None]])[rows]
    of_pictures = batch.input_ids[batch.mask] == IMAGE_TOKEN_INDEX
    assert (rows == -1).any() and len(set(rows.tolist())) < len(tokens)  # newlines, and margins that are cut off
    torch.testing.assert_close(entered[of_pictures], expected)

    norms = gradients.measure_gradients(named, samples, args)["none"].norms
    assert all(value > 0 for value in norms.values())
    place = int(rows[rows >= 0][7])

    def enlarge(module, args, output):
        output = output.clone()
        output.flatten(0, 1)[place] *= 1000
        return output

    model.model.mm_projector.register_forward_hook(enlarge)
    assert gradients.visual_sinks(model, batch).nonzero().flatten().tolist() == [place]


def test_a_picture_whose_tokens_are_means_of_several_is_refused(tiny, tmp_path):
    *_, model, batch = in_crops(tiny, tmp_path, "anyres_max_2")
    with pytest.raises(ValueError, match=r"shrinks a picture of \d+ x \d+ pixels.*leave larger ones out"):
        gradients.projector_rows(model, batch)


@pytest.mark.slow
def test_the_command_writes_table_and_figure(tiny, tmp_path, capsys, monkeypatch):
    path = our_checkpoint(tiny, tmp_path / "m")
    flags = ("gradients", "--data", tiny / "data/finetune.json", "--samples", 2, "--model", f"m={path}")
    rows = run(tmp_path / "out", *flags)["rows"]
    assert [row["gradient at"] for row in rows] == [INPUT, BEFORE, FEATURES, "tower layer 1", "tower layer 0"]
    assert rows[1][f"layernorm / {INPUT}"] == rows[1]["layernorm"] / rows[0]["layernorm"]
    assert all(arm in rows[0] for arm in ARMS)
    assert (tmp_path / "out/gradients.svg").is_file()
    assert "before the norm remains layernorm" in capsys.readouterr().out
    monkeypatch.setattr(loading, "load_ours", lambda *args: pytest.fail("measured again"))
    assert run(tmp_path / "out", *flags)["rows"] == rows


@pytest.mark.parametrize("model_type", TOWERS)
def test_gradients_reach_every_layer_of_every_tower(tiny, tmp_path, model_type):
    tower = TOWERS[model_type]
    sizes = VISION_SIZES | ({"num_patches": 4} if model_type.startswith("siglip2") else {})
    tower.model_class(tower.config_class(**sizes)).save_pretrained(tmp_path / "tower")
    named, samples, args = setting(tiny, our_checkpoint(tiny, tmp_path / "m", tower=str(tmp_path / "tower")))
    norms = gradients.measure_gradients(named, samples, args)["none"].norms
    assert list(norms)[3:] == ["tower layer 1", "tower layer 0"] and all(norm > 0 for norm in norms.values())


def test_data_without_answers_and_other_models_are_refused(tiny, tmp_path):
    named, _, _ = setting(tiny, our_checkpoint(tiny, tmp_path / "m"))
    args = arguments("gradients", "--data", tiny / "data/images", "--samples", 1)
    with pytest.raises(ValueError, match="need an answer to learn"):
        gradients.measure_gradients(named, inputs.choose(args), args)
    with pytest.raises(ValueError, match="need one of our checkpoints .*, found a llama"):
        gradients.measure_gradients(NamedModel("x", str(tiny / "llama")), [], args)
    fields = json.loads((tmp_path / "m/config.json").read_text()) | {"mm_vision_tower": None}
    (tmp_path / "m/config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="need a vision tower, and its config.json names none"):
        gradients.measure_gradients(named, [], args)
