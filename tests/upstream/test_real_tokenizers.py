"""Stock tokenizers give upstream's ids and labels, or their own chat template's; npm has them, a cache keeps them."""

import gzip
import json
from functools import cache

import pytest
import torch
from data_files import turns
from paths import GOLDEN
from upstream_labels import CONVERSATIONS, DEVIATIONS

from benchmarks.common import npm_tokenizer
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.dataset import DataCollatorForSupervisedDataset
from llava.data.preprocess import generation_ids, preprocess
from llava.mm_utils import load_tokenizer

RUNS = json.loads(gzip.decompress((GOLDEN / "text/ids.json.gz").read_bytes()))


@cache
def loaded(name: str):
    """The tokenizer, or why there is none."""
    try:
        return load_tokenizer(str(npm_tokenizer(name)), model_max_length=512)
    except RuntimeError as error:
        return str(error)


def tokenizer(name: str):
    if isinstance(tok := loaded(name), str):
        pytest.skip(tok)
    return tok


@pytest.mark.parametrize("run", RUNS, ids=[f"{run['version']}-{run['tokenizer']}" for run in RUNS])
def test_ids_and_labels_equal_upstreams(run):
    tok, limit = tokenizer(run["tokenizer"]), run["model_max_length"]
    differing = set()
    for case, expected in run["rows"].items():
        record = CONVERSATIONS[case]
        try:
            sample = preprocess(
                record["conversations"], tok, run["version"], label_masking="upstream", has_image="image" in record
            )
            ours = [sample.input_ids[:limit].tolist(), sample.labels[:limit].tolist()]
        except ValueError:
            ours = "error"
        if expected != "error":
            ids, labels = expected
            # An image is never learnt; upstream's label there is overwritten when it is spliced in.
            labels = [IGNORE_INDEX if i == IMAGE_TOKEN_INDEX else label for i, label in zip(ids, labels, strict=True)]
            expected = [ids[:limit], labels[:limit]]
        if ours != expected:
            differing.add(case)
    assert differing == DEVIATIONS["next", run["version"]]


STOCK = [("qwen2_5", "qwen_2_5"), ("qwen3", "qwen_3")]
ROUNDS = ["Which colour has the sky?", "Blue. 蓝色!\n", "  And the\n\ngrass", "Green."]


def chat(texts, system=None):
    """The conversation as chat templates take it, and as LLaVA's records write it."""
    roles = [("user", "human"), ("assistant", "gpt")]
    messages = [(*roles[index % 2], text) for index, text in enumerate(texts)]
    messages = ([("system", "system", system)] if system else []) + messages
    return (
        [{"role": role, "content": text} for role, _, text in messages],
        [{"from": speaker, "value": text} for _, speaker, text in messages],
    )


@pytest.mark.slow
@pytest.mark.parametrize("system", [None, "Be terse."])
@pytest.mark.parametrize(("name", "version"), STOCK)
def test_ids_equal_those_of_the_stock_chat_template(name, version, system):
    tok = tokenizer(name)

    def stock(messages, **options):
        text = tok.apply_chat_template(messages, tokenize=False, enable_thinking=False, **options)
        return tok(text, add_special_tokens=False)["input_ids"]

    for rounds in (2, 4):
        messages, record = chat(ROUNDS[:rounds], system)
        assert preprocess(record, tok, version).input_ids.tolist() == stock(messages)
    for rounds in (1, 3):
        messages, record = chat(ROUNDS[:rounds], system)
        assert generation_ids(record, tok, version).tolist() == stock(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "version", "end"),
    [
        ("qwen2_5", "qwen_1_5", "<|im_end|>"),
        ("llama3_2", "llava_llama_3", "<|eot_id|>"),
        ("qwen3", "qwen_3", "<|im_end|>"),
    ],
)
def test_exactly_the_answers_and_their_end_token_are_learnt(name, version, end):
    tok = tokenizer(name)
    sample = preprocess(turns("<image>\nHi!", "A cat! 图片", "Sure?", "Yes.\n\nQuite."), tok, version)
    assert tok.decode(sample.labels[sample.labels != IGNORE_INDEX]) == f"A cat! 图片{end}Yes.\n\nQuite.{end}"


def test_an_exclamation_mark_is_never_taken_for_padding():
    tok = tokenizer("llama3_2")
    assert tok.pad_token_id is None and tok.convert_tokens_to_ids("!") == 0
    answers = ("!", "Hello there, you!")
    samples = [preprocess(turns("Say it!", answer), tok, "llava_llama_3")._asdict() for answer in answers]
    batch = DataCollatorForSupervisedDataset(tok.eos_token_id)(samples)
    rows = (batch[name] for name in ("input_ids", "labels", "attention_mask"))
    for sample, ids, labels, mask in zip(samples, *rows, strict=True):
        assert torch.equal(ids[mask], sample["input_ids"]) and torch.equal(labels[mask], sample["labels"])
        assert 0 in labels[mask]
