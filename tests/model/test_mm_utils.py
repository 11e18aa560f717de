"""Pixels equal upstream's, or are right where upstream's are not; prompts become the ids that checkpoints know."""

import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
import torch
from paths import GOLDEN
from PIL import Image
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.constants import IMAGE_TOKEN_INDEX
from llava.mm_utils import (
    KeywordsStoppingCriteria,
    expand2square,
    get_model_name_from_path,
    load_tokenizer,
    process_anyres_image,
    process_images,
    process_prompt_images,
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


def picture(name):
    return Image.open(GOLDEN / "images/png" / f"{name}.png")


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
    pixels = process_images([picture(file)], processor, config(mode))
    assert pixels.shape == (1, *LEVELS[key].shape) and pixels.dtype == torch.float32
    assert np.abs(levels(pixels[0], processor) - LEVELS[key]).max() <= 1.01


def test_several_pictures_of_a_prompt_are_padded_where_one_is_cropped():
    pictures, processor = [picture("rgb_200x31"), picture("rgb_40x80")], PROCESSORS["siglip"]
    alone = process_prompt_images(pictures[:1], processor, config("anyres_max_4"))
    assert [crops.shape[0] for crops in alone] == [1 + 3]
    together = process_prompt_images(pictures, processor, config("anyres_max_4"))
    assert torch.equal(torch.cat(together), process_images(pictures, processor, config("pad")))
    batch = process_images(pictures, processor, config("anyres"))  # as upstream's function
    assert [crops.shape[0] for crops in batch] == [1 + 3, 1 + 2]


def test_a_checkpoint_that_turns_pictures_turns_those_of_other_programs():
    exif = Image.Exif()
    exif[274] = 8
    picture("rgb_40x80").save(buffer := io.BytesIO(), "PNG", exif=exif)
    turned = config("pad")
    turned.image_orientation = "exif"
    expected = process_images([picture("rgb_40x80").transpose(Image.Transpose.ROTATE_90)], PROCESSORS["clip"], turned)
    assert torch.equal(process_images([Image.open(buffer)], PROCESSORS["clip"], turned), expected)
    assert not torch.equal(process_images([Image.open(buffer)], PROCESSORS["clip"], config("pad")), expected)


def test_sixteen_bit_grey_is_scaled_not_clipped():
    values = np.array(picture("i16_48x30")).astype(np.float64)
    converted = np.array(to_rgb(picture("i16_48x30")))
    assert np.abs(converted - (values / 65535 * 255)[..., None]).max() <= 0.51


@pytest.mark.parametrize("size", [(150, 3), (150, 1), (1, 1), (3, 3), (1, 40)])
def test_pictures_of_few_rows_are_resized_like_any_other(size):
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(values)
    pixels = process_images([image], PROCESSORS["siglip"], config("square"))[0]
    expected = np.array(image.resize((32, 32), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.abs(levels(pixels, PROCESSORS["siglip"]) - expected).max() <= 1.01


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I", "I;16", "YCbCr"])
def test_every_mode_becomes_rgb(mode):
    converted = to_rgb(Image.new(mode, (4, 3)))
    assert converted.mode == "RGB" and converted.size == (4, 3)


def test_a_palette_with_a_transparency_table_keeps_its_colours():
    image = Image.new("P", (2, 1), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.info["transparency"] = bytes([0, 255])
    assert to_rgb(image).getpixel((0, 0)) == (10, 200, 30)


def test_expand2square_centres_the_picture_on_the_background():
    square = np.array(expand2square(Image.new("RGB", (4, 2), (9, 8, 7)), (1, 2, 3)))
    assert square.shape == (4, 4, 3)
    assert (square[1:3] == (9, 8, 7)).all() and (square[[0, 3]] == (1, 2, 3)).all()
    same = Image.new("RGB", (3, 3))
    assert expand2square(same, (0, 0, 0)) is same


def test_a_config_may_lack_every_field_and_pictures_are_stacked():
    images = [picture("rgb_91x37"), picture("l_48x30")]
    assert process_images(images, PROCESSORS["clip"], SimpleNamespace()).shape == (2, 3, 32, 32)


def test_pixels_of_different_sizes_come_as_a_list():
    processor = CLIPImageProcessorPil(do_resize=False, do_center_crop=False)
    shapes = [
        tuple(image.shape) for image in process_images([picture("rgb_91x37"), picture("l_48x30")], processor, None)
    ]
    assert shapes == [(3, 37, 91), (3, 30, 48)]


def test_unknown_modes_say_what_is_known():
    images = [picture("rgb_1x1")]
    with pytest.raises(ValueError, match="'crop_split': expected 'square', 'pad', 'anyres', or 'anyres_max_N'"):
        process_images(images, PROCESSORS["clip"], config("crop_split"))
    with pytest.raises(ValueError, match="33 x 64 pixels cannot be cut into squares of the vision tower's 32"):
        process_anyres_image(images[0], PROCESSORS["clip"], [[33, 64]])
    with pytest.raises(ValueError, match="at least one picture"):
        process_images([], PROCESSORS["clip"], config("pad"))


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_equal_sentencepiece_chunk_by_chunk(prompt):
    folder = GOLDEN / "train/inputs/llama"
    pieces = SentencePieceProcessor(str(folder / "tokenizer.model"))
    expected = [pieces.bos_id()]
    for index, chunk in enumerate(prompt.split("<image>")):
        expected += ([IMAGE_TOKEN_INDEX] if index else []) + pieces.encode(chunk)
    assert tokenizer_image_token(prompt, load_tokenizer(str(folder))) == expected


def test_ids_of_a_tokenizer_without_bos_hold_only_the_text():
    tokenizer = load_tokenizer(str(GOLDEN / "train/inputs/qwen_untied"))
    ids = tokenizer_image_token("Hi <image>\nyou", tokenizer)
    place = ids.index(IMAGE_TOKEN_INDEX)
    assert tokenizer.decode(ids[:place]) == "Hi " and tokenizer.decode(ids[place + 1 :]) == "\nyou"


def test_ids_come_as_a_one_dimensional_tensor_on_request():
    tokenizer = load_tokenizer(str(GOLDEN / "train/inputs/llama"))
    ids = tokenizer_image_token("a<image>b", tokenizer, 7, return_tensors="pt")
    assert ids.dtype == torch.long and ids.ndim == 1
    assert ids.tolist() == tokenizer_image_token("a<image>b", tokenizer, image_token_index=7)
    with pytest.raises(ValueError, match="'np': expected None or 'pt'"):
        tokenizer_image_token("a", tokenizer, return_tensors="np")


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


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("liuhaotian/llava-v1.5-7b", "llava-v1.5-7b"),
        ("/a/llava-lora/checkpoint-100/", "llava-lora_checkpoint-100"),
        ("checkpoint-5", "checkpoint-5"),
        ("llava", "llava"),
    ],
)
def test_model_name_is_the_folders(path, name):
    assert get_model_name_from_path(path) == name


@pytest.mark.parametrize("with_prompt", [True, False])
def test_generation_stops_at_a_keyword_that_was_generated(with_prompt):
    tokenizer = load_tokenizer(str(GOLDEN / "train/inputs/qwen_untied"))
    prompt = torch.tensor([tokenizer("USER: ### ").input_ids])
    stop = KeywordsStoppingCriteria(["###"], tokenizer, prompt)
    for text, expected in (("A cat.", False), ("A cat.###", True), ("A ## cat #", False), ("", False)):
        generated = torch.tensor([tokenizer(text).input_ids], dtype=torch.long)
        output = torch.cat([prompt, generated], dim=1) if with_prompt else generated
        assert stop(output, None).tolist() == [expected]


def test_each_sequence_of_a_batch_stops_by_itself():
    tokenizer = load_tokenizer(str(GOLDEN / "train/inputs/qwen_untied"))
    rows = [tokenizer("aa#b").input_ids, tokenizer("aa<|im_end|>b").input_ids]
    width = min(map(len, rows))
    stop = KeywordsStoppingCriteria(["<|im_end|>"], tokenizer, torch.tensor([[IMAGE_TOKEN_INDEX, 5]]))
    done = stop(torch.tensor([row[:width] for row in rows]), None)
    assert done.dtype == torch.bool and done.tolist() == [False, True]


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


def test_a_reduced_decoding_would_give_other_pixels(tmp_path):
    """Why pictures are decoded in full."""
    levels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(levels).resize((512, 512), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg", quality=95)
    whole, reduced = Image.open(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg")
    reduced.draft("RGB", (128, 128))
    assert reduced.size == (128, 128)
    sizes = [np.asarray(image.resize((128, 128), Image.Resampling.BICUBIC)) for image in (whole, reduced)]
    assert not np.array_equal(*sizes)
