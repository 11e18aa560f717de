"""Pixels equal upstream's, or are right where upstream's are not; prompts become the ids that checkpoints know."""

import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
import torch
from data_files import encoded, noise
from paths import GOLDEN
from PIL import Image
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.constants import IMAGE_TOKEN_INDEX
from llava.mm_utils import (
    KeywordsStoppingCriteria,
    load_tokenizer,
    process_images,
    save_tokenizer,
    to_rgb,
    tokenizer_image_token,
)

LEVELS = np.load(GOLDEN / "images/levels.npz")
PROCESSORS = {
    "clip": CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    "siglip": SiglipImageProcessorPil(size={"height": 32, "width": 32}),
}
PROMPTS = [
    "<image>", "<image>\nDescribe.", "Describe.\n<image>", "a <image> b <image> c", "<image><image>", "no image", "",
    " ", "<image> ", "  <image>  x", "\n<image>\n",
    "A chat. USER: <image>\nHi ASSISTANT:", "图<image>像 😀", "text<image>",
]  # fmt: skip


GRIDS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]


def config(mode):
    return SimpleNamespace(image_aspect_ratio=mode, image_grid_pinpoints=GRIDS)


def levels(pixels, processor):
    """Grey levels 0 to 255, [3, H, W], before normalisation."""
    std, mean = (torch.tensor(values).view(3, 1, 1) for values in (processor.image_std, processor.image_mean))
    return ((pixels * std + mean) * 255).numpy()


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow before 13 resizes to other pixels")
@pytest.mark.parametrize("key", LEVELS.files)
def test_pixels_equal_those_of_upstreams_dataset(key):
    name, mode, file = key.split("/")
    processor = PROCESSORS[name]
    pixels = process_images([Image.open(GOLDEN / "images/png" / f"{file}.png")], processor, config(mode))
    assert pixels.shape == (1, *LEVELS[key].shape) and pixels.dtype == torch.float32
    assert np.abs(levels(pixels[0], processor) - LEVELS[key]).max() <= 1.01


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_modes_of_8_bits_become_the_rgb_of_pillow(mode):
    image = noise("RGB").convert("L").convert("1") if mode == "1" else noise("RGB").convert(mode)
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_16_bit_grey_of_every_format_is_scaled_by_its_full_range(kind):
    levels = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    image = Image.open(io.BytesIO(encoded(Image.fromarray(levels), kind)))
    ours = np.asarray(to_rgb(image)).astype(float)
    assert np.abs(ours - levels[..., None] / 257).max() <= 1.01


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_equal_sentencepiece_chunk_by_chunk(prompt):
    folder = GOLDEN / "train/inputs/llama"
    pieces = SentencePieceProcessor(str(folder / "tokenizer.model"))
    expected = [pieces.bos_id()]
    for index, chunk in enumerate(prompt.split("<image>")):
        expected += ([IMAGE_TOKEN_INDEX] if index else []) + pieces.encode(chunk)
    assert tokenizer_image_token(prompt, load_tokenizer(str(folder))) == expected


def test_a_bos_that_the_prompt_writes_is_not_doubled():
    tokenizer = load_tokenizer(str(GOLDEN / "train/inputs/llama"))
    assert tokenizer_image_token("<s>Hi", tokenizer).count(tokenizer.bos_token_id) == 1


def test_merges_follow_the_scores_of_the_sentencepiece_file(tmp_path):
    shutil.copytree(GOLDEN / "train/inputs/llama", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    for piece in model.pieces[259:300]:  # common pairs get the worst scores, as runs of spaces have in Llama-2's file
        piece.score = -1e9
    path.write_bytes(model.SerializeToString())
    text = "sits beside the wooden table reading near water"
    expected = SentencePieceProcessor(str(path)).encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids[1:] != expected
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer(text).input_ids[1:] == expected
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"))(text).input_ids[1:] == expected


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_prompt", [True, False])
def test_generation_stops_at_a_keyword_that_was_generated(with_prompt):
    tokenizer = load_tokenizer(str(GOLDEN / "train/inputs/qwen_untied"))
    prompt = torch.tensor([tokenizer("USER: ### ").input_ids])
    stop = KeywordsStoppingCriteria(["###"], tokenizer, prompt)
    for text, expected in (("A cat.", False), ("A cat.###", True), ("A ## cat #", False), ("", False)):
        generated = torch.tensor([tokenizer(text).input_ids], dtype=torch.long)
        output = torch.cat([prompt, generated], dim=1) if with_prompt else generated
        assert stop(output, None).tolist() == [expected]
        several = KeywordsStoppingCriteria(["###"], tokenizer, prompt.repeat(2, 1))
        assert several(output.repeat(4, 1), None).tolist() == [expected] * 4  # two beams of each prompt


def test_saved_tokenizer_is_the_same_for_older_releases(tmp_path):
    """They read the SentencePiece file, and take `legacy` for true if the config does not mention it."""
    source = GOLDEN / "train/inputs/llama"
    tokenizer = load_tokenizer(str(source))
    for folder in (tmp_path / "first", tmp_path / "second"):
        save_tokenizer(tokenizer, folder)
        assert (folder / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
        assert json.loads((folder / "tokenizer_config.json").read_text())["legacy"] is False
        again = load_tokenizer(str(folder))
        text = "USER: hi  there ASSISTANT: a cat</s>USER: "
        assert again(text).input_ids == tokenizer(text).input_ids
        tokenizer = again


@pytest.mark.parametrize("size", [(91, 37), (16, 16), (1, 40), (40, 1), (300, 200)])
@pytest.mark.parametrize("name", ["siglip", "clip", "odd"])
def test_pixels_are_bit_for_bit_the_processors(name, size):
    processor = {
        "siglip": SiglipImageProcessorPil(size={"height": 16, "width": 24}),
        "clip": CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 16, "width": 16}),
        "odd": SiglipImageProcessorPil(
            size={"height": 8, "width": 8}, resample=2, do_rescale=False, image_mean=[1, 2, 3], image_std=[0.3, 0.5, 7]
        ),
    }[name]
    levels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(levels)
    expected = processor.preprocess(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    pixels = process_images([image], processor, None)
    assert pixels.dtype == expected.dtype and torch.equal(pixels, expected)
