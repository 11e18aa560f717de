"""Colours and orientation equal Pillow's own where that reads them sensibly, and the true range where it does not."""

import io
import struct

import numpy as np
import pytest
from data_files import encoded, noise
from PIL import Image

from llava.utils.pixels import dark_levels, to_rgb, upright


def reopened(image: Image.Image, kind: str) -> Image.Image:
    return Image.open(io.BytesIO(encoded(image, kind)))


def grey_tiff(levels: bytes, bits: int, white: int) -> Image.Image:
    """A grey TIFF of 4 x 1 pixels, little-endian; `white` is 0 where 0 means white."""
    tags = [(256, 4), (257, 1), (258, bits), (259, 1), (262, white), (273, 8), (277, 1), (278, 1), (279, len(levels))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    levels = levels.ljust(8, b"\0")
    head = b"II*\0" + struct.pack("<I", 8 + len(levels))
    return Image.open(io.BytesIO(head + levels + struct.pack("<H", len(tags)) + entries + b"\0" * 4))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_modes_of_8_bits_become_the_rgb_of_pillow(mode):
    image = noise("RGB").convert("L").convert("1") if mode == "1" else noise("RGB").convert(mode)
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_levels_of_0_to_255_become_the_rgb_of_pillow(dtype):
    image = reopened(Image.fromarray(np.linspace(0, 255, 63).reshape(7, 9).astype(dtype)), "TIFF")
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image.convert("RGB")))


def test_float_levels_of_0_to_1_reach_from_black_to_white():
    levels = np.linspace(0, 1, 63, dtype=np.float32).reshape(7, 9)
    ours = np.asarray(to_rgb(reopened(Image.fromarray(levels), "TIFF")))
    assert np.abs(ours.astype(float) - levels[..., None] * 255).max() <= 0.51


@pytest.mark.parametrize("levels", [[-1.0, 0.5], [0.0, 256.0], [0.0, float("nan")], [0.0, float("inf")]])
def test_float_levels_of_another_range_are_refused(levels):
    with pytest.raises(ValueError, match="32-bit levels from .* expected 0 to 1 or 0 to 255: convert it to 8 bits"):
        to_rgb(Image.fromarray(np.array([levels], np.float32)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_16_bit_grey_of_every_format_is_scaled_by_its_full_range(kind):
    levels = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    ours = np.asarray(to_rgb(reopened(Image.fromarray(levels), kind))).astype(float)
    assert np.abs(ours - levels[..., None] / 257).max() <= 1.01


def test_grey_tiffs_of_12_bits_and_with_0_for_white_are_scaled_as_they_say():
    twelve = np.asarray(to_rgb(grey_tiff(bytes([0x00, 0x08, 0x00, 0xFF, 0xF4, 0x00]), 12, 1)))[0, :, 0]
    assert twelve.tolist() == [0, round(0x800 / 4095 * 255), 255, round(0x400 / 4095 * 255)]
    inverted = np.asarray(to_rgb(grey_tiff(struct.pack("<4H", 0, 65535, 257, 32896), 16, 0)))[0, :, 0]
    assert inverted.tolist() == [255, 0, 254, 127]


def test_16_bit_levels_of_12_bits_are_called_dark():
    assert "at most 4,095 of 65,535" in dark_levels(Image.fromarray(np.array([[0, 4095]], np.uint16)))
    assert dark_levels(Image.fromarray(np.array([[0, 4096]], np.uint16))) is None
    assert dark_levels(Image.fromarray(np.array([[0, 9]], np.uint8))) is None


def test_a_picture_is_turned_once_and_damaged_exif_data_turn_nothing():
    exif = Image.Exif()
    exif[274] = 6
    once = upright(reopened(noise(), "PNG"), "exif")
    image = Image.open(io.BytesIO(encoded(noise(), "PNG", exif=exif)))
    once = upright(image, "exif")
    assert once.size == image.size[::-1] and upright(once, "exif") is once and upright(image, "stored") is image
    image.info["exif"] = b"Exif\0\0MM\0*\xff\xff"
    image._exif = None
    assert upright(image, "exif") is image
