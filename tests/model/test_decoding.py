"""What a checkpoint's generation_config.json says beside token ids reaches no training, no score and no export."""

import json
import shutil

import pytest
import torch
from tiny_models import make
from training import LORA, flags
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from llava.constants import IMAGE_TOKEN_INDEX
from llava.export.hf import export
from llava.mm_utils import load_tokenizer
from llava.model.builder import load_pretrained_model
from llava.model.decoding import evaluation_options, token_ids_alone
from llava.model.merge_lora import merge_lora
from llava.train.train import train

IDS = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
FILES = {
    "none": None,
    "Vicuna's": IDS | {"_from_model_config": True, "max_length": 4096, "temperature": 0.9, "repetition_penalty": 1.5},
    "beams": IDS | {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 9.0, "early_stopping": True},
    "forced": IDS | {"forced_bos_token_id": 66, "suppress_tokens": [*range(32, 200)], "return_dict_in_generate": True},
    "refused by the library": IDS | {"compile_config": {}, "early_stopping": "x", "pad_token_id": -1, "streamer": 1},
    "cut": '{"eos_token_id": ',
}


def with_file(source, folder, content):
    """A copy of a folder with this generation_config.json, a text or fields; None: without one."""
    shutil.copytree(source, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "generation_config.json").write_text(text)
    return folder


def written(folder):
    """The fields of its generation_config.json but for the library's version."""
    fields = json.loads((folder / "generation_config.json").read_text())
    return {name: value for name, value in fields.items() if name != "transformers_version"}


@pytest.fixture(scope="module")
def expected(repetitive):
    """Its greedy answer."""
    answer = answer_of(load_pretrained_model(str(repetitive), None, "llava", device="cpu")[1])
    assert set(answer) <= {101, 102} and len(answer) == 8
    return answer


@pytest.fixture(scope="module")
def repetitive(tiny, tmp_path_factory):
    """A checkpoint that says 101 and 102 over and over, unless something is in the way, and then 103 and 104."""
    folder, model = tmp_path_factory.mktemp("repetitive") / "model", make(tiny)
    tokenizer = load_tokenizer(str(tiny / "llama"))
    model.resize_token_embeddings(len(tokenizer))
    torch.nn.init.zeros_(model.lm_head.weight)
    with torch.no_grad():  # the logits come from one of the states, of either sign
        model.lm_head.weight[101:105, 0] = torch.tensor([1.0, -1.0, 0.9, -0.9])
    model.config.mm_conv_version, model.config.image_aspect_ratio = "chatml_direct", "pad"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.get_vision_tower().default_image_processor().save_pretrained(folder)
    return folder


def answer_of(model):
    """The greedy answer to a picture and some tokens."""
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[5, 101, IMAGE_TOKEN_INDEX, 102, 8]])
    return model.generate(ids, images=images, **evaluation_options(8))[0].tolist()


def exported_answer(model):
    """The same from an exported folder, by transformers' own defaults but for the length."""
    image = [model.config.image_token_id] * model.config.image_seq_length
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    prompt = torch.tensor([[5, 101, *image, 102, 8]])
    return model.generate(input_ids=prompt, pixel_values=images, max_new_tokens=8)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name", FILES)
def test_greedy_answers_here_and_in_the_export_do_not_depend_on_the_file(repetitive, expected, tmp_path, name):
    ours = with_file(repetitive, tmp_path / "ours", FILES[name])
    assert answer_of(load_pretrained_model(str(ours), None, "llava", device="cpu")[1]) == expected
    assert answer_of(AutoModelForCausalLM.from_pretrained(ours)) == expected  # as lm-eval loads it
    export(str(ours), tmp_path / "hf")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    assert exported_answer(theirs) == expected
    assert written(tmp_path / "hf").keys() == IDS.keys()


def test_every_end_that_the_file_lists_ends_an_answer(repetitive, expected, tmp_path):
    last = expected[-1]
    ours = with_file(repetitive, tmp_path / "ours", IDS | {"eos_token_id": [257, last], "repetition_penalty": 1.5})
    export(str(ours), tmp_path / "hf")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    until = expected[: expected.index(last) + 1]
    assert answer_of(load_pretrained_model(str(ours), None, "llava", device="cpu")[1]) == until
    assert exported_answer(theirs) == until


def test_what_is_trained_or_merged_has_the_bases_token_ids_alone(tiny, tmp_path):
    base = with_file(tiny / "llama", tmp_path / "base", FILES["Vicuna's"])
    train(flags(tiny, tmp_path / "run", 2, model=base, max_steps=1, save_strategy="steps", save_steps=1))
    train(flags(tiny, tmp_path / "lora", 2, model=base, max_steps=1, **LORA))
    model = load_pretrained_model(str(tmp_path / "lora"), None, "llava", device="cpu")[1]
    assert not model.file_decoding
    merge_lora(str(tmp_path / "lora"), None, str(tmp_path / "merged"))
    for folder in ("run", "run/checkpoint-1", "merged"):
        assert written(tmp_path / folder) == IDS


def test_ids_that_the_file_lacks_come_from_the_config_and_negative_ones_are_none():
    config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    ids = token_ids_alone({"eos_token_id": [2, 3], "pad_token_id": -1, "repetition_penalty": 2.0}, config)
    assert ids == GenerationConfig(bos_token_id=1, eos_token_id=[2, 3])
