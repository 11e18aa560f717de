"""What lmms-eval and VLMEvalKit import and call; `test_evaluate.py` has stock lmms-eval scoring a checkpoint."""

import importlib.util
import json

import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM
from PIL import Image
from tiny_models import byte_tokenizer, make

from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.conversation import conv_templates
from llava.mm_utils import KeywordsStoppingCriteria, get_model_name_from_path, process_images, tokenizer_image_token
from llava.model.builder import load_pretrained_model

IMPORTS = {
    "llava": "LlavaLlamaForCausalLM",
    "llava.constants": "IGNORE_INDEX IMAGE_TOKEN_INDEX DEFAULT_IMAGE_TOKEN DEFAULT_IM_START_TOKEN DEFAULT_IM_END_TOKEN "
    "IMAGE_PLACEHOLDER DEFAULT_IMAGE_PATCH_TOKEN",
    "llava.conversation": "conv_templates default_conversation SeparatorStyle Conversation",
    "llava.eval.m4c_evaluator": "EvalAIAnswerProcessor TextVQAAccuracyEvaluator",
    "llava.mm_utils": "get_model_name_from_path process_images tokenizer_image_token KeywordsStoppingCriteria "
    "expand2square process_anyres_image load_image_from_base64",
    "llava.model": "LlavaLlamaForCausalLM LlavaMistralForCausalLM LlavaQwenForCausalLM",
    "llava.model.builder": "load_pretrained_model",
    "llava.utils": "disable_torch_init rank0_print rank_print",
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
    model = load_pretrained_model(path, None, "x", customized_config=str(tmp_path / "edited.json"))[1]
    assert model.config.image_aspect_ratio == "pad"
    model.tie_weights()
    assert tokenizer.eos_token_id is not None and tokenizer.padding_side == "right"


# --- generate and forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["tensor", "list"])
def test_lmms_evals_call_answers_right_with_half_precision_images_and_padding(loaded, images):
    _, model, image_processor, _ = loaded
    colours = ["red", "blue", "green", "yellow"]
    pixels = process_images([picture(colour) for colour in colours], image_processor, model.config).half()
    assert len(QUESTIONS[0]) != len(QUESTIONS[1])
    arguments = pixels if images == "tensor" else list(pixels)
    assert as_lmms_eval(loaded, QUESTIONS * 2, colours, images=arguments) == expected(colours)


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


def test_vlmevalkits_calls_answer_right(loaded):
    tokenizer, model, image_processor, _ = loaded
    pixels = torch.stack([image_processor.preprocess(picture("blue"), return_tensors="pt")["pixel_values"][0].half()])
    ids = tokenizer_image_token(prompt(f"<image>\n{QUESTIONS[0]}{POPE_SUFFIX}"), tokenizer, return_tensors="pt")[None]
    stop = [KeywordsStoppingCriteria(["<|im_end|>"], tokenizer, ids)]
    new = model.generate(ids, images=pixels, do_sample=False, temperature=0, max_new_tokens=512, stopping_criteria=stop)
    assert tokenizer.batch_decode(new, skip_special_tokens=True)[0] == "No"


# --- the stock harnesses on prompts that training would cut -----------------------------------------------------------

harnesses = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("lmms_eval", "lm_eval")),
    reason="the harnesses are not installed: EXTRAS=eval bash scripts/setup.sh",
)
CUT, CONTEXT = 60, 512
TEXTS = ["Short?", "Which of these letters is it, and why not another of them?", "A question that is long." * 6]


@pytest.fixture(scope="module")
def cutting(tiny, tmp_path_factory):
    """A checkpoint that was trained on samples cut to `CUT` tokens."""
    folder = tmp_path_factory.mktemp("cutting")
    model = make(tiny, "qwen")
    model.config.tokenizer_model_max_length, model.config.mm_conv_version = CUT, "qwen_1_5"
    model.save_pretrained(folder)
    model.get_vision_tower().default_image_processor().save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = CUT  # as training leaves it
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def log_chances(model, ids: list[int], images: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [S, C] of what follows each of `ids`, from decoder and head alone."""
    embeddings = model.get_model().embed_tokens(torch.tensor(ids).clamp(min=0))
    place = ids.index(IMAGE_TOKEN_INDEX)
    embeddings = torch.cat([embeddings[:place], model.encode_images(images)[0], embeddings[place + 1 :]])
    hidden_states = model.get_model()(inputs_embeds=embeddings[None], use_cache=False).last_hidden_state
    return model.lm_head(hidden_states[0]).float().log_softmax(-1)


@harnesses
@pytest.mark.slow
def test_stock_lmms_eval_scores_with_the_whole_prompt(cutting):
    from lmms_eval.api.instance import Instance
    from lmms_eval.models.simple.llava import Llava

    harness = Llava(pretrained=str(cutting), device="cpu", device_map="auto", conv_template="qwen_1_5", batch_size=3)
    assert harness.max_length == harness.tokenizer.model_max_length == CONTEXT
    model, tokenizer, shown = harness.model, harness.tokenizer, [picture("red")]
    harness.task_dict = {"task": {"test": dict.fromkeys(range(len(TEXTS)), shown)}}
    place = ("task", "test")
    meta = {"task": "task", "doc_id": 0, "repeats": 1}
    pixels = process_images(shown, harness._image_processor, model.config).half()
    prompts = [prompt(f"<image>\n{text}") for text in TEXTS]
    ids = [tokenizer_image_token(text, tokenizer) for text in prompts]

    scored = [(text, "Yes", lambda doc: doc, index, *place) for index, text in enumerate(TEXTS)]
    likelihoods = harness.loglikelihood([Instance("loglikelihood", arguments, 0, meta) for arguments in scored])
    answer = tokenizer("Yes<|im_end|>\n", add_special_tokens=False)["input_ids"]
    chances = [log_chances(model, context + answer, pixels)[-len(answer) - 1 : -1] for context in ids]
    expected = [-chance[range(len(answer)), answer].mean().item() for chance in chances]
    assert [loss for loss, _ in likelihoods] == pytest.approx(expected, abs=1e-4)
