"""Pictures from folders, zip files and Parquet rows are the same pictures; what is hostile or broken is named."""

import os
import random
import warnings
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import encoded, noise
from PIL import Image

from llava.asking import load_picture
from llava.conversation import get_template
from llava.data import images
from llava.data.checks import RowImage
from llava.data.images import ImageError, ImageStore
from llava.data.parquet_files import LostRows, RowReader
from llava.data.preflight import Rules, preflight
from llava.data.records import load_records
from llava.data.zip_files import ZipMembers
from llava.model.multimodal_projector.adapter import read_tensors
from llava.utils.pixels import to_rgb

pytestmark = pytest.mark.usefixtures("files_count_as_old")


def kind_of(store: ImageStore, image, full_decode: bool = False) -> str | None:
    _, problem = store.check(image, full_decode)
    return problem and problem.kind


# --- the same pictures from everywhere --------------------------------------------------------------------------------


def test_folder_zip_and_rows_give_the_same_pixels_in_any_order(tmp_path):
    files = {f"a/{i} é.png": encoded(noise(seed=i, size=(9 + i % 5, 7))) for i in range(40)}
    (tmp_path / "a").mkdir()
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for number, (name, data) in enumerate(files.items()):
            (tmp_path / name).write_bytes(data)
            archive.writestr(name, data, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])
    column = pa.array([{"bytes": data, "path": name} for name, data in files.items()])
    turns = pa.array([[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}]] * len(files))
    pq.write_table(pa.table({"image": column, "conversations": turns}), tmp_path / "rows.parquet", row_group_size=7)
    folder, archive, rows = ImageStore(tmp_path), ImageStore(tmp_path / "images.zip"), ImageStore(None)
    for index in [*range(40), 5, 5, 4, 39, 0]:
        name, row = list(files)[index], RowImage(str(tmp_path / "rows.parquet"), index)
        for store, image in ((folder, name), (archive, name), (rows, row)):
            assert np.array_equal(np.asarray(store.open(image)), np.asarray(Image.open(tmp_path / name)))
            assert kind_of(store, image, full_decode=True) is None


# --- names that lead elsewhere ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images/sub").mkdir(parents=True)
    for place in ("images/in.png", "images/sub/deep.png", "outside.png", "images-too.png"):
        (tmp_path / place).write_bytes(encoded(noise()))
    return tmp_path


@pytest.mark.parametrize("name", ["../outside.png", "sub/../../outside.png", "../images-too.png", "{root}/outside.png"])
def test_paths_out_of_the_folder_are_refused(folder, name):
    store = ImageStore(folder / "images")
    with pytest.raises(ImageError, match="is outside --image_folder.*outside.png|images-too.png"):
        store.open(name.format(root=folder))
    assert kind_of(store, name.format(root=folder)) == "image_outside"
    for inside in ("in.png", "sub/../in.png", "./sub//deep.png", f"{folder}/images/in.png"):
        assert kind_of(ImageStore(f"{folder}/images/sub/.."), inside, full_decode=True) is None


def test_members_of_a_zip_file_lead_nowhere(folder):
    with zipfile.ZipFile(folder / "evil.zip", "w") as archive:
        archive.writestr("../outside.png", encoded(noise(seed=5)))
        archive.writestr("/etc/passwd", b"not read from the disk")
    store = ImageStore(folder / "evil.zip")
    assert np.array_equal(np.asarray(store.open("../outside.png")), np.asarray(noise(seed=5)))
    assert kind_of(store, "/etc/passwd") == "image_unreadable"
    _, missing = store.check("outside.png")
    assert missing.kind == "image_missing" and "a member of the zip file is '../outside.png'" in missing.message


# --- files that are no pictures ---------------------------------------------------------------------------------------


def test_what_is_not_a_picture_is_named_and_nothing_hangs(folder):
    store = ImageStore(folder / "images")
    (folder / "images/empty.png").write_bytes(b"")
    (folder / "images/text.png").write_text("not a picture")
    (folder / "images/program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    os.mkfifo(folder / "images/pipe.png")
    with (folder / "images/huge.bmp").open("wb") as file:
        file.truncate(images.LARGEST_FILE + 1)
    for name in ("empty.png", "text.png", "program.eps", "pipe.png", "huge.bmp", "sub", "", "a\0b", "x" * 5000):
        assert kind_of(store, name) == "image_unreadable", name
    assert kind_of(store, "nothing.png") == "image_missing"


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header announces more pixels than it has."""
    data = bytearray(encoded(noise("L", (1, 1))))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def test_a_decompression_bomb_is_an_error_not_a_warning(folder):
    (folder / "images/bomb.png").write_bytes(bomb(9_500, 9_500))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, problem = ImageStore(folder / "images").check("bomb.png")
    assert problem.kind == "image_unreadable" and "decompression bomb" in problem.message


class Unflagged(zipfile.ZipInfo):
    """A member as Info-ZIP and macOS write it: a name in UTF-8, without the flag that says so."""

    def _encodeFilenameFlags(self):
        return self.filename.encode(), self.flag_bits


def test_names_beyond_ascii_are_found_whoever_wrote_the_zip_file_and_in_either_form_of_accents(tmp_path):
    composed, decomposed = "caf\u00e9/\u732b.png", "cafe\u0301/\u732b.png"
    stores = []
    for number, (name, member) in enumerate([(composed, Unflagged), (decomposed, Unflagged), (composed, Unflagged)]):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w") as archive:
            archive.writestr(member(name), encoded(noise(seed=1)))
        stores.append(store := ImageStore(tmp_path / f"{number}.zip"))
        assert store.check(composed) == store.check(decomposed) and store.check(composed)[1] is None
        assert repr(name) in store.check("none.png")[1].message
    assert stores[0].identity() != stores[2].identity()  # so that its messages are not the first one's
    (tmp_path / decomposed).parent.mkdir()
    (tmp_path / decomposed).write_bytes(encoded(noise(seed=1)))
    assert ImageStore(tmp_path).check(composed)[1] is None


def test_a_picture_too_long_for_its_width_is_refused_by_its_header(tmp_path):
    Image.new("L", (101, 1)).save(tmp_path / "long.png")
    _, problem = ImageStore(tmp_path).check("long.png")
    assert problem.kind == "image_unreadable" and "101 x 1 pixels; a side may be 100 times the other" in problem.message
    with pytest.raises(ValueError, match="--image-file .*long.png.*a side may be 100 times"):
        load_picture(str(tmp_path / "long.png"))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_exif_orientation_is_reported_and_ignored(tmp_path, kind):
    store = ImageStore(tmp_path)
    for number in range(1, 9):
        name, exif = f"{number}.{kind.lower()}", Image.Exif()
        exif[274] = number
        noise(size=(9, 7)).save(tmp_path / name, kind, exif=exif)
        with Image.open(tmp_path / name) as stored:
            stored.load()
        assert np.array_equal(np.asarray(store.open(name)), np.asarray(stored))
        assert store.size(name) == store.check(name)[0] == store.open(name).size
        assert kind_of(store, name) == ("turned" if number > 1 and kind != "TIFF" else None)  # Pillow turns TIFF itself


@pytest.mark.parametrize("mode", ["L", "CMYK", "I;16"])
def test_tiffs_of_grey_and_cmyk_are_turned_as_colours_are(tmp_path, mode):
    exif = Image.Exif()
    exif[274] = 6
    levels = np.arange(12, dtype=np.uint16).reshape(3, 4) * 257 * 20
    grey = Image.fromarray((levels >> 8).astype(np.uint8))
    stored = Image.fromarray(levels) if mode == "I;16" else grey.convert(mode)
    stored.save(tmp_path / "a.tiff", exif=exif)
    store = ImageStore(tmp_path)
    opened, expected = store.open("a.tiff"), to_rgb(stored).transpose(Image.Transpose.ROTATE_270)
    assert np.array_equal(np.asarray(to_rgb(opened)), np.asarray(expected))
    assert store.size("a.tiff") == opened.size == (3, 4)


# --- broken containers ------------------------------------------------------------------------------------------------


def test_damage_inside_a_zip_file_is_named_and_never_read_as_a_picture(tmp_path, monkeypatch):
    data = encoded(noise(size=(30, 30)))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", data)
        archive.writestr("zeros.png", bytes(1 << 20))
    whole = (tmp_path / "a.zip").read_bytes()
    broken = tmp_path / "b.zip"
    for flipped in range(0, 300, 7):
        changed = bytearray(whole)
        changed[flipped] ^= 0x55
        broken.write_bytes(changed)
        with suppress(OSError):
            assert ZipMembers(broken).read("a.png", 1 << 20) == data  # a field of the header that nothing depends on
    store = ImageStore(tmp_path / "a.zip")
    monkeypatch.setattr(images, "LARGEST_FILE", 1 << 19)
    assert "once unpacked" in store.check("zeros.png")[1].message


def test_no_row_gets_another_rows_picture_after_a_damaged_page(tmp_path):
    rows = [bytes([i]) * 300 + random.Random(i).randbytes(50) for i in range(40)]
    path = tmp_path / "rows.parquet"
    pages = {"data_page_size": 300 * 8, "write_batch_size": 8, "use_dictionary": False}
    pq.write_table(pa.table({"image": pa.array(rows)}), path, compression="none", **pages)
    whole, refused = path.read_bytes(), set()
    for start in range(4, len(whole) - 700, len(whole) // 60):
        path.write_bytes(whole[:start] + bytes(byte ^ 0xA5 for byte in whole[start : start + 8]) + whole[start + 8 :])
        reader = RowReader()
        for index in range(40):
            try:
                found = reader.read(RowImage(str(path), index))
            except (OSError, LostRows):
                refused.add(index)
            else:
                assert found == rows[index] or found not in rows
    assert len(refused) > 20


def test_a_row_group_that_has_lost_a_page_is_refused_as_a_file(tmp_path):
    turns = pa.array([[{"from": "human", "value": f"<image>{i}"}, {"from": "gpt", "value": "x"}] for i in range(20)])
    columns = {"image": pa.array([encoded(noise(seed=i)) for i in range(20)]), "conversations": turns}
    pages = {"data_page_size": 900, "write_batch_size": 4, "use_dictionary": False}
    for names in (["image", "conversations"], ["conversations", "image"]):
        path = tmp_path / f"{names[0]}.parquet"
        pq.write_table(pa.table(columns).select(names), path, compression="none", **pages)
        data = bytearray(path.read_bytes())
        assert data[4:6] == b"\x15\0"
        data[5] = 2 * 7  # a kind of page that no reader knows, so that it is passed over
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{path}: row group 0 has \d+ rows, but the footer says 20"):
            preflight(load_records(str(path)), ImageStore(None), Rules(get_template("chatml"), "assistant"), False)


def test_a_pickle_in_an_adapter_file_is_refused_and_not_executed(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (tmp_path / "executed",)

    torch.save({"model.mm_projector.0.weight": Payload()}, tmp_path / "mm_projector.bin")
    with pytest.raises(ValueError, match="mm_projector.bin"):
        read_tensors(tmp_path / "mm_projector.bin")
    assert not (tmp_path / "executed").exists()
