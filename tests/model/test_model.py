"""Towers, splicing, loss, generation and checkpoints of both model classes."""

import copy
import json
import shutil

import pytest
import torch
from batches import BATCHES, IMG, pictures
from pairwise import pairwise
from tiny_models import SIZES, V, make
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from llava.constants import IGNORE_INDEX
from llava.model import LlavaLlamaConfig
from llava.model.builder import load_language_model, load_pretrained_model, read_config
from llava.model.context import context_length
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.multimodal_projector.adapter import adapter_state_dict, load_adapter
from llava.model.pictures import match_images
from llava.train.arguments import ModelArguments
from llava.train.build import training_tokenizer


@pytest.fixture(scope="module")
def model(tiny):
    return make(tiny)


def spliced_by_hand(model, ids: list[int], labels: list[int], images: torch.Tensor, limit: int | None = None):
    """The embeddings of one sample, spliced piece by piece."""
    embeds, targets, images = [], [], iter(images)
    for token, label in zip(ids, labels, strict=True):
        if token == IMG:
            embeds.append(model.encode_images(next(images)[None])[0])
            targets += [IGNORE_INDEX] * V
        else:
            embeds.append(model.get_model().embed_tokens(torch.tensor([token])))
            targets.append(label)
    return torch.cat(embeds)[:limit], torch.tensor(targets)[:limit]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [None, 6])
def test_splicing_equals_piece_by_piece(model, name, side, limit):
    samples = BATCHES[name]
    longest = max(map(len, samples))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in samples])
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in samples])
    labels = ids.clone()
    counts = [s.count(IMG) for s in samples]
    images = pictures(sum(counts))
    model = copy.copy(model)
    model.training = True  # inference cuts nothing
    model.config.tokenizer_padding_side, model.config.tokenizer_model_max_length = side, limit
    _, positions, new_mask, _, embeds, new_labels = model.prepare_inputs_labels_for_multimodal(
        ids, torch.zeros_like(ids), mask, None, labels, images
    )
    parts = iter(images.split(counts))
    for row, sample in enumerate(samples):
        expected, targets = spliced_by_hand(model, sample, sample, next(parts), limit)
        here = new_mask[row].bool()
        torch.testing.assert_close(embeds[row][here], expected)
        assert torch.equal(new_labels[row][here], targets)
        assert torch.equal(positions[row][here], torch.arange(len(expected)))
        assert not embeds[row][~here].any() and (new_labels[row][~here] == IGNORE_INDEX).all()
        assert here[-1 if side == "left" else 0]


def test_a_real_token_with_the_padding_id_is_kept(model):
    """The mask decides what is padding, never the id."""
    model.config.tokenizer_padding_side, model.config.tokenizer_model_max_length = "right", None
    ids = torch.tensor([[0, 5, 0]])
    *_, embeds, _ = model.prepare_inputs_labels_for_multimodal(ids, None, torch.ones_like(ids), None, None, None)
    assert embeds.shape[1] == 3


def test_images_may_come_as_tensor_list_or_per_sample():
    four = pictures(4)
    expected = four[[0, 1, 3]]
    assert torch.equal(match_images(four[[0, 1, 3]], [1, 1, 1]), expected)
    assert torch.equal(match_images(list(four[[0, 1, 3]]), [2, 0, 1]), expected)
    assert torch.equal(match_images(four, [2, 0, 1]), expected)  # upstream: one unused image per text-only sample
    assert torch.equal(match_images([four[:2], four[2:3], four[3:]], [2, 0, 1]), expected)
    assert torch.equal(match_images([list(four[:2]), [], [four[3]]], [2, 0, 1]), expected)
    single = [image[None] for image in four[[0, 1, 3]]]  # as LLaVA-NeXT's collator and harnesses pass them
    assert torch.equal(match_images(single, [2, 0, 1]), expected)
    assert torch.equal(match_images([image[None] for image in four], [2, 0, 1]), expected)
    assert match_images(None, [0, 0]) is None
    assert match_images(four[:2], [0, 0]) is None


@pytest.mark.parametrize(
    ("images", "placeholders", "message"),
    [
        (pictures(1), [1, 1], "2 image placeholders.*1 images; sample 1 is the first without"),
        (pictures(4), [1, 1], "2 image placeholders.*4 images; some are left over"),
        ([pictures(2), pictures(1)], [1, 1], "sample 0 of the batch has 1 image placeholders but 2 images"),
        ([pictures(1), pictures(1), pictures(1)], [1, 1], "images for 3 samples.*the batch has 2"),
        (None, [0, 1], "1 image placeholders.*0 images; sample 1 is the first without"),
    ],
)
def test_wrong_number_of_images_names_the_sample(images, placeholders, message):
    with pytest.raises(ValueError, match=message):
        match_images(images, placeholders)


def test_loss_equals_cross_entropy_over_all_logits(model):
    ids = torch.tensor([[5, IMG, 6, 7, 8], [9, 10, 11, 12, 13]])
    labels = torch.tensor([[-100, -100, -100, 7, 8], [-100, -100, 11, 12, 13]])
    mask = torch.ones_like(ids)
    out = model(input_ids=ids, labels=labels, attention_mask=mask, images=pictures(1))
    _, _, _, _, _, spliced = model.prepare_inputs_labels_for_multimodal(ids, None, mask, None, labels, pictures(1))
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), spliced[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(out.loss, expected)
    model.train()
    try:
        trained = model(
            input_ids=ids, labels=labels, attention_mask=mask, images=pictures(1), num_items_in_batch=torch.tensor(50)
        )
    finally:
        model.eval()
    assert trained.logits is None
    torch.testing.assert_close(trained.loss, expected * 5 / 50)


def test_batch_without_targets_has_zero_loss_and_zero_gradients(tiny):
    model = make(tiny).train()
    ids = torch.tensor([[5, IMG, 6]])
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), images=pictures(1)).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_batch_without_images_runs_tower_and_projector_with_zero_weight(tiny):
    """Otherwise a rank without images would leave the others waiting."""
    model = make(tiny).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with_gradient = [n for n, p in model.named_parameters() if p.grad is not None and "mm_projector" in n]
    assert len(with_gradient) == 6
    assert all(not p.grad.any() for n, p in model.named_parameters() if "mm_projector" in n)
    tower = model.get_vision_tower()
    unused = {id(p) for p in tower.unused_parameters()}
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters() if id(p) not in unused)
    torch.testing.assert_close(loss, model.eval()(input_ids=ids, labels=ids).loss)


def test_frozen_tower_records_no_graph(tiny):
    model = make(tiny).train()
    model.get_vision_tower().requires_grad_(False)
    assert not model.get_vision_tower()(pictures(1)).requires_grad
    assert model.encode_images(pictures(1)).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["siglip", "clip"])
@pytest.mark.parametrize("select_layer", [-1, -2, -4, 0, 2])
def test_tower_returns_the_selected_hidden_state(tiny, tower, select_layer):
    model = make(tiny, tower=tower, mm_vision_select_layer=select_layer)
    ours = model.get_vision_tower()
    full = type(ours).model_class.from_pretrained(tiny / tower).eval()
    with torch.no_grad():
        states = full(pictures(2), output_hidden_states=True).hidden_states
        expected = states[select_layer]
        if tower == "clip":
            expected = expected[:, 1:]
        torch.testing.assert_close(ours(pictures(2)), expected)
    assert ours.num_tokens == V == expected.shape[1]


def test_clip_class_token_is_kept_on_request(tiny):
    model = make(tiny, tower="clip", mm_vision_select_feature="cls_patch")
    assert model.get_vision_tower()(pictures(1)).shape[1] == V + 1 == model.get_vision_tower().num_tokens


def test_tower_type_comes_from_the_config_not_from_the_path(tiny, tmp_path):
    disguised = tmp_path / "openai-clip-vit"
    disguised.symlink_to(tiny / "siglip")
    model = load_language_model(str(tiny / "llama"))
    model.get_model().initialize_vision_modules(
        ModelArguments(model_name_or_path="", vision_tower=str(disguised), mm_projector_norm="none")
    )
    assert type(model.get_vision_tower()).__name__ == "SiglipVisionTower"


def test_siglip_drops_its_last_layer_and_clip_keeps_it(tiny):
    siglip, clip = make(tiny).get_vision_tower(), make(tiny, tower="clip").get_vision_tower()
    assert len(siglip.vision_model.encoder.layers) == 2
    assert len(clip.vision_model.encoder.layers) == 3
    assert any(
        "encoder.layers.2" in n for n, p in clip.named_parameters() if id(p) in set(map(id, clip.unused_parameters()))
    )


@pytest.mark.parametrize(
    ("projector", "shapes"),
    [
        ("linear", {"0.weight": (32, 24), "1.weight": (32,)}),
        ("mlp2x_gelu", {"0.weight": (32, 24), "2.weight": (32, 32), "3.weight": (32,)}),
        ("mlp3x_gelu", {"0.weight": (32, 24), "2.weight": (32, 32), "4.weight": (32, 32), "5.weight": (32,)}),
    ],
)
def test_projector_types_end_in_the_norm(tiny, projector, shapes):
    state = make(tiny, mm_projector_type=projector).get_model().mm_projector.state_dict()
    assert {k: tuple(v.shape) for k, v in state.items() if k.endswith("weight")} == shapes


def test_without_norm_keys_are_llavas(tiny):
    assert set(make(tiny, norm="none").get_model().mm_projector.state_dict()) == {
        "0.weight", "0.bias", "2.weight", "2.bias"
    }  # fmt: skip
    linear = make(tiny, norm="none", mm_projector_type="linear").get_model().mm_projector
    assert set(linear.state_dict()) == {"weight", "bias"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language_model", "tower", "norm"),
    pairwise(("llama", "qwen", "qwen_tied"), ("siglip", "clip"), ("none", "gwc_layernorm", "rmsnorm", "clip")),
)
def test_save_and_load_keep_every_bit(tiny, tmp_path, language_model, tower, norm):
    model = make(tiny, language_model, tower, norm)
    with torch.no_grad():
        for parameter in model.get_model().mm_projector.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.tensor([[5, IMG, 6]])
    assert torch.equal(again(ids, images=pictures(1)).logits, model(ids, images=pictures(1)).logits)


def test_generate_returns_new_tokens_only_and_ignores_padding(model):
    model.config.tokenizer_padding_side, model.config.tokenizer_model_max_length = "right", None
    short, long = torch.tensor([[5, IMG, 6]]), torch.tensor([[7, 8, IMG, 9, 10, 11]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    alone = [
        model.generate(ids, images=image, image_sizes=[(16, 16)], **options)
        for ids, image in ((short, pictures(2)[:1]), (long, pictures(2)[1:]))
    ]
    assert all(tokens.shape[1] <= 5 for tokens in alone)
    batch = torch.zeros(2, 6, dtype=torch.long)
    mask = torch.zeros_like(batch)
    batch[0, :3], mask[0, :3], batch[1], mask[1] = short[0], 1, long[0], 1
    together = model.generate(batch, attention_mask=mask, images=list(pictures(2)), **options)
    for row, tokens in enumerate(alone):
        assert torch.equal(together[row, : tokens.shape[1]], tokens[0])


@pytest.mark.parametrize("labelled", [False, True])
def test_inference_cuts_nothing(model, labelled):
    model.config.tokenizer_padding_side = "right"
    ids, image = torch.tensor([[5, IMG, 6, 7, 8, 9, 10, 11]]), pictures(1)
    results = []
    for limit in (None, 6):
        model.config.tokenizer_model_max_length = limit
        outputs = model(ids, images=image, labels=ids.where(ids > 8, IGNORE_INDEX) if labelled else None)
        assert outputs.logits.shape[1] == ids.shape[1] + V - 1
        results.append(
            outputs.loss if labelled else model.generate(ids, images=image, max_new_tokens=4, pad_token_id=0)
        )
    model.config.tokenizer_model_max_length = None
    assert torch.equal(*results)


@pytest.mark.parametrize("has_tower", [True, False])
@pytest.mark.parametrize("call", ["forward", "generate", "labelled"])
def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(tiny, has_tower, call):
    model = make(tiny) if has_tower else load_language_model(str(tiny / "llama")).eval()
    model.config.max_position_embeddings = 16
    too_long, fits = torch.full((2, 17 - 3 * has_tower), 5), torch.full((1, 16), 5)
    mask, images = torch.ones_like(too_long), pictures(1) if has_tower else None
    mask[0, 3:] = 0
    if has_tower:
        too_long[1, 2] = IMG
    options = {"labels": too_long} if call == "labelled" else {}
    run = model.generate if call == "generate" else model
    with pytest.raises(ValueError, match=r"sample 1 of the batch has 17 tokens .*the model takes 16 "):
        run(input_ids=too_long, attention_mask=mask, images=images, **options)
    answer = {"max_new_tokens": 3, "pad_token_id": 0} if call == "generate" else {}
    run(input_ids=fits, attention_mask=torch.ones_like(fits), **answer)  # an answer may end beyond the context


LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": LLAMA_3 | {"factor": 8.0, "original_max_position_embeddings": 1024}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 8000}, 8000),
    ],
)
def test_the_context_has_the_rope_scaling_that_its_config_leaves_out(fields, expected):
    assert context_length(LlavaLlamaConfig(max_position_embeddings=2048, **fields)) == expected


def test_one_rope_for_each_kind_of_layer_scales_no_context():
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    kinds |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert context_length(Gemma3TextConfig(max_position_embeddings=4096, rope_parameters=kinds)) == 4096


def test_generate_equals_greedy_decoding_by_hand(model):
    ids, image = torch.tensor([[5, IMG, 6]]), pictures(1)
    new = model.generate(ids, images=image, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    sequence = ids
    for step in range(4):
        token = model(sequence, images=image).logits[:, -1].argmax(-1, keepdim=True)
        assert token == new[0, step]
        sequence = torch.cat([sequence, token], dim=1)


def prompt_dependent(tiny):
    """A model whose next token depends on its whole prompt, unlike that of the untrained ones."""
    model = make(tiny)
    with torch.no_grad():
        model.get_model().embed_tokens.weight.div_(5)
        for layer in model.get_model().layers:
            layer.self_attn.v_proj.weight.mul_(20)
            layer.self_attn.o_proj.weight.mul_(20)
    return model


@pytest.mark.parametrize("use_cache", [True, False])
def test_every_token_of_an_answer_sees_the_whole_prompt(tiny, use_cache):
    model = prompt_dependent(tiny)
    batch = torch.tensor([[5, IMG, 6, 9, 0, 0], [7, 8, IMG, 9, 10, 11]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    new = model.generate(batch, attention_mask=mask, images=pictures(2), use_cache=use_cache, **options)
    for row, (ids, image) in enumerate(((batch[:1, :4], pictures(2)[:1]), (batch[1:], pictures(2)[1:]))):
        for token in new[row]:
            assert token == model(ids, images=image).logits[0, -1].argmax()
            ids = torch.cat([ids, token[None, None]], dim=1)
        assert model(ids[:, -3:-1]).logits[0, -1].argmax() != ids[0, -1]  # the prompt matters


def test_a_later_token_is_computed_from_the_cache(model):
    ids, image = torch.tensor([[5, IMG, 6, 7]]), pictures(1)
    first = model(ids[:, :3], images=image, use_cache=True)
    second = model(ids[:, 3:], past_key_values=first.past_key_values)
    assert first.past_key_values.get_seq_length() == ids.shape[1] + V - 1
    torch.testing.assert_close(second.logits[:, -1], model(ids, images=image).logits[:, -1])


def test_arguments_of_the_library_reach_the_decoder(model):
    ids, image = torch.tensor([[5, IMG, 6]]), pictures(1)
    known = {"num_items_in_batch": torch.tensor(2), "output_hidden_states": True, "return_dict": True}
    assert len(model(ids, images=image, **known).hidden_states) == SIZES["num_hidden_layers"] + 1


def test_text_only_model_generates_and_refuses_images(tiny):
    model = load_language_model(str(tiny / "llama")).eval()
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, pad_token_id=0).shape[1] <= 3
    with pytest.raises(ValueError, match="without a vision tower"):
        model(torch.tensor([[5, IMG]]), images=pictures(1))


def test_checkpoint_without_tower_weights_takes_them_from_the_named_tower(tiny, tmp_path):
    """The layout of the first LLaVA-1.5 checkpoints."""
    model = make(tiny, tower="clip", norm="none")
    state = {k: v for k, v in model.state_dict().items() if "vision_tower" not in k}
    del model.config.mm_vision_config
    model.save_pretrained(tmp_path, state_dict=state)
    _, again, image_processor, _ = load_pretrained_model_without_tokenizer(tmp_path, tiny)
    expected = model.state_dict()
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)
    assert image_processor.crop_size["height"] == 16


def load_pretrained_model_without_tokenizer(folder, tiny):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / "llama" / name).read_bytes())
    return load_pretrained_model(str(folder), None, "llava-v1.5", device_map="auto", device="cpu")


def test_checkpoint_without_projector_weights_is_refused(tiny, tmp_path):
    model = make(tiny)
    state = {k: v for k, v in model.state_dict().items() if "mm_projector.3" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"weights lack model\.mm_projector\.3\.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("norm", [None, "none", "rmsnorm"])
def test_weights_with_a_norm_that_the_config_drops_are_refused(tiny, tmp_path, norm):
    make(tiny).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mm_projector_norm"]
    (tmp_path / "config.json").write_text(json.dumps(config | ({} if norm is None else {"mm_projector_norm": norm})))
    with pytest.raises(ValueError, match=r"does not announce .*model\.mm_projector\.3\.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_refused_wherever_it_is_read(tiny, tmp_path, value):
    model = make(tiny)
    with torch.no_grad():
        model.get_model().mm_projector[3].weight[5] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"NaN or infinity in model\.mm_projector\.3\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.save(adapter_state_dict(model.get_model().mm_projector), tmp_path / "mm_projector.bin")
    with pytest.raises(ValueError, match=r"mm_projector\.bin: NaN or infinity in model\.mm_projector\.3\.weight"):
        load_adapter(make(tiny).get_model().mm_projector, tmp_path, model.config)


@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_a_processor_of_another_size_than_the_towers_is_refused(tiny, tmp_path, kind):
    folder, tower = shutil.copytree(tiny / kind, tmp_path / "tower"), make(tiny, tower=kind).get_vision_tower()
    file = folder / "preprocessor_config.json"
    tower.default_image_processor().save_pretrained(folder)
    load_image_processor(str(folder), tower)
    size = {"height": 24, "width": 24}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": size, "crop_size": size}))
    with pytest.raises(ValueError, match=r"tower: its image processor makes 24 x 24 pixels.*tower takes 16 x 16"):
        load_image_processor(str(folder), tower)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tiny, tmp_path):
    folder = shutil.copytree(tiny / "llama", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<loc{number}>" for number in range(100)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"--model_name_or_path .*base: the tokenizer has ids up to 357 .* 320 rows"):
        training_tokenizer(str(folder), 512, None)
    assert training_tokenizer(str(tiny / "llama"), 512, None).pad_token_id == 257


def test_plain_language_model_keeps_its_logits_and_rope(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(**SIZES, rope_parameters=rope | {"original_max_position_embeddings": 64})
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    ids = torch.arange(100)[None]
    assert torch.equal(load_language_model(str(tmp_path)).eval()(ids).logits, plain(ids).logits)


def test_unknown_model_type_names_the_known_ones(tiny, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="model_type 'bert'; expected one of llama"):
        read_config(str(tmp_path))


def test_image_processor_defaults_to_the_towers_size(tiny):
    tower = make(tiny, tower="clip").get_vision_tower()
    processor = load_image_processor(str(tiny / "clip"), tower)
    assert processor.crop_size["height"] == 16


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    ],
)
def test_saved_config_tells_older_releases_the_rotary_embedding(tmp_path, rope):
    LlavaLlamaConfig(rope_parameters=rope).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 5e5
    assert written.get("rope_scaling", {}).get("factor") == rope.get("factor")
    again = read_config(str(tmp_path)).rope_parameters
    assert {key: again[key] for key in rope} == rope
