"""`llava.attach` on a tiny model of every family: what enters the LLM, gradients, files, and what is refused."""

import copy
import math
import os
from types import SimpleNamespace

import pytest
import saved_models
import torch
import transformers
from PIL import Image
from saved_models import SAVED
from tiny_models import make
from torch import nn
from transformers import Trainer, TrainingArguments
from vision_language_models import IMAGE, batch_of, mllama, qwen3_vl
from vision_language_models import llava as llava_case

from llava.analysis.models import library_inputs, load_processor
from llava.analysis.probe import Probe
from llava.analysis.samples import PicturePrompt
from llava.attach import RECORD, attach, attachable, attached_norms, load_attached
from llava.families import family_of, find_parts

FEW = ["llava_next", "qwen3_vl", "ovis2", "gemma3"]
TRIED = [*SAVED] if os.environ.get("FAMILIES") == "all" else FEW


@pytest.fixture(scope="module", params=TRIED)
def family(request, tmp_path_factory):
    """A model of the family in eval mode, the path of its projector, and inputs with a picture."""
    name = request.param
    saved, folder = SAVED[name], tmp_path_factory.mktemp("model")
    model = saved_models.write(saved, folder).eval()
    prepare = library_inputs(load_processor(str(folder)), "cpu", torch.float32, family_of(model.config.model_type))
    picture = torch.rand(20, 40, 3, generator=torch.Generator().manual_seed(0)) * 255
    inputs = prepare(PicturePrompt("x", Image.fromarray(picture.byte().numpy()), "What is it?")).inputs
    return SimpleNamespace(name=name, model=model, projector=saved.projector, inputs=inputs)


def fresh(family) -> nn.Module:
    return copy.deepcopy(family.model)


def logits(model, family) -> torch.Tensor:
    with torch.no_grad():
        return model(**family.inputs, use_cache=False).logits


def text_norm(model) -> float:
    """The mean norm of what the text embedding returns, by a loop over ids."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        norms = [embedding(torch.tensor([[index]])).double().norm().item() for index in range(len(embedding.weight))]
    norms = [norm for norm in norms if norm > 0]
    return sum(norms) / len(norms)


@torch.no_grad()
def entering(model, family) -> torch.Tensor:
    """The visual tokens that enter the LLM's first layer [N, D]."""
    probe = Probe("x", model, find_parts(model, family_of(model.config.model_type)))
    seen = probe.run(batch_of(**family.inputs))
    return seen.hidden_states[0][seen.visual]


def test_a_visual_token_enters_with_the_norm_of_what_embed_tokens_returns(family):
    model = fresh(family)
    target = text_norm(model)
    before = entering(model, family)
    attach(model, eps=1e-12)
    tokens = entering(model, family)
    changed = ~torch.isclose(tokens, before).all(dim=-1)  # not the line ends that LLaVA-NeXT adds
    assert changed.float().mean() > 0.5
    assert tokens[changed].norm(dim=-1).tolist() == pytest.approx([target] * int(changed.sum()), rel=1e-5)
    gain = model.get_submodule(family.projector).mm_norm.weight[0].item()
    assert gain == pytest.approx(target / math.sqrt(32), rel=1e-5)


def gradients(model, family, names) -> dict[str, torch.Tensor]:
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in family.inputs.items()}
    out = model(**inputs, use_cache=False).logits.double()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model.zero_grad()
    (out * weights).mean().backward()
    return {name: model.get_parameter(name).grad.double() for name in names}


def test_gradients_equal_float64_ones_with_the_projectors_divided_by_the_gain(family):
    model = attach(fresh(family))
    projector = f"{family.projector}."
    gain, bias = f"{projector}mm_norm.weight", f"{projector}mm_norm.bias"
    inner = [n for n, _ in model.named_parameters() if n.startswith(projector) and ".mm_norm." not in n]
    attached_norms(model)[0].train()
    computed = gradients(model, family, [*inner, gain, bias])

    plain = fresh(family).double()
    plain.set_experts_implementation("eager")  # the grouped product has no float64
    target = attached_norms(model)[0].init_gain
    weight, shift = (torch.full((32,), value, dtype=torch.float64, requires_grad=True) for value in (target, 0.0))

    def reference(_, args, kwargs, output):
        def normed(x):
            centred = x - x.mean(-1, keepdim=True)
            return weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + shift

        if not next(iter((*args, *kwargs.values()))).is_floating_point():
            return None
        return [normed(x) for x in output] if isinstance(output, list) else normed(output)

    plain.get_submodule(family.projector).register_forward_hook(reference, with_kwargs=True)
    inner = [name for name in inner if family.name != "ovis2"]  # markers, without a norm, share the table
    expected = {name: grad / target for name, grad in gradients(plain, family, inner).items()}
    expected |= {gain: weight.grad, bias: shift.grad}
    for name, grad in expected.items():
        error = (computed[name] - grad).norm() / grad.norm().clamp(min=1e-12)
        assert error < 2e-3, name


def test_saved_and_loaded_answers_are_equal_and_a_plain_load_fails(family, tmp_path):
    model = attach(fresh(family))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for norm in attached_norms(model):
            for parameter in norm.parameters():
                parameter += 0.1 * torch.rand(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path)
    loaded = load_attached(str(tmp_path))
    assert type(loaded) is type(model) and loaded.config.to_dict()[RECORD] == model.config.to_dict()[RECORD]
    state = model.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    assert torch.equal(logits(loaded, family), logits(model, family))
    for load in (type(model), transformers.AutoModelForImageTextToText):
        with pytest.raises(KeyError, match="load this folder by llava.attach.load_attached"):
            load.from_pretrained(tmp_path)


def test_a_norm_that_is_not_learnable_stays_so_when_it_is_loaded_and_under_peft(llava, tmp_path):
    peft = pytest.importorskip("peft")
    model = attach(copy.deepcopy(llava), learnable=False)
    model.save_pretrained(tmp_path)
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["multi_modal_projector"])
    for trained in (load_attached(str(tmp_path)), peft.get_peft_model(model, lora).train()):
        fixed = [not p.requires_grad for name, p in trained.named_parameters() if "mm_norm" in name]
        assert len(fixed) >= 2 and all(fixed)


@pytest.fixture(scope="module")
def llava():
    return saved_models.filled(SAVED["llava"].model()).eval()


def test_deepstacks_further_outputs_are_left_as_they_are():
    case = qwen3_vl()
    model = attach(copy.deepcopy(case.model), eps=1e-12)
    assert len(attached_norms(model)) == 1
    with torch.no_grad():
        visual = model.model.visual(case.inputs["pixel_values"], grid_thw=case.inputs["image_grid_thw"])
    norms = [rows.norm(dim=-1) for rows in (visual.pooler_output, *visual.deepstack_features)]
    aligned = [torch.allclose(values, torch.tensor(text_norm(model)), rtol=1e-5) for values in norms]
    assert aligned == [True, False, False]


@pytest.mark.parametrize("norm", attachable())
def test_every_norm_starts_at_the_requested_multiple_of_the_text_norm(llava, norm):
    model = attach(copy.deepcopy(llava), norm, "2x", eps=1e-12)
    features = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)) * 9
    norms = model.model.multi_modal_projector(features).norm(dim=-1)
    assert norms.tolist() == [pytest.approx([2 * text_norm(llava)] * 5, rel=1e-5)] * 2


def test_what_cannot_have_the_norm_is_refused_and_unchanged(llava, tiny):
    def refused(model, message, *args, **options):
        keys, config = model.state_dict().keys(), model.config.to_dict()
        with pytest.raises(ValueError, match=message):
            attach(model, *args, **options)
        assert model.state_dict().keys() == keys and model.config.to_dict() == config

    model = copy.deepcopy(llava)
    names = "expected one of layernorm, gwc_layernorm, rmsnorm, gwc_rmsnorm, clip; found"
    refused(model, f"norm: {names} 'none'", "none")
    refused(model, "--mm_projector_norm_init: expected 'text_norm'", init="texts")
    refused(model, "projector= model.nothing: .* has no such module", projector="model.nothing")
    refused(attach(copy.deepcopy(llava)), "its projector ends in a norm already")
    refused(mllama().model, "mllama cannot have the norm: its LLM looks at the picture by cross-attention")
    model.config.model_type = "molmo2"
    refused(model, "adds a visual token to the embedding of its placeholder")
    model.config.model_type = "llava"
    refused(make(tiny), "this tree's own model, which is trained with a norm by --mm_projector_norm")
    refused(model.model.language_model, "a language model without a vision encoder has no projector")
    model.model.renamed = model.model.multi_modal_projector
    del model.model.multi_modal_projector
    refused(model, "expected one module called mm_projector, .*; found none. Name it by projector=")
    own = type("Own", (type(model),), {})
    model.__class__ = own
    refused(model, "Own: expected a class of transformers")


def test_a_folder_without_record_or_without_the_norms_weights_or_with_nan_is_refused(llava, tmp_path):
    llava.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="plain: config.json has no llava_attached; expected a model that attach"):
        load_attached(str(tmp_path / "plain"))
    model = attach(copy.deepcopy(llava))
    weights = {name: tensor for name, tensor in model.state_dict().items() if "mm_norm.bias" not in name}
    model.save_pretrained(tmp_path / "lost", state_dict=weights)
    with pytest.raises(ValueError, match="but the weights lack model.multi_modal_projector.mm_norm.bias"):
        load_attached(str(tmp_path / "lost"))
    attached_norms(model)[0].weight.data[0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match="mm_norm: NaN or infinity in weight"):
        load_attached(str(tmp_path / "nan"))


def test_the_guard_is_a_field_that_the_config_does_not_set_again_when_it_is_loaded(llava, tmp_path, monkeypatch):
    """As Step-3.7's and MiniMax-M3-VL's configs set the LLM's activation."""
    text_class = type(llava.config.text_config)
    init = text_class.__post_init__

    def sets_again(config, **kwargs):
        init(config, **kwargs)
        config.hidden_act = "silu"

    monkeypatch.setattr(text_class, "__post_init__", sets_again)
    attach(copy.deepcopy(llava)).save_pretrained(tmp_path)
    with pytest.raises(KeyError, match="load this folder by llava.attach.load_attached"):
        type(llava).from_pretrained(tmp_path)
    load_attached(str(tmp_path))


# --- training by others -----------------------------------------------------------------------------------------------


def train(model, folder, resume=None) -> nn.Module:
    """Trains four steps by the Trainer of transformers, with a checkpoint after each second one."""
    inputs = llava_case().inputs
    ids = inputs["input_ids"]
    columns = inputs | {"labels": ids.masked_fill(ids == IMAGE, -100)}
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)] * 4
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_steps": 2}
    options |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    trainer = Trainer(model, TrainingArguments(str(folder), **options), train_dataset=records)
    trainer.train(resume_from_checkpoint=resume)
    return model


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(llava, tmp_path):
    """The Trainer reads a checkpoint by the model's own names; `save_pretrained` would write published ones."""
    whole = train(attach(copy.deepcopy(llava)), tmp_path / "whole")
    resumed = train(attach(copy.deepcopy(llava)), tmp_path / "part", str(tmp_path / "whole/checkpoint-2"))
    state = whole.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in resumed.state_dict().items())
    assert not torch.equal(state["lm_head.weight"], llava.lm_head.weight)


def test_peft_trains_saves_and_merges_the_projectors_norm(llava, tmp_path):
    peft = pytest.importorskip("peft")
    base = attach(copy.deepcopy(llava))
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["multi_modal_projector"])
    model = peft.get_peft_model(base, lora)
    trained = [name for name, p in model.named_parameters() if p.requires_grad and "mm_norm" in name]
    assert len(trained) == 2
    with torch.no_grad():
        model.get_parameter(trained[0]).mul_(3)
    case = SimpleNamespace(inputs=llava_case().inputs)
    expected = logits(model, case)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged, case), expected, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load_attached(str(tmp_path / "merged")), case), logits(merged, case))
    again = peft.PeftModel.from_pretrained(attach(copy.deepcopy(llava)), tmp_path / "adapter")
    assert torch.allclose(logits(again, case), expected, atol=1e-5)
