"""Colours and orientation equal Pillow's own where that reads them sensibly, and the true range where it does not."""

import io
import struct

import numpy as np
import pytest
from data_files import encoded, noise
from PIL import Image

from llava.utils.pixels import to_rgb, upright


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
def test_32_bit_levels_are_refused(dtype):
    image = reopened(Image.fromarray(np.linspace(0, 255, 63).reshape(7, 9).astype(dtype)), "TIFF")
    with pytest.raises(ValueError, match="convert it to 8 bits"):
        to_rgb(image)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_16_bit_grey_of_every_format_is_scaled_by_its_full_range(kind):
    levels = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    ours = np.asarray(to_rgb(reopened(Image.fromarray(levels), kind))).astype(float)
    assert np.abs(ours - levels[..., None] / 257).max() <= 1.01


@pytest.mark.parametrize(("bits", "white"), [(12, 1), (16, 0)])
def test_grey_tiffs_of_12_bits_or_with_0_for_white_are_refused(bits, white):
    with pytest.raises(ValueError, match="convert it to 8 bits"):
        to_rgb(grey_tiff(bytes(8), bits, white))


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
