"""Tiny models, tokenizer and data that every test shares; all of them are made on the spot from fixed seeds."""

import functools
import json
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION_SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2} | {
    "image_size": 16,
    "patch_size": 8,
}
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus ChatML's two markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with `llama`, `qwen`, `qwen_tied` (with tokenizers), `siglip`, `clip`, and `data/` (records, images)."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def write_tiny(root):
    """What the fixture `tiny` gives, in `root`."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    language_models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, **special, tie_word_embeddings=False)),
        "qwen": Qwen2ForCausalLM(Qwen2Config(**SIZES, **special, tie_word_embeddings=False)),
        "qwen_tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, **special, tie_word_embeddings=True)),
    }
    for name, model in language_models.items():
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(5)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    SiglipVisionModel(SiglipVisionConfig(**VISION_SIZES)).save_pretrained(root / "siglip")
    SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(root / "siglip")
    CLIPVisionModel(CLIPVisionConfig(**VISION_SIZES)).save_pretrained(root / "clip")
    write_data(root / "data")
    return root


def write_data(folder, num_records: int = 24) -> None:
    """Coloured squares with questions; every third record is text only."""
    (folder / "images").mkdir(parents=True)
    captions, questions = [], []
    for index in range(num_records):
        colour = list(COLOURS)[index % len(COLOURS)]
        image = Image.new("RGB", (20, 16), "white")
        ImageDraw.Draw(image).rectangle((4, 4, 12, 12), fill=COLOURS[colour])
        image.save(folder / "images" / f"{index}.png")
        captions.append(
            {
                "id": f"c{index}",
                "image": f"{index}.png",
                "conversations": [
                    {"from": "human", "value": "<image>\nSay what it is."},
                    {"from": "gpt", "value": f"a {colour} square"},
                ],
            }
        )
        question = {
            "id": f"q{index}",
            "image": f"{index}.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhich colour?"},
                {"from": "gpt", "value": colour + "!" * (index % 5)},
            ],
        }
        if index % 3 == 2:
            del question["image"]
            question["conversations"][0]["value"] = f"Spell {colour}."
        questions.append(question)
    (folder / "pretrain.json").write_text(json.dumps(captions))
    (folder / "finetune.json").write_text(json.dumps(questions))


QUESTIONS = ["Is there a warm colour?", "Is there a warm colour in the image?"]
WARM = ("red", "yellow")
POPE_SUFFIX = "\nAnswer the question using a single word or phrase."  # what lmms-eval's task writes after a question


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory):
    """A function from a norm's name to a checkpoint folder that tells warm colours (Yes) from cold ones (No).

    Trained by the real entry point on one-coloured `<colour>.png` in `tiny/data/images` and `QUESTIONS`, plain and with
    `POPE_SUFFIX`.
    """
    from test_train import flags

    from llava.train.train import train

    records = []
    for colour, value in COLOURS.items():
        Image.new("RGB", (20, 16), value).save(tiny / f"data/images/{colour}.png")
        answer = {"from": "gpt", "value": "Yes" if colour in WARM else "No"}
        for question in QUESTIONS:
            turns = [{"from": "human", "value": f"<image>\n{question}{POPE_SUFFIX}"}, answer]
            records.append({"id": f"{colour} {question}", "image": f"{colour}.png", "conversations": turns})
    (tiny / "data/colours.json").write_text(json.dumps(records))
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train_with(norm):
        options = {"version": "qwen_1_5", "data_path": tiny / "data/colours.json", "per_device_train_batch_size": 8}
        options |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_steps": 40, "telemetry_steps": 100}
        train(flags(tiny, folder / norm, 2, norm=norm, **options))
        return folder / norm

    return train_with


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()
