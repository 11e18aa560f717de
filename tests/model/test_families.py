"""Every decoder family, tiny and random: the same properties for each row of the table."""

import copy
from functools import partial

import pytest
import torch
from activations import kept_by_one_layer
from batches import IMG, assert_layouts_agree, batch, collated, loss_and_gradients, one_by_one, pictures
from counted_operations import assert_counted_operations_equal_pytorchs_counter, no_rotary_product
from decoder_families import CASES, NAMES, write_families
from tiny_models import SIZES, make
from torch import nn
from torch.nn import functional as F
from training import rotary_frequencies, training_arguments
from transformers import AutoModelForCausalLM

from llava.model import attention
from llava.model.attention import SEGMENTS, VARLEN, segments_attention, varlen_attention
from llava.model.builder import read_config
from llava.model.language_model.families import DECODERS, LLAVA_CLASSES
from llava.train.memory import estimate_memory
from llava.train.telemetry import attention_windows, batch_work

SAMPLES = [[5, 6, IMG, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16], [IMG, 17, IMG, 18, 19, 20]]  # each with several targets


@pytest.fixture(scope="module")
def families(tiny):
    """`tiny` with a language model in `families/<name>` for each family."""
    return write_families(tiny)


@pytest.fixture(scope="module")
def models(families):
    """An untrained LLaVA of each family, in eval mode; tests leave it as they found it."""
    return {name: make(families, f"families/{name}", tower="clip") for name in NAMES}


def spliced(model, *samples):
    """`inputs_embeds` and mask of samples, padded on the left."""
    inputs = batch(list(samples))
    _, _, mask, _, embeds, _ = model.prepare_inputs_labels_for_multimodal(
        inputs["input_ids"], None, inputs["attention_mask"], None, None, inputs["images"], padding_side="left"
    )
    return inputs, embeds, mask


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_packed_padded_and_one_by_one_give_the_same_loss_and_gradients(models, name):
    model = copy.deepcopy(models[name]).train().requires_grad_(True)
    inputs = batch(SAMPLES)
    assert_layouts_agree(one_by_one(model, inputs), partial(loss_and_gradients, model, **inputs))


@pytest.mark.numeric
@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_generation_equal_the_plain_decoders(families, models, name):
    model, decoder = copy.deepcopy(models[name]), AutoModelForCausalLM.from_pretrained(families / "families" / name)
    inputs, embeds, mask = spliced(model, [5, IMG, 6, 7], [8, 9, 10, 11, 12, 13, IMG, 14])
    ours = model(inputs_embeds=embeds, attention_mask=mask).logits
    theirs = decoder(inputs_embeds=embeds, attention_mask=mask).logits
    assert torch.equal(ours, theirs)

    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.config.tokenizer_padding_side = "left"
    new = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], images=inputs["images"], **options
    )
    assert torch.equal(new, decoder.generate(inputs_embeds=embeds, attention_mask=mask, **options))

    labels = torch.tensor([[-100, -100, 20, 30, 40]])
    logits = decoder(inputs_embeds=embeds[1:, -5:]).logits
    expected = F.cross_entropy(logits[0, :-1], labels[0, 1:])
    torch.testing.assert_close(model(inputs_embeds=embeds[1:, -5:], labels=labels).loss, expected)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_keep_every_bit(models, tmp_path, name):
    model = copy.deepcopy(models[name])
    with torch.no_grad():
        for parameter in model.get_model().mm_projector.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    ours, theirs = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (model, again))
    assert ours.keys() == theirs.keys() and model.state_dict().keys() == again.state_dict().keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    ids = torch.tensor([[5, IMG, 6, 7, 8]])
    assert torch.equal(again(ids, images=pictures(1)).logits, model(ids, images=pictures(1)).logits)


@pytest.mark.parametrize("name", NAMES)
def test_visual_tokens_enter_the_layers_with_the_texts_mean_norm(models, name):
    """What `embed_tokens` returns is measured; what the decoder then does to it, it does to visual tokens too."""
    model = models[name]
    entered = []

    def keep(layer, args, kwargs):
        entered.append((args[0] if args else kwargs["hidden_states"])[0])

    hook = model.get_model().layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    vocabulary = torch.arange(SIZES["vocab_size"])
    with torch.no_grad():
        model(vocabulary[None])
        model(torch.tensor([[5, IMG]]), images=pictures(1))
    hook.remove()
    text, (_, *visual) = entered[0].norm(dim=-1), entered[1].norm(dim=-1)
    assert text[text > 0].mean().item() == pytest.approx(torch.stack(visual).mean().item(), rel=1e-3)


LONG = {"rope_type": "longrope", "rope_theta": 5e5, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ROPES = {
    "Gemma3": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
    "Phi3": LONG | {"original_max_position_embeddings": 32, "partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, lambda module: module.to("cpu", torch.float16)])
@pytest.mark.parametrize("name", NAMES)
def test_a_cast_to_16_bits_leaves_rotary_frequencies_in_fp32(models, name, cast):
    expected = rotary_frequencies(models[name])
    for part in (lambda model: model, lambda model: model.get_model()):
        model = copy.deepcopy(models[name])
        assert {p.itemsize for p in cast(part(model)).parameters()} == {2}
        found = rotary_frequencies(model)
        assert found.keys() == expected.keys() and expected
        assert all(found[n].dtype is torch.float32 and torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", ROPES)
def test_rotary_embeddings_of_every_kind_survive_plain_and_llava_configs(tmp_path, name):
    family = next(family for family in DECODERS if family.name == name)
    options = {key: value for key, value in CASES[name].items() if key != "partial_rotary_factor"}
    family.config(**SIZES, **options | {"pad_token_id": 0}, rope_parameters=ROPES[name]).save_pretrained(tmp_path)
    for _ in range(2):
        config = read_config(str(tmp_path))
        assert type(config) is LLAVA_CLASSES[family.model_type].config
        for kind, expected in ROPES[name].items():
            found = config.rope_parameters[kind]
            assert expected.items() <= found.items() if isinstance(expected, dict) else expected == found
        config.save_pretrained(tmp_path)


# --- attention --------------------------------------------------------------------------------------------------------


def windowed(query, key, value, lengths, window):
    """Attention with an explicit mask over all pairs of tokens."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sample))
    seen = (sample[:, None] == sample) & (position <= position[:, None]) & (position[:, None] - position < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **groups):
    """PyTorch's [T, H, C], for the CPU; from 2.12 on it wants to be told of fewer key heads than query heads."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16 and cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32 and max_q == max_k == cu_seq_q.diff().max()
    assert groups in ({}, {"enable_gqa": query.shape[1] != key.shape[1]}) and window_size[1] == 0
    heads = (x.transpose(0, 1)[None].float() for x in (query, key, value))
    window = window_size[0] + 1 or len(query)
    return windowed(*heads, cu_seq_q.diff().tolist(), window)[0]


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("names_groups", [False, True])
def test_varlen_of_every_release_gets_one_half_precision_and_key_heads_as_they_are(
    monkeypatch, names_groups, window, heads
):
    """Under autocast rotary positions are fp32, and so are queries and keys; the values are not."""
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "NAMES_GROUPS", names_groups)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 12, 8).bfloat16() for n in (4, heads, heads))
    boundaries = torch.tensor([0, 3, 12], dtype=torch.int32)
    options = {"cu_seq_lens_q": boundaries, "max_length_q": 9, "sliding_window": window}
    ours, _ = varlen_attention(None, query.float(), key.float(), value, None, **options)
    exact = windowed(query.double(), key.double(), value.double(), [3, 9], window or 12)
    torch.testing.assert_close(ours, exact, rtol=2e-2, atol=2e-2, check_dtype=False)


@pytest.mark.parametrize("backend", [SEGMENTS, VARLEN])
def test_what_a_packed_backend_does_not_know_is_refused_by_name(backend):
    x = torch.randn(1, 2, 4, 8)
    function = {SEGMENTS: segments_attention, VARLEN: varlen_attention}[backend]
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4}
    packed = {"segment_lengths": [4]} if backend == SEGMENTS else boundaries
    with pytest.raises(ValueError, match=rf"--attn_implementation {backend}: .* asks for softcap, s_aux, which"):
        function(None, x, x, x, None, softcap=30.0, s_aux=torch.zeros(2), use_cache=False, **packed)
    module = torch.nn.Module()
    module.is_causal = False
    with pytest.raises(ValueError, match="Module asks for is_causal=False"):
        function(module, x, x, x, None, **packed)


@pytest.mark.parametrize(
    "field",
    [
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"mm_use_im_start_end": True},
        {"image_orientation": "exif"},
    ],
)
def test_a_config_that_asks_for_what_is_not_computed_is_refused_by_name(field):
    config = LLAVA_CLASSES["llava_gemma3"].config(**SIZES, **CASES["Gemma3"] | field)
    (name,) = field
    with pytest.raises(ValueError, match=rf"config.{name}=.*llava_gemma3"):
        LLAVA_CLASSES["llava_gemma3"].causal_lm(config)


# --- accounting -------------------------------------------------------------------------------------------------------


@no_rotary_product
@pytest.mark.parametrize("name", NAMES)
def test_counted_operations_equal_pytorchs_counter(models, name):
    """With and without a window."""
    model = copy.deepcopy(models[name]).train().requires_grad_(True)
    assert_counted_operations_equal_pytorchs_counter(model, collated([[5, IMG, *range(6, 40), IMG, 41]]))


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_a_window_are_counted_as_their_attention_has_it(models, monkeypatch, name):
    model = copy.deepcopy(models[name]).train().requires_grad_(True)
    model.padding_free, model.config._attn_implementation = True, SEGMENTS
    windows = []
    monkeypatch.setattr("llava.model.attention._window_mask", lambda length, window, device: windows.append(window))
    model(**batch(SAMPLES[:1]))
    assert attention_windows(model.config) == windows


@pytest.mark.parametrize("window", [1, 3, 100])
def test_pairs_in_a_window_are_counted_one_by_one(window):
    lengths = [7, 2]
    expected = sum(q - k < window for length in lengths for q in range(length) for k in range(q + 1))
    assert batch_work(collated([[5, IMG, 6, 7], [8, 9]]), [window])[1] == expected


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_layers_activations_are_about_what_autograd_keeps(models, tmp_path, name, trained):
    model, tokens = copy.deepcopy(models[name]).train().requires_grad_(trained), 64
    model.config._attn_implementation = SEGMENTS
    estimate = estimate_memory(model, training_arguments(tmp_path), tokens)
    assert estimate.layer == pytest.approx(kept_by_one_layer(model, tokens, False), rel=0.1)
