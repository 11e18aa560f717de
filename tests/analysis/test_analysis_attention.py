"""`attention` and `theory` on tiny models, against the library's own attention and cache."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import vision_language_models as models
from PIL import Image

from llava.analysis import attention, theory
from llava.analysis import models as loading
from llava.analysis.__main__ import main, parser
from llava.analysis.attention import overlaid, picture_grid, seen_picture, watched
from llava.analysis.commands import NamedModel
from llava.analysis.probe import TEXT_AFTER, TEXT_BEFORE, VISUAL, Probe
from llava.analysis.samples import PicturePrompt
from llava.families import family_of, find_parts
from llava.utils import presentation

QUESTION = "Is there a warm colour?"


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    return models.our_checkpoint(tiny, tmp_path_factory.mktemp("checkpoint"), "gwc_layernorm")


@pytest.fixture(scope="module")
def probe(checkpoint):
    args = parser("attention").parse_args(["attention", "--device", "cpu"])
    loaded = loading.load(NamedModel("tiny", checkpoint), args)
    with torch.no_grad():  # untrained weights hardly decide anything
        for name, weight in loaded.model.named_parameters():
            if ".layers." in name and name.endswith("_proj.weight") or name == "lm_head.weight":
                weight.mul_(10)
    return loaded


@pytest.fixture(scope="module")
def question():
    return PicturePrompt("first", Image.new("RGB", (20, 16), (200, 40, 90)), QUESTION)


@pytest.fixture(scope="module")
def eager(probe, question):
    """Attention weights [L, H, S, S] and logits [C] by transformers' own eager attention."""
    probe.model.set_attn_implementation("eager")
    seen = probe.model(**probe.prepare(question).inputs, output_attentions=True)
    probe.model.set_attn_implementation("sdpa")
    return torch.cat(seen.attentions).detach(), seen.logits[0, -1].detach()


def weights_of(probe: Probe, batch) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Weights [H, S, S] by layer, and logits, of the first sample with the attention watched."""
    weights = {}
    with watched(probe.parts.layers, lambda index, seen: weights.update({index: seen.clone()})):
        seen = probe.run(batch)
    return weights, seen.logits


def test_measured_weights_equal_the_librarys_and_the_model_is_unchanged(probe, question, eager):
    weights, logits = weights_of(probe, probe.prepare(question))
    assert torch.allclose(torch.stack(list(weights.values())), eager[0], atol=1e-6)
    assert torch.allclose(logits[0, -1], eager[1], atol=1e-5)
    assert probe.model.config._attn_implementation == "sdpa"


LLMS = {
    "learned sinks": lambda: transformers.GptOssConfig(
        **models.TEXT, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6
    ),
    "soft cap": lambda: transformers.Gemma2Config(
        **models.TEXT, head_dim=8, sliding_window=6, attn_logit_softcapping=0.1
    ),
    "window": lambda: transformers.MistralConfig(**models.TEXT, sliding_window=6),
    # The middle layer alone has attention.
    "hybrid": lambda: transformers.Lfm2Config(
        **models.TEXT, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8
    ),
}


def strong(text) -> Probe:
    """LLaVA around a language model whose weights are large enough to decide where attention goes."""
    case = models.llava(text)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(3) if parameter.any() else parameter.normal_()
    probe = Probe("x", case.model, find_parts(case.model, family_of("llava")))
    probe.batch = models.batch_of(**{name: value[:1] for name, value in case.inputs.items()})
    return probe


@pytest.mark.parametrize("name", LLMS)
@torch.no_grad()
def test_sinks_caps_and_windows_of_a_language_model_are_watched_too(name):
    probe = strong(LLMS[name]())
    weights, logits = weights_of(probe, probe.batch)
    probe.model.set_attn_implementation("eager")
    eager = probe.model(**probe.batch.inputs, output_attentions=True)
    assert torch.allclose(logits, eager.logits, atol=1e-3)
    expected = [layer[0] for layer in eager.attentions if layer is not None]
    assert list(weights) == ([1] if name == "hybrid" else [0, 1, 2]) and len(expected) == len(weights)
    for watched_weights, layer in zip(weights.values(), expected, strict=True):
        assert torch.allclose(watched_weights, layer, atol=1e-5)
    if name == "learned sinks":
        assert weights[0].sum(dim=-1).max() < 1


def looking(case, last=False):
    """What `attention` says of the first sample of a case: of the text after the picture, or of the last token."""
    probe = Probe("x", case.model, find_parts(case.model, family_of(case.model.config.model_type)))
    batch = models.batch_of(**{name: value[:1] for name, value in case.inputs.items()})
    groups = probe.groups(batch)[0]
    asking = torch.arange(len(groups)) == len(groups) - 1 if last else groups == TEXT_AFTER
    return attention.attention_of(probe, batch, asking, Image.new("RGB", (9, 9)), "first: no layer lets the question")


def share_of(allowed: Callable[[int, int], bool], case) -> float:
    """Mean over the text after the picture: visual ones among the positions that a token may look at."""
    visual = (case.inputs["input_ids"][0] == models.IMAGE).tolist()
    after = [q for q in range(len(visual)) if not visual[q] and any(visual[:q])]
    shares = []
    for q in after:
        there = [k for k in range(len(visual)) if allowed(q, k)]
        shares.append(sum(visual[k] for k in there) / len(there))
    return np.mean(shares)


@torch.no_grad()
def test_uniform_is_what_the_mask_allows():
    def causal(q, k):
        return k <= q

    case = models.llava()
    assert looking(case)["uniform"] == pytest.approx([share_of(causal, case)] * 3)
    windowed = models.llava(transformers.Gemma2Config(**models.TEXT, head_dim=8, sliding_window=6))
    inside = share_of(lambda q, k: q - 6 < k <= q, windowed)
    assert looking(windowed)["uniform"] == pytest.approx([inside, share_of(causal, windowed), inside])
    chunks = {"head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
    chunked = models.llava(transformers.Llama4TextConfig(**models.TEXT | chunks))
    picture = looking(chunked)
    assert picture["uniform"] == pytest.approx([share_of(lambda q, k: k <= q and q // 8 == k // 8, chunked)] * 3)


@torch.no_grad()
def test_uniform_attention_has_uniform_share_and_entropy_1_in_any_window():
    case = models.llava(transformers.MistralConfig(**models.TEXT, sliding_window=9))
    for layer in case.model.model.language_model.layers:
        layer.self_attn.q_proj.weight.zero_()
    picture = looking(case, last=True)  # six words follow the picture, so three of its sixteen tokens are in sight
    assert picture["share"] == pytest.approx([3 / 9] * 3) and picture["uniform"] == pytest.approx([3 / 9] * 3)
    assert picture["entropy"] == pytest.approx([1] * 3) and picture["top"] == pytest.approx([1 / 3] * 3)
    with pytest.raises(ValueError, match="first: no layer lets the question look at the picture"):
        looking(models.llava(transformers.MistralConfig(**models.TEXT, sliding_window=6)), last=True)


def test_a_sample_without_text_after_its_picture_is_named(probe, question, monkeypatch):
    monkeypatch.setattr(probe, "groups", lambda batch: torch.full((1, 9), VISUAL))
    with pytest.raises(ValueError, match="no text follows the picture"):
        attention.look_of(probe, question)


def test_weights_in_float16_whose_smallest_are_lost_are_refused(checkpoint, question):
    args = parser("attention").parse_args(["attention", "--device", "cpu", "--dtype", "float16"])
    with pytest.raises(ValueError, match="tiny: float16 loses small attention weights; add --dtype bfloat16"):
        attention.look_of(loading.load(NamedModel("tiny", checkpoint), args), question)


def test_maps_shares_and_entropy_equal_sums_over_the_librarys_weights(probe, question, eager):
    picture = attention.look_of(probe, question)
    groups = probe.groups(probe.prepare(question))[0]
    weights, visual = eager[0].double().numpy(), (groups == VISUAL).numpy()
    rows = np.flatnonzero(groups == TEXT_AFTER)
    expected = np.zeros(visual.sum())
    for layer in range(2):
        looks = weights[layer][:, rows][:, :, visual].mean(axis=1)  # [H, V]
        expected += looks.sum(axis=0)
        p = looks / looks.sum(axis=1, keepdims=True)
        entropy = -(p * np.log(p)).sum(axis=1) / np.log(p.shape[1])
        assert picture["share"][layer] == pytest.approx(looks.sum(axis=1).mean(), rel=1e-5)
        assert picture["entropy"][layer] == pytest.approx(entropy.mean(), rel=1e-5)
        assert picture["top"][layer] == pytest.approx(p.max(axis=1).mean(), rel=1e-5)
    assert picture["map"].ravel() == pytest.approx(expected / expected.sum(), rel=1e-5)
    assert picture["map"].shape == (2, 2)


def _positions(rows: int, columns: int, padding: int) -> torch.Tensor:
    places = [[column, row] for row in range(rows) for column in range(columns)]
    return torch.tensor([places + [[-1, -1]] * padding])


# Input of the model, visual tokens, and the rows and columns that they have; square numbers that are no squares.
GRIDS = {
    "gemma4, 16 x 4 tokens": ("gemma4", {"image_position_ids": _positions(32, 8, 24)}, 64, (16, 4)),
    "mistral3, 2 x 8 tokens": ("mistral3", {"image_sizes": torch.tensor([[56, 224]])}, 16, (2, 8)),
    "llava with Pixtral": (
        "llava",
        {"image_sizes": torch.tensor([[16, 64]]), "pixel_values": torch.ones(1, 3, 64, 64)},
        16,
        (2, 8),
    ),
    "qwen2_vl": ("qwen2_vl", {"image_grid_thw": torch.tensor([[1, 2, 8]])}, 4, (1, 4)),
    "llava, 384 pixels and patches of 14": ("llava", {"pixel_values": torch.ones(1, 3, 384, 384)}, 729, (27, 27)),
    "latents": ("idefics2", {}, 64, None),
    "tiles": ("internvl", {"pixel_values": torch.ones(4, 3, 16, 16)}, 16, None),
    "frames": ("qwen2_vl", {"image_grid_thw": torch.tensor([[4, 4, 4]])}, 16, None),
    "a class token": ("llava", {"pixel_values": torch.ones(1, 3, 16, 16)}, 17, None),
}


@pytest.mark.parametrize("name", GRIDS)
def test_the_grid_comes_from_the_shapes_of_the_processor(name):
    model_type, inputs, count, expected = GRIDS[name]
    assert picture_grid(SimpleNamespace(config=SimpleNamespace(model_type=model_type)), inputs, count) == expected


@pytest.mark.parametrize("mode", [None, "pad"])
def test_a_map_lies_on_the_picture_that_the_encoder_sees(probe, monkeypatch, mode):
    monkeypatch.setattr(probe.model.config, "image_aspect_ratio", mode, raising=False)
    half = Image.new("RGB", (64, 16), "black")
    half.paste((255, 255, 255), (0, 0, 32, 16))
    batch = probe.prepare(PicturePrompt("x", half, QUESTION))
    seen = seen_picture(probe.model, batch.inputs, half)
    assert seen.shape == tuple(batch.inputs["images"].shape[-2:])
    assert seen[len(seen) // 2, 0] == 255 and seen[len(seen) // 2, -1] == 0
    assert (seen[0].std() > 50) == (mode is None)
    drawn = np.asarray(overlaid(np.full((20, 80), 255, np.uint8), np.array([[1.0, 0.0], [0.0, 0.0]]), 1.0)).sum(axis=2)
    assert drawn.shape == (20, 80) and (drawn == drawn.max())[:10, :40].all() and (drawn == drawn.max()).sum() == 400


def layer_row(states, after, groups, sinks) -> dict[str, float]:
    """The row of one layer and one sample."""
    members = {name: torch.isin(groups, torch.tensor(ids)) & ~sinks for name, ids in theory.MODALITIES.items()}
    values = theory.layer_values(states, after, members)
    values = {name: value[None] for name, value in values.items()}
    values |= {f"{name} sinks": np.array([0]) for name in theory.MODALITIES}
    return theory.layer_row([values], 0)


def test_the_row_of_a_layer_equals_plain_geometry():
    random = torch.Generator().manual_seed(0)
    states, after = (torch.randn(40, 6, generator=random) for _ in range(2))
    states[:20] *= 5
    sinks = torch.arange(40) == 39
    groups = torch.tensor([VISUAL] * 20 + [TEXT_AFTER] * 20)
    row = layer_row(states, after, groups, sinks)
    update = (after - states).double().numpy()
    h = states.double().numpy()
    degrees = np.degrees([_angle(a, b) for a, b in zip(h, after.double().numpy(), strict=True)])
    phi = np.degrees([_angle(a, b) for a, b in zip(h, update, strict=True)])
    for name, part in (("visual", slice(0, 20)), ("text", slice(20, 39))):
        assert row[f"{name} w"] == pytest.approx(degrees[part].mean(), rel=1e-6)
        assert row[f"{name} phi"] == pytest.approx(phi[part].mean(), rel=1e-6)
        assert row[f"{name} C"] == pytest.approx(np.linalg.norm(update[part], axis=1).mean(), rel=1e-6)
    unit, unit_after = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (h, after.double().numpy()))
    assert row["cos before"] == pytest.approx((unit[:20] @ unit[20:39].T).mean(), rel=1e-9)
    assert row["cos measured"] == pytest.approx((unit_after[:20] @ unit_after[20:39].T).mean(), rel=1e-9)
    kept = np.cos(np.radians(degrees))[:, None] * unit
    assert row["cos predicted"] == pytest.approx((kept[:20] @ kept[20:39].T).mean(), rel=1e-6)
    turns = update - (update * unit).sum(axis=1, keepdims=True) * unit
    turns /= np.linalg.norm(turns, axis=1, keepdims=True)
    assert row["rotations' product"] == pytest.approx((turns[:20] @ turns[20:39].T).mean(), rel=1e-6)
    assert row["text drift"] == pytest.approx(np.linalg.norm(turns[20:39].mean(axis=0)), rel=1e-6)


def test_assumptions_are_measured_without_sinks(probe, question, monkeypatch):
    seen = probe.run(probe.prepare(question))
    sink = seen.visual & (seen.visual.cumsum(1) == 2)
    monkeypatch.setattr(theory, "sink_mask", lambda seen: sink)
    values = theory.sample_values(probe, question)
    rows = [{"model": "m", "layer": layer} | theory.layer_row([values], layer) for layer in range(2)]
    assert [row["visual sinks"] for row in rows] == [1, 1]
    chosen = seen.visual & ~sink
    assert rows[0]["visual |h|"] == pytest.approx(seen.hidden_states[0][chosen].norm(dim=-1).mean().item(), rel=1e-5)
    line = theory.summary(rows)[0]
    assert line["median layer"] == pytest.approx(np.median([r["visual |h|"] / r["text |h|"] for r in rows]))


def test_one_shared_update_is_predicted_exactly():
    states = torch.tensor([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 7.0]])
    turns = torch.tensor([[0, 1.0, 0], [0, 0, 1.0], [1.0, 0, 0]])
    groups = torch.tensor([TEXT_BEFORE, TEXT_AFTER, VISUAL])
    row = layer_row(states, states + 0.5 * turns, groups, torch.zeros(3, dtype=torch.bool))
    assert row["visual error"] == pytest.approx(0, abs=1e-9) and row["text error"] == pytest.approx(0, abs=1e-9)
    assert row["visual w"] == pytest.approx(np.degrees(np.arctan(0.5 / 7)))


@pytest.mark.parametrize("phi", [0.3, 1.0, np.pi / 2, 2.0, 2.8])
def test_angular_velocity_is_the_angle_of_the_moved_vector(phi):
    for norm, update in ((60.0, 0.1), (3.0, 1.0), (0.8, 5.0)):  # the last one is turned back beyond a right angle
        moved = np.array([norm + update * np.cos(phi), update * np.sin(phi)])
        assert theory.angular_velocity(norm, update, phi) == pytest.approx(_angle(np.array([norm, 0.0]), moved))


def _angle(a, b):
    return np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.slow
def test_the_commands_write_their_files_and_measure_once(checkpoint, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(presentation.STYLE, "savefig.dpi", 50)
    shared = ["--model", f"one={checkpoint}", "--model", f"two={checkpoint}", "--device", "cpu"]
    shared += ["--data", str(tiny / "data/finetune.json"), "--samples", "2", "--output-dir", str(tmp_path)]
    commands = {"attention": "attention", "theory-model": "theory"}
    written = {}
    for result, command in commands.items():
        assert main([command, *shared]) == 0
        written[result] = json.loads((tmp_path / f"{result}.json").read_text())["rows"]
    for name in ("attention-heatmaps", "attention-profiles"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000, name
    assert len(json.loads((tmp_path / "theory-model-layers.json").read_text())["rows"]) == 2 * 2  # models, layers
    monkeypatch.setattr(loading, "load", lambda *args: pytest.fail("measured again"))
    for result, command in commands.items():
        assert main([command, *shared]) == 0
        assert json.loads((tmp_path / f"{result}.json").read_text())["rows"] == written[result]
    with pytest.raises(pytest.fail.Exception):
        main(["attention", *shared, "--seed", "1"])
