"""The log-probability of expected answers: batched passes against a float64 computation of each answer alone."""

import math

import pytest
import torch
from data_files import COLOURS
from PIL import Image
from tiny_models import V, make
from transformers import AutoTokenizer
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.asking import Assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.conversation import get_template

ANSWERS = ("Red", "A long answer", "B")
SIZES = ((20, 16), (16, 16), (9, 30))


@pytest.fixture
def assistant(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    processor = SiglipImageProcessorPil.from_pretrained(tiny / "siglip")
    model = make(tiny).double()
    return Assistant("tiny", tokenizer, model, processor, get_template("qwen_1_5"))


def conversation(answer, question="<image>\nWhat is it?"):
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def pictures():
    values = list(COLOURS.values())
    return [Image.new("RGB", size, value) for size, value in zip(SIZES, values, strict=False)]


def one_alone(assistant, turns, picture):
    """log p of the answer, from embeddings put in place by hand and a log-softmax over all logits."""
    model, decoder = assistant.model, assistant.model.get_model()
    prompt = assistant.prompt_ids(turns[:1], [picture] if picture else []).tolist()
    answer = assistant.tokenizer(turns[1]["value"] + assistant.end)["input_ids"]
    rows = []
    for token in prompt + answer:
        if token == IMAGE_TOKEN_INDEX:
            pixels = assistant.image_processor(picture.resize((16, 16)), return_tensors="pt")["pixel_values"].double()
            rows.append(decoder.mm_projector(decoder.vision_tower(pixels))[0])
        else:
            rows.append(decoder.embed_tokens(torch.tensor([token])))
    embeds = torch.cat(rows)[None]
    logits = model(inputs_embeds=embeds).logits[0, -len(answer) - 1 : -1]
    assert embeds.shape[1] == len(prompt) + len(answer) + (V - 1) * (picture is not None)
    return logits.log_softmax(-1)[range(len(answer)), answer].sum().item()


@torch.no_grad()
def test_a_batch_gives_each_answers_log_probability_in_float64(assistant):
    conversations = [conversation(answer) for answer in ANSWERS]
    assistant.model.config.image_aspect_ratio = "square"
    batched = assistant.log_probabilities(conversations, pictures())
    alone = [one_alone(assistant, *pair) for pair in zip(conversations, pictures(), strict=True)]
    assert batched == pytest.approx(alone, rel=1e-6)  # the loss is summed in float32
    assert all(math.isfinite(value) and value < 0 for value in batched) and len(set(batched)) == 3
    assert assistant.log_probabilities(conversations[:1], pictures()[:1]) == pytest.approx(batched[:1], rel=1e-6)


@torch.no_grad()
def test_a_question_without_its_picture_has_a_log_probability(assistant):
    turns = conversation("Red", "What is it?")
    assert assistant.log_probabilities([turns], []) == pytest.approx([one_alone(assistant, turns, None)], rel=1e-6)


def test_more_than_one_answer_and_lost_values_are_refused(assistant):
    with pytest.raises(ValueError, match="expected one answer, at the end"):
        assistant.log_probabilities([conversation("a") + conversation("b", "And?")], pictures()[:1])
    with torch.no_grad():
        assistant.model.lm_head.weight[:] = math.nan
    with pytest.raises(ValueError, match="an answer's loss is not finite"):
        assistant.log_probabilities([conversation("a")], pictures()[:1])
