"""What lmms-eval and VLMEvalKit import and call; `test_evaluate.py` has stock lmms-eval scoring a checkpoint."""

import copy
import importlib
import json
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM
from PIL import Image
from training import run
from transformers.utils import logging as transformers_logging

from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.conversation import SeparatorStyle, conv_templates
from llava.mm_utils import KeywordsStoppingCriteria, get_model_name_from_path, process_images, tokenizer_image_token
from llava.model.builder import load_pretrained_model, read_config

IMPORTS = {
    "llava.constants": "IGNORE_INDEX IMAGE_TOKEN_INDEX DEFAULT_IMAGE_TOKEN DEFAULT_IM_START_TOKEN DEFAULT_IM_END_TOKEN",
    "llava.conversation": "conv_templates SeparatorStyle Conversation",
    "llava.mm_utils": "get_model_name_from_path process_images tokenizer_image_token KeywordsStoppingCriteria "
    "expand2square process_anyres_image",
    "llava.model.builder": "load_pretrained_model",
}
GREEDY = {"do_sample": False, "temperature": 0, "num_beams": 1, "max_new_tokens": 8, "use_cache": True}


@pytest.fixture(scope="module")
def loaded(trained):
    """The trained checkpoint, loaded as lmms-eval does: (tokenizer, model, image_processor, context_len)."""
    path = str(trained("gwc_layernorm"))
    return load_pretrained_model(
        path, None, get_model_name_from_path(path), device_map="auto", multimodal=True, attn_implementation="sdpa"
    )


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (20, 16), COLOURS[colour])


def prompt(text: str, template: str = "qwen_1_5") -> str:
    conversation = conv_templates[template].copy()
    conversation.append_message(conversation.roles[0], text)
    conversation.append_message(conversation.roles[1], None)
    return conversation.get_prompt()


def as_lmms_eval(loaded, questions, colours, **options):
    """Answers by lmms-eval's call, which masks whatever equals the padding id."""
    tokenizer, model, image_processor, _ = loaded
    images = process_images([picture(colour) for colour in colours], image_processor, model.config)
    prompts = [prompt(f"{DEFAULT_IMAGE_TOKEN}\n{question}{POPE_SUFFIX}") for question in questions]
    ids = [tokenizer_image_token(text, tokenizer, IMAGE_TOKEN_INDEX, return_tensors="pt") for text in prompts]
    pad = tokenizer.pad_token_id
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
    calls = {
        "attention_mask": input_ids.ne(pad),
        "pad_token_id": pad,
        "images": images.to(dtype=torch.float16),
        "image_sizes": [(20, 16)] * len(colours),
        "top_p": 1.0,
    }
    return tokenizer.batch_decode(model.generate(input_ids, **GREEDY | calls | options), skip_special_tokens=True)


def expected(colours) -> list[str]:
    return ["Yes" if colour in WARM else "No" for colour in colours]


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", IMPORTS)
def test_every_name_that_clients_import_exists(module):
    missing = [name for name in IMPORTS[module].split() if not hasattr(importlib.import_module(module), name)]
    assert not missing


def test_conversations_are_edited_as_clients_edit_them():
    """`loglikelihood` writes the answer into the opened turn; VLMEvalKit takes the stop text by the style."""
    for name in ("vicuna_v1", "qwen_1_5", "llava_llama_3"):
        conversation = copy.deepcopy(conv_templates[name])
        conversation.append_message(conversation.roles[0], "Hi")
        conversation.append_message(conversation.roles[1], None)
        opened = conversation.get_prompt()
        conversation.messages[1][1] = "Yes"
        stop = conversation.sep if conversation.sep_style != SeparatorStyle.TWO else conversation.sep2
        assert conversation.get_prompt().startswith(opened) and stop in conversation.get_prompt()[len(opened) :]


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_argument_of_load_pretrained_model_is_taken(trained, tmp_path):
    path = str(trained("none"))
    options = {"device_map": "auto", "multimodal": True, "attn_implementation": "eager", "device": "cpu"}
    options |= {"load_8bit": False, "load_4bit": False, "overwrite_config": {"image_aspect_ratio": "square"}}
    tokenizer, model, image_processor, context_len = load_pretrained_model(path, None, "llava_qwen", **options)
    assert model.config.image_aspect_ratio == "square" and model.config._attn_implementation == "eager"
    assert context_len == 512 and not model.training and image_processor is not None
    edited = json.loads((trained("none") / "config.json").read_text()) | {"image_aspect_ratio": "pad"}
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    for config in (read_config(str(tmp_path / "edited.json")), str(tmp_path / "edited.json")):
        assert load_pretrained_model(path, None, "x", customized_config=config)[1].config.image_aspect_ratio == "pad"
    model.tie_weights()
    assert tokenizer.eos_token_id is not None and tokenizer.padding_side == "right"


@pytest.mark.slow
def test_vlmevalkits_ways_of_loading_give_the_same_model(trained, loaded):
    path = str(trained("gwc_layernorm"))
    for options in ({"device": "cpu", "device_map": "cpu"}, {"device_map": None}):
        _, model, _, _ = load_pretrained_model(model_path=path, model_base=None, model_name="llava", **options)
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in loaded[1].state_dict().items())


def test_every_config_that_training_writes_has_the_image_aspect_ratio(tiny, tmp_path):
    for stage in (1, 2):
        run(tiny, tmp_path / str(stage), stage, max_steps=1, save_strategy="steps", save_steps=1)
    configs = sorted(tmp_path.rglob("config.json"))
    assert len(configs) == 4
    assert all(json.loads(path.read_text())["image_aspect_ratio"] for path in configs)


# --- generate and forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["tensor", "list"])
def test_lmms_evals_call_answers_right_with_half_precision_images(loaded, images):
    _, model, image_processor, _ = loaded
    pixels = process_images([picture(colour) for colour in COLOURS], image_processor, model.config).half()
    questions = [QUESTIONS[0]] * len(COLOURS)
    given = pixels if images == "tensor" else list(pixels)
    assert as_lmms_eval(loaded, questions, COLOURS, images=given) == expected(COLOURS)


def test_a_batch_of_prompts_of_different_length_answers_as_one_by_one(loaded):
    assert len(QUESTIONS[0]) != len(QUESTIONS[1])
    colours = ["red", "blue", "green", "yellow"]
    assert as_lmms_eval(loaded, QUESTIONS * 2, colours) == expected(colours)


def test_a_mask_that_hides_the_prompts_own_end_tokens_changes_nothing(loaded):
    """lmms-eval's mask does, wherever the padding token is the end-of-turn token."""
    tokenizer, model, image_processor, _ = loaded
    text = prompt(f"{DEFAULT_IMAGE_TOKEN}\n{QUESTIONS[1]}")
    ids = tokenizer_image_token(text, tokenizer, return_tensors="pt")[None]
    mask = ids.ne(tokenizer.pad_token_id)
    assert not mask.all()
    padding = torch.full((1, 3), tokenizer.pad_token_id)
    options = {"images": process_images([picture("red")], image_processor, model.config), "max_new_tokens": 2}
    options |= {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    whole = model.generate(ids, **options)
    holed = model.generate(ids, attention_mask=mask, **options)
    padded = model.generate(
        torch.cat([ids, padding], 1), attention_mask=torch.cat([mask, padding.ne(padding)], 1), **options
    )
    for other in (holed, padded):
        assert all(torch.equal(a, b) for a, b in zip(whole.logits, other.logits, strict=True))


def test_text_only_prompts_take_images_none_and_modalities(loaded):
    tokenizer, model, _, _ = loaded
    ids = tokenizer_image_token(prompt("Spell red."), tokenizer, return_tensors="pt")[None]
    new = model.generate(ids, images=None, image_sizes=[], modalities=["image"], pad_token_id=0, **GREEDY, top_p=None)
    assert new.shape[0] == 1 and 1 <= new.shape[1] <= 8


def test_vlmevalkits_calls_answer_right(loaded):
    tokenizer, model, image_processor, _ = loaded
    pixels = torch.stack([image_processor.preprocess(picture("blue"), return_tensors="pt")["pixel_values"][0].half()])
    ids = tokenizer_image_token(prompt(f"<image>\n{QUESTIONS[0]}{POPE_SUFFIX}"), tokenizer, return_tensors="pt")[None]
    stop = [KeywordsStoppingCriteria(["<|im_end|>"], tokenizer, ids)]
    new = model.generate(ids, images=pixels, do_sample=False, temperature=0, max_new_tokens=512, stopping_criteria=stop)
    assert tokenizer.batch_decode(new, skip_special_tokens=True)[0] == "No"
    pixels = process_images([picture("red")], image_processor, SimpleNamespace(image_aspect_ratio="pad"))
    pixels = pixels.to("cpu", dtype=torch.float16)
    with torch.inference_mode():
        new = model.generate(ids, images=pixels, stopping_criteria=stop, **GREEDY, top_p=None)
    assert tokenizer.batch_decode(new, skip_special_tokens=True)[0].strip() == "Yes"


@pytest.mark.parametrize("top_p", [None, 0, 1.0])
def test_greedy_calls_with_sampling_options_are_quiet(loaded, top_p):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = transformers_logging.get_logger("transformers")
    transformers_logging.warning_once.cache_clear()  # a warning that another test saw would not come again
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            as_lmms_eval(loaded, QUESTIONS[:1], ["red"], top_p=top_p)
    finally:
        logger.removeHandler(handler)
    assert messages == []


def test_forward_scores_a_continuation_as_loglikelihood_does(loaded):
    tokenizer, model, image_processor, _ = loaded
    context = prompt(f"{DEFAULT_IMAGE_TOKEN}\n{QUESTIONS[0]}{POPE_SUFFIX}")
    skip = len(tokenizer_image_token(context, tokenizer))
    images = process_images([picture("red")], image_processor, model.config).half()
    losses = {}
    for answer in ("Yes", "No"):
        ids = tokenizer_image_token(context + answer, tokenizer, IMAGE_TOKEN_INDEX, return_tensors="pt")[None]
        labels = ids.clone()
        labels[0, :skip] = -100
        with torch.inference_mode():
            outputs = model(input_ids=ids, labels=labels, images=images, use_cache=True, image_sizes=[[20, 16]])
        logits = outputs["logits"][0, -len(answer) - 1 : -1]
        torch.testing.assert_close(outputs["loss"], torch.nn.functional.cross_entropy(logits, ids[0, skip:]))
        losses[answer] = float(outputs["loss"])
    assert losses["Yes"] < 0.2 < losses["No"]
