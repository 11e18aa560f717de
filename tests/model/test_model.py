"""Towers, splicing, loss, generation and checkpoints of both model classes."""

import json
import shutil

import pytest
import torch
from batches import IMG, pictures
from tiny_models import V, make
from transformers import AutoModelForCausalLM, AutoTokenizer
from vision_language_models import our_checkpoint

from llava.constants import IGNORE_INDEX
from llava.model import LlavaLlamaConfig
from llava.model.builder import load_pretrained_model, read_config
from llava.model.context import context_length
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.multimodal_projector.adapter import adapter_state_dict, load_adapter
from llava.model.pictures import match_images
from llava.train.build import training_tokenizer


@pytest.fixture(scope="module")
def model(tiny):
    return make(tiny)


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
    ],
)
def test_wrong_number_of_images_names_the_sample(images, placeholders, message):
    with pytest.raises(ValueError, match=message):
        match_images(images, placeholders)


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


def test_without_norm_keys_are_llavas(tiny):
    assert set(make(tiny, norm="none").get_model().mm_projector.state_dict()) == {
        "0.weight", "0.bias", "2.weight", "2.bias"
    }  # fmt: skip
    linear = make(tiny, norm="none", mm_projector_type="linear").get_model().mm_projector
    assert set(linear.state_dict()) == {"weight", "bias"}


def test_resized_embeddings_keep_the_heads_loss_and_its_scaling(tiny):
    model, ids = make(tiny), torch.arange(5, 12)[None]
    model.lm_head.logits_scaling = 8.0
    before = model(input_ids=ids, labels=ids)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    after = model(input_ids=ids, labels=ids)
    assert torch.equal(after.logits[..., : before.logits.shape[-1]], before.logits)
    assert after.loss > before.loss and model.lm_head.out_features == model.config.vocab_size == len(
        model.lm_head.weight
    )


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


@pytest.mark.parametrize("call", ["forward", "generate", "labelled"])
def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(tiny, call):
    model = make(tiny)
    model.config.max_position_embeddings = 16
    too_long, fits = torch.full((2, 14), 5), torch.full((1, 16), 5)
    mask, too_long[1, 2] = torch.ones_like(too_long), IMG
    mask[0, 3:] = 0
    run, options = (model.generate if call == "generate" else model), {"max_new_tokens": 3, "pad_token_id": 0}
    options = options if call == "generate" else {"labels": too_long} if call == "labelled" else {}
    with pytest.raises(ValueError, match=r"sample 1 of the batch has 17 tokens .*the model takes 16 "):
        run(input_ids=too_long, attention_mask=mask, images=pictures(1), **options)
    if call == "generate":
        run(input_ids=fits, attention_mask=torch.ones_like(fits), **options)  # an answer may end beyond the context


LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": LLAMA_3 | {"factor": 8.0, "original_max_position_embeddings": 1024}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 8000}, 8000),
    ],
)
def test_the_context_has_the_rope_scaling_that_its_config_leaves_out(fields, expected):
    assert context_length(LlavaLlamaConfig(max_position_embeddings=2048, **fields)) == expected


def test_checkpoint_without_projector_weights_is_refused(tiny, tmp_path):
    model = make(tiny)
    state = {k: v for k, v in model.state_dict().items() if "mm_projector.3" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"weights lack model\.mm_projector\.3\.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("norm", [None, "rmsnorm"])
def test_weights_with_a_norm_that_the_config_drops_are_refused(tiny, tmp_path, norm):
    make(tiny).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"mm_projector_norm": norm}
    (tmp_path / "config.json").write_text(json.dumps(config))
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


def test_an_adapter_of_another_layer_than_its_bases_is_refused(tiny, tmp_path):
    base, model = our_checkpoint(tiny, tmp_path / "base", "gwc_layernorm"), make(tiny)
    model.config.mm_vision_select_layer = -1
    model.config.save_pretrained(tmp_path / "stage1")
    torch.save(adapter_state_dict(model.get_model().mm_projector), tmp_path / "stage1/mm_projector.bin")
    with pytest.raises(ValueError, match="another base:\n  mm_vision_select_layer: -1, its base -2"):
        load_pretrained_model(str(tmp_path / "stage1"), base, "x", device="cpu")


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


def prompt_dependent(tiny):
    """A model whose next token depends on its whole prompt, unlike that of the untrained ones."""
    model = make(tiny)
    with torch.no_grad():
        model.get_model().embed_tokens.weight.div_(5)
        for layer in model.get_model().layers:
            layer.self_attn.v_proj.weight.mul_(20)
            layer.self_attn.o_proj.weight.mul_(20)
    return model


@pytest.mark.numeric
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


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_saved_config_tells_older_releases_the_rotary_embedding(tmp_path, rope):
    rope |= {"rope_theta": 5e5}
    LlavaLlamaConfig(rope_parameters=rope).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 5e5
    assert written.get("rope_scaling", {}).get("factor") == rope.get("factor")
    again = read_config(str(tmp_path)).rope_parameters
    assert {key: again[key] for key in rope} == rope
