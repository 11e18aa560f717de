"""The chat template of an exported folder gives the ids of training and asking, for every conversation template."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import GOLDEN
from tiny_models import byte_tokenizer

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import SeparatorStyle, conv_templates
from llava.data.messages import as_record
from llava.data.preprocess import generation_ids, preprocess
from llava.data.turns import image_first
from llava.export.chat_template import chat_template
from llava.export.hf import add_image_token
from llava.mm_utils import load_tokenizer

TOKENIZERS = {
    "bytes": byte_tokenizer,
    "sentencepiece": lambda: load_tokenizer(str(GOLDEN / "train/inputs/llama")),
    "qwen": lambda: load_tokenizer(str(GOLDEN / "train/inputs/qwen_untied")),
}
TEMPLATES = [name for name, template in conv_templates.items() if template.sep_style is not SeparatorStyle.PLAIN]
STYLES = {conv_templates[name].sep_style: name for name in TEMPLATES}
PAIRS = [(kind, name) for name in STYLES.values() for kind in TOKENIZERS]


@pytest.fixture(params=TOKENIZERS)
def tokenizers(request):
    """Two tokenizers of the same kind, the second with `<image>` as a token."""
    plain, extended = TOKENIZERS[request.param](), TOKENIZERS[request.param]()
    add_image_token(extended)
    return plain, extended


def ids_of(messages, tokenizer, **options):
    """Ids of what the template writes, tokenised as `LlavaProcessor` and the tokenizer's own method do."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    starts = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = tokenizer(text, add_special_tokens=not starts)["input_ids"]
    assert tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options) == ids
    image = tokenizer.convert_tokens_to_ids("<image>")
    return [IMAGE_TOKEN_INDEX if token == image else token for token in ids]


TEXT = st.text("aB \n", max_size=4)
PART = st.one_of(TEXT.map(lambda text: {"type": "text", "text": text}), st.just({"type": "image"}))
PARTS = st.lists(PART, max_size=5)
ANSWER = st.text("aB \n", max_size=4).map(lambda text: "A" + text)
"""Its first character never joins the header's last ones to one token, where training begins a new one."""


@st.composite
def chats(draw):
    """Messages whose questions are texts or parts, and whose last message is an answer."""
    chat = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(st.one_of(TEXT, PARTS))})
        chat.append({"role": "assistant", "content": draw(ANSWER)})
    return chat


@pytest.mark.slow
@pytest.mark.parametrize(("tokenizers", "name"), PAIRS, indirect=["tokenizers"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=chats(), first=st.booleans())
def test_messages_are_written_as_the_records_that_training_makes_of_them(tokenizers, name, messages, first):
    plain, extended = tokenizers
    template = conv_templates[name]
    extended.chat_template = chat_template(template, extended, image_first=first)
    if template.sep_style is SeparatorStyle.GEMMA:
        messages = [message for message in messages if message["role"] != "system"]
    turns = as_record({"messages": messages})["conversations"]
    if first:
        turns = [turn | {"value": image_first(turn["value"])} for turn in turns]
    expected = preprocess(turns, plain, template)
    assert ids_of(messages, extended) == expected.input_ids.tolist()
    encoding = extended.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert [bool(mark) for mark in encoding["assistant_masks"]] == (expected.labels != IGNORE_INDEX).tolist()
    expected = generation_ids(turns[:-1], plain, template).tolist()
    assert ids_of(messages[:-1], extended, add_generation_prompt=True) == expected
