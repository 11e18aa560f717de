"""`freezing` on tiny models, against layers written out with their own parts in float64."""

import json
from types import MethodType

import pytest
import torch
import vision_language_models as models
from torch.nn import functional as F

from llava.analysis import freezing, loading
from llava.analysis.__main__ import main
from llava.analysis.freezing import ATTENTION, BLANK, MLP, WHOLE, frozen
from llava.analysis.interventions import distance
from llava.analysis.probe import VISUAL, Probe
from llava.families import family_of, find_parts
from llava.utils import presentation

KINDS = (WHOLE, ATTENTION, MLP)


def probe_of(case: models.Case) -> Probe:
    """The probe of a family's tiny model, whose pictures are made to matter."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(3) if parameter.any() else parameter.normal_()
    return Probe("tiny", case.model, find_parts(case.model, family_of(case.model.config.model_type)))


def llama_layer(layer, states, visual, what, arguments):
    """Llama's layer as its paper has it, without the update of one part at visual tokens."""
    update = layer.self_attn(hidden_states=layer.input_layernorm(states), **arguments)[0]
    states = states + update * ~(visual & (what == ATTENTION))
    update = layer.mlp(layer.post_attention_layernorm(states))
    return states + update * ~(visual & (what == MLP))


def gemma_layer(layer, states, visual, what, arguments):
    """Gemma 3's, which normalises each update as well."""
    update = layer.post_attention_layernorm(
        layer.self_attn(hidden_states=layer.input_layernorm(states), **arguments)[0]
    )
    states = states + update * ~(visual & (what == ATTENTION))
    update = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(states)))
    return states + update * ~(visual & (what == MLP))


@pytest.mark.parametrize(
    ("family", "formula"), [(models.llava, llama_layer), (models.gemma3, gemma_layer)], ids=["llama", "gemma3"]
)
@pytest.mark.parametrize("what", KINDS)
@torch.no_grad()
def test_freezing_equals_layers_written_out_in_float64(family, formula, what, monkeypatch):
    case = family()
    probe = probe_of(case)
    case.model.double()
    batch = models.batch_of(**case.inputs | {"pixel_values": case.inputs["pixel_values"].double()})
    groups, layers = probe.groups(batch) == VISUAL, probe.parts.layers
    visual, plain, results = groups[..., None], probe.run(batch).logits, []
    for first in range(len(layers)):
        with frozen(layers[first:], groups, what):
            results.append(probe.run(batch).logits)
    for first in range(len(layers)):
        for number, layer in enumerate(layers):

            def forward(layer, hidden_states, *args, chosen=what if number >= first else None, **arguments):
                after = formula(layer, hidden_states, visual, chosen, arguments)
                return torch.where(visual & (chosen == WHOLE), hidden_states, after)

            monkeypatch.setattr(layer, "forward", MethodType(forward, layer))
        expected = probe.run(batch).logits
        torch.testing.assert_close(results[first][batch.mask], expected[batch.mask], rtol=1e-9, atol=1e-9)
        last = first == len(layers) - 1  # nothing reads what the last layer makes of visual tokens
        text = batch.mask & ~groups
        assert torch.allclose(results[first][text], plain[text], rtol=1e-9, atol=1e-9) == last


@pytest.mark.parametrize("family", models.CASES, ids=lambda case: case.__name__)
def test_in_every_family_attention_and_mlp_are_all_that_updates(family):
    case = family()
    probe, batch = probe_of(case), models.batch_of(**case.inputs)
    freezing.check(probe, batch)
    visual = probe.groups(batch) == VISUAL
    with frozen(probe.parts.layers, visual, WHOLE):
        steps = probe.run(batch).steps()
    assert all(torch.equal(before[visual], after[visual]) for before, after in steps)
    assert not any(torch.equal(before[batch.mask & ~visual], after[batch.mask & ~visual]) for before, after in steps)


def test_a_layer_that_does_more_than_its_two_parts_is_refused(monkeypatch):
    case = models.llava()
    probe, batch = probe_of(case), models.batch_of(**case.inputs)
    layer = probe.parts.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: 1.1 * forward(*args, **kwargs))
    with pytest.raises(ValueError, match=r"tiny: layer 1 \(LlamaDecoderLayer\) changes visual tokens by more than"):
        freezing.check(probe, batch)
    monkeypatch.setattr(layer, "_modules", {"mlp": layer.mlp, "mixer": layer.self_attn})
    with pytest.raises(ValueError, match="LlamaDecoderLayer: expected one of self_attn, .* found mlp, mixer"):
        freezing.sub_layers(layer)


def test_hooks_are_gone_after_the_block():
    case = models.llava()
    probe, batch = probe_of(case), models.batch_of(**case.inputs)
    plain = probe.run(batch).logits
    for what in KINDS:
        with pytest.raises(RuntimeError), frozen(probe.parts.layers, probe.groups(batch) == VISUAL, what):
            raise RuntimeError
    assert torch.equal(probe.run(batch).logits, plain)


def test_the_summary_names_the_first_layer_from_which_on_freezing_is_harmless():
    kls = {WHOLE: (0.9, 0.05, 0.2, 0.0), ATTENTION: (0.3, 0.01, 0.0, 0.0), MLP: (0.01, 0.0, 0.0, 0.0)}
    outcomes = [freezing.Outcome(BLANK, 0, 1.0, 2)]
    outcomes += [freezing.Outcome(what, n, kl, 1 + (kl > 0.5)) for what in KINDS for n, kl in enumerate(kls[what])]
    summary = freezing.summarized(freezing.by_layer("m", outcomes))
    assert [row["harmless from"] for row in summary] == [3, 1, 0]
    assert [row["over blank picture"] for row in summary] == [0.9, 0.3, 0.01]
    assert summary[0]["answer changes (%)"] == 100 and summary[1]["answer changes (%)"] == 0
    blind = [outcome._replace(kl=outcome.kl / 1000) for outcome in outcomes]  # the model does not look
    assert all(row["harmless from"] is None for row in freezing.summarized(freezing.by_layer("m", blind)))


@pytest.mark.slow
def test_the_command_writes_what_its_runs_give(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(presentation.STYLE, "savefig.dpi", 50)
    path = models.our_checkpoint(tiny, tmp_path / "checkpoint", "gwc_layernorm")
    flags = ["freezing", "--model", f"one={path}", "--data", str(tiny / "data/finetune.json"), "--samples", "1"]
    flags += ["--image-folder", str(tiny / "data/images"), "--device", "cpu", "--output-dir", str(tmp_path)]
    seen = []
    monkeypatch.setattr(freezing, "distance", lambda a, b: seen.append((a, b)) or distance(a, b))
    assert main(flags) == 0
    rows = json.loads((tmp_path / "freezing-layers.json").read_text())["rows"]
    runs = [(row["frozen"], row["from layer"]) for row in rows]
    assert runs == [(BLANK, 0), *((what, first) for what in KINDS for first in (0, 1))]
    expected = [F.kl_div(b, a, log_target=True, reduction="sum").item() for a, b in seen]
    assert [row["KL (nats)"] for row in rows] == pytest.approx(expected, abs=1e-9)
    assert len(json.loads((tmp_path / "freezing.json").read_text())["rows"]) == 3
    assert (tmp_path / "freezing.png").stat().st_size > 5_000
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load", lambda *args: pytest.fail("measured again"))
        assert main(flags) == 0
    assert json.loads((tmp_path / "freezing-layers.json").read_text())["rows"] == rows
