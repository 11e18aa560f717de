"""Labels are right by the characters they cover, whatever is said, and equal upstream's where that is asked for."""

import json
import unicodedata
from functools import cache

import pytest
import torch
from data_files import turns
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import GOLDEN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from upstream_labels import CONVERSATIONS, DEVIATIONS

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.preprocess import generation_ids, preprocess
from llava.mm_utils import load_tokenizer
from llava.train.build import warn_of_split_markers

RUNS = json.loads((GOLDEN / "text/labels.json").read_text(encoding="utf-8"))
LLAMA_3_MARKERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@cache
def tokenizer(name):
    if name == "merging":
        return merging_tokenizer()
    loaded = load_tokenizer(str(GOLDEN / "train/inputs" / {"llama": "llama", "qwen": "qwen_untied"}[name]))
    if name == "qwen":
        loaded.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in LLAMA_3_MARKERS])
    return loaded


def merging_tokenizer():
    """Bytes, and one token for two newlines: header and answer may then share a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>"
    )


def pieces(sample, tok):
    """Runs of (`context` | `target` | `image`, text), without the spaces at their start: decoding may drop them."""
    runs = []
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        assert label in (IGNORE_INDEX, token)
        kind = "image" if token == IMAGE_TOKEN_INDEX else "context" if label == IGNORE_INDEX else "target"
        if not runs or runs[-1][0] != kind or kind == "image":
            runs.append((kind, []))
        runs[-1][1].append(token)
    texts = [(kind, "<image>" if kind == "image" else tok.decode(ids).lstrip(" ")) for kind, ids in runs]
    return [(kind, text) for kind, text in texts if text]


# --- upstream's labels ------------------------------------------------------------------------------------------------


def labelled_like_upstream(case, version, tok):
    """`pieces` of a recorded conversation with upstream's labels, or "error"."""
    record = CONVERSATIONS[case]
    try:
        sample = preprocess(
            record["conversations"], tok, version, label_masking="upstream", has_image="image" in record
        )
    except ValueError:
        return "error"
    if tok.bos_token_id is not None:
        assert sample.input_ids[0] == tok.bos_token_id
        sample = type(sample)(sample.input_ids[1:], sample.labels[1:])
    return pieces(sample, tok)


@pytest.mark.parametrize("run", RUNS, ids=[f"{run['upstream']}-{run['version']}" for run in RUNS])
def test_upstream_labels_equal_the_recorded_ones(run):
    tok = tokenizer(run["tokenizer"])
    differing = set()
    for case, recorded in run["rows"].items():
        expected = "error"
        if isinstance(recorded, list):
            expected = [(kind, text.lstrip(" ")) for kind, text in recorded if text.lstrip(" ")]
        if labelled_like_upstream(case, run["version"], tok) != expected:
            differing.add(case)
    assert differing == DEVIATIONS[run["upstream"], run["version"]]


def test_upstream_v1_learns_the_space_token_before_the_answer():
    # Cut off by "- 2" in upstream's arithmetic, it stays a target wherever it is a token of its own.
    sample = preprocess(turns("<image>\nHi", "图"), tokenizer("llama"), "v1", label_masking="upstream")
    first = sample.labels[sample.labels != IGNORE_INDEX][0]
    assert tokenizer("llama").convert_ids_to_tokens(int(first)) == "▁"


def test_upstream_keeps_the_labels_of_a_broken_sample_that_is_long_enough():
    tok = tokenizer("llama")
    conversation = turns("<image>\nHi", "Yes.", "Thanks")
    length = len(preprocess(turns("<image>\nHi", "Yes."), tok, "v1").input_ids)
    limit = tok.model_max_length
    try:
        for limit_tokens, learns in ((length + 1, False), (length, True)):
            tok.model_max_length = limit_tokens
            labels = preprocess(conversation, tok, "v1", label_masking="upstream").labels
            assert bool((labels != IGNORE_INDEX).any()) == learns
    finally:
        tok.model_max_length = limit


# --- the assistant's labels -------------------------------------------------------------------------------------------

FRAGMENTS = (
    "cat", "Dog", " ", "  ", "\n", "\n\n", ".", "!", ": ", "ASSISTANT:", " ASSISTANT: ", "USER: ", "[/INST] ", "###",
    "</s>", "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "assistant", "图片", "é", "😀", "\t", "1", "<image>",
    "<", "<unk>",
)  # fmt: skip
WORDS = st.lists(st.sampled_from(FRAGMENTS) | st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
TEXTS = WORDS.map("".join).filter(lambda text: unicodedata.is_normalized("NFC", text) and "▁" not in text)
SETTINGS = settings(derandomize=True, max_examples=60, deadline=None, database=None)
ENDS = {"v1": "</s>", "llama_2": " </s>", "llava_llama_3": "<|eot_id|>", "plain": "\n"}
COMBINATIONS = [
    ("v1", "llama"), ("llama_2", "llama"), ("llava_llama_3", "qwen"), ("qwen_1_5", "qwen"), ("chatml", "merging"),
    ("mpt", "qwen"),
]  # fmt: skip


def expected_targets(answers, version):
    end = ENDS.get(version, "<|im_end|>")
    answers = [answer.strip() if version == "llava_llama_3" else answer for answer in answers]
    runs = [piece.lstrip(" ") for answer in answers for piece in (answer + end).split("<image>")]
    return [run for run in runs if run]


def targets(sample, tok):
    return [text for kind, text in pieces(sample, tok) if kind == "target"]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), COMBINATIONS)
@SETTINGS
@given(texts=st.lists(TEXTS, min_size=2, max_size=5))
def test_exactly_the_assistants_text_and_end_token_are_learnt(version, name, texts):
    tok = tokenizer(name)
    conversation = turns(*texts)
    sample = preprocess(conversation, tok, version)
    assert targets(sample, tok) == expected_targets(texts[1::2], version)
    assert int((sample.input_ids == IMAGE_TOKEN_INDEX).sum()) == sum(text.count("<image>") for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), COMBINATIONS)
@SETTINGS
@given(texts=st.lists(TEXTS, min_size=2, max_size=4).filter(lambda texts: len(texts) % 2 == 0))
def test_learning_begins_where_generation_begins(version, name, texts):
    tok = tokenizer(name)
    prompt = generation_ids(turns(*texts[:-1]), tok, version)
    sample = preprocess(turns(*texts), tok, version)
    assert torch.equal(sample.input_ids[: len(prompt)], prompt)
    rest = sample.labels[len(prompt) :], sample.input_ids[len(prompt) :]
    learnt = rest[0] != IGNORE_INDEX
    after_end = 1 if version in ("qwen_1_5", "chatml") else 0  # the newline after <|im_end|>
    assert bool((learnt | (rest[1] == IMAGE_TOKEN_INDEX))[: len(learnt) - after_end].all())


@pytest.mark.parametrize("name", ["llama", "qwen"])
@SETTINGS
@given(question=TEXTS, answer=TEXTS)
def test_plain_learns_the_caption_and_its_newline(name, question, answer):
    tok = tokenizer(name)
    conversation = turns("<image>" + question, answer)
    sample = preprocess(conversation, tok, "plain")
    assert targets(sample, tok) == expected_targets([answer], "plain")
    prompt = generation_ids(conversation[:1], tok, "plain")
    assert torch.equal(sample.input_ids[: len(prompt)], prompt)
    assert set(prompt.tolist()) <= {tok.bos_token_id, IMAGE_TOKEN_INDEX}


def test_a_prompt_that_writes_its_bos_gets_only_one():
    tok = merging_tokenizer()
    tok.add_tokens([AddedToken(marker, special=True) for marker in LLAMA_3_MARKERS])
    tok.bos_token = "<|begin_of_text|>"
    ids = preprocess(turns("Hi", "Yes."), tok, "llava_llama_3").input_ids
    assert int((ids == tok.bos_token_id).sum()) == 1


# --- errors -----------------------------------------------------------------------------------------------------------

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}
SYSTEM = {"from": "system", "value": "Be terse."}


@pytest.mark.parametrize(
    ("conversation", "version", "message"),
    [
        ("Hi", "v1", "non-empty list of turns, found 'Hi'"),
        ([HUMAN, SYSTEM, GPT], "v1", "turn 1: a system turn must be the first"),
        ([HUMAN, HUMAN, GPT], "v1", "two 'human' turns in a row"),
        ([GPT, HUMAN, GPT], "llama_2", "the human to speak first"),
        ([HUMAN, GPT], "plain", "the plain template needs an image"),
    ],
)
def test_a_malformed_conversation_is_an_error_that_says_what_was_expected(conversation, version, message):
    with pytest.raises(ValueError, match=message):
        preprocess(conversation, tokenizer("llama"), version)


def test_a_template_whose_markers_the_tokenizer_splits_is_named(caplog):
    for version, name in (("llava_llama_3", "llama"), ("llava_llama_3", "qwen"), ("plain", "llama"), ("v1", "llama")):
        warn_of_split_markers(version, tokenizer(name))
    assert caplog.messages and all("--version llava_llama_3" in message for message in caplog.messages)
    assert sum("<|eot_id|>" in message for message in caplog.messages) == 1  # of llama alone
