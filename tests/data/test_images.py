"""Pictures from folders, zip files and Parquet rows are the same pictures; what is hostile or broken is named."""

import os
import pickle
import random
import warnings
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import encoded, noise
from PIL import Image, ImageOps

from llava.asking import load_picture
from llava.conversation import get_template
from llava.data import images, parquet_files
from llava.data.checks import RowImage
from llava.data.images import ImageError, ImageStore
from llava.data.parquet_files import LostRows, RowReader
from llava.data.preflight import Rules, preflight
from llava.data.records import load_records
from llava.data.zip_files import ZipMembers
from llava.mm_utils import to_rgb

pytestmark = pytest.mark.usefixtures("files_count_as_old")


def kind_of(store: ImageStore, image, full_decode: bool = False) -> str | None:
    _, problem = store.check(image, full_decode)
    return problem and problem.kind


# --- the same pictures from everywhere --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """The same 40 pictures in a folder, a zip file (deflated and stored) and a Parquet file with small row groups."""
    root = tmp_path_factory.mktemp("everywhere")
    files = {f"a/{i} é.png": encoded(noise(seed=i, size=(9 + i % 5, 7))) for i in range(40)}
    with zipfile.ZipFile(root / "images.zip", "w") as archive:
        for number, (name, data) in enumerate(files.items()):
            (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "images" / name).write_bytes(data)
            archive.writestr(name, data, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])
    column = pa.array([{"bytes": data, "path": name} for name, data in files.items()])
    turns = pa.array([[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}]] * len(files))
    pq.write_table(pa.table({"image": column, "conversations": turns}), root / "rows.parquet", row_group_size=7)
    return root, list(files)


def test_folder_zip_and_rows_give_the_same_pixels_in_any_order(everywhere):
    root, names = everywhere
    folder, archive, rows = ImageStore(root / "images"), ImageStore(root / "images.zip"), ImageStore(None)
    order = list(range(len(names)))
    for shuffled in (order, random.Random(0).sample(order, len(order)), [5, 5, 4, 39, 0]):
        for index in shuffled:
            expected = np.asarray(Image.open(root / "images" / names[index]))
            row = RowImage(str(root / "rows.parquet"), index)
            for store, image in ((folder, names[index]), (archive, names[index]), (rows, row)):
                assert np.array_equal(np.asarray(store.open(image)), expected)
                assert kind_of(store, image, full_decode=True) is None


def test_stores_travel_to_other_processes_without_what_they_have_open(everywhere):
    root, names = everywhere
    for store, image in (
        (ImageStore(root / "images.zip"), names[3]),
        (ImageStore(None), RowImage(str(root / "rows.parquet"), 3)),
    ):
        store.open(image)
        packed = pickle.dumps(store)
        assert len(packed) < 1500
        assert np.array_equal(np.asarray(pickle.loads(packed).open(image)), np.asarray(store.open(image)))


def test_rows_in_order_are_read_in_one_go_and_only_some_are_held(everywhere, monkeypatch):
    root, names = everywhere
    started = []
    real = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *a, **k: started.append(k["row_groups"]) or real(*a, **k)
    )
    monkeypatch.setattr(parquet_files, "_IMAGES", 2)
    reader = RowReader()
    for index in range(len(names)):
        reader.read(RowImage(str(root / "rows.parquet"), index))
        assert len(reader._held) <= 2
    assert started == [[group] for group in range(6)]


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


@pytest.mark.parametrize("name", ["in.png", "sub/../in.png", "./sub//deep.png", "{root}/images/in.png"])
def test_paths_that_stay_inside_are_taken(folder, name):
    for root in (folder / "images", f"{folder}/images/", folder / "images/sub/.."):
        assert kind_of(ImageStore(root), name.format(root=folder), full_decode=True) is None


def test_links_are_followed(folder):
    (folder / "images/out.png").symlink_to(folder / "outside.png")
    (folder / "images/more").symlink_to(folder)
    (folder / "images/in2.png").symlink_to("sub/deep.png")
    (folder / "linked").symlink_to(folder / "images")
    store = ImageStore(folder / "images")
    assert {kind_of(store, name) for name in ("out.png", "more/outside.png", "in2.png")} == {None}
    assert kind_of(ImageStore(folder / "linked"), "in.png") is None
    assert kind_of(store, "more/../../outside.png") == "image_outside"


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


@pytest.mark.parametrize("size", [(9_500, 9_500), (60_000, 60_000)])
def test_a_decompression_bomb_is_an_error_not_a_warning(folder, size):
    (folder / "images/bomb.png").write_bytes(bomb(*size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, problem = ImageStore(folder / "images").check("bomb.png")
    assert problem.kind == "image_unreadable" and "decompression bomb" in problem.message


def test_a_truncated_picture_passes_the_header_check_and_fails_the_full(folder):
    for name, data in (("a.png", encoded(noise(size=(64, 64)))), ("a.jpg", encoded(noise(size=(64, 64)), "JPEG"))):
        (folder / "images" / name).write_bytes(data[: len(data) // 2])
        store = ImageStore(folder / "images")
        assert kind_of(store, name) is None and kind_of(store, name, full_decode=True) == "image_unreadable"
        with pytest.raises(ImageError, match=f"{name} cannot be decoded"):
            store.open(name)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_used_and_that_is_reported(folder, kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = folder / f"images/a.{kind.lower()}"
    path.write_bytes(
        encoded(
            frames[0], kind, save_all=True, append_images=frames[1:], **{"lossless": True} if kind == "WEBP" else {}
        )
    )
    store = ImageStore(folder / "images")
    assert kind_of(store, path.name) is None and kind_of(store, path.name, full_decode=True) is None
    assert to_rgb(store.open(path.name)).getpixel((4, 4)) == (255, 0, 0)


class Unflagged(zipfile.ZipInfo):
    """A member as Info-ZIP and macOS write it: a name in UTF-8, without the flag that says so."""

    def _encodeFilenameFlags(self):
        return self.filename.encode(), self.flag_bits


def test_names_beyond_ascii_are_found_whoever_wrote_the_zip_file_and_in_either_form_of_accents(tmp_path):
    composed, decomposed = "caf\u00e9/\u732b.png", "cafe\u0301/\u732b.png"
    for number, (name, member) in enumerate(
        [(composed, Unflagged), (decomposed, Unflagged), (composed, zipfile.ZipInfo)]
    ):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w") as archive:
            archive.writestr(member(name), encoded(noise(seed=1)))
        store = ImageStore(tmp_path / f"{number}.zip")
        assert store.check(composed) == store.check(decomposed) and store.check(composed)[1] is None
        assert repr(name) in store.check("none.png")[1].message
    (tmp_path / decomposed).parent.mkdir()
    (tmp_path / decomposed).write_bytes(encoded(noise(seed=1)))
    assert ImageStore(tmp_path).check(composed)[1] is None


@pytest.mark.parametrize("size", [(1, 12_000), (12_000, 1), (101, 1), (16_385, 200)])
def test_a_picture_too_long_for_its_width_is_refused_by_its_header(everywhere, tmp_path, size):
    data = encoded(Image.new("L", size))
    assert len(data) < 8_000
    (tmp_path / "long.png").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("long.png", data)
    pq.write_table(pa.table({"image": [data]}), tmp_path / "a.parquet")
    row = RowImage(str(tmp_path / "a.parquet"), 0)
    for root, place in ((tmp_path, "long.png"), (tmp_path / "a.zip", "long.png"), (None, row)):
        _, problem = ImageStore(root).check(place)
        assert problem.kind == "image_unreadable"
        assert f"{size[0]:,} x {size[1]:,} pixels; a side may be 100 times the other" in problem.message
        for read in (ImageStore(root).open, ImageStore(root).size):
            with pytest.raises(ImageError, match="a side may be 100 times"):
                read(place)
    with pytest.raises(ValueError, match="--image-file .*long.png.*a side may be 100 times"):
        load_picture(str(tmp_path / "long.png"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
def test_exif_orientation_is_reported_or_applied_everywhere(tmp_path, kind):
    store, turning = ImageStore(tmp_path), ImageStore(tmp_path, orientation="exif")
    assert store.identity() != turning.identity()
    for number in range(1, 9):
        name, exif = f"{number}.{kind.lower()}", Image.Exif()
        exif[274] = number
        noise(size=(9, 7)).save(tmp_path / name, kind, exif=exif)
        with Image.open(tmp_path / name) as stored:
            expected = ImageOps.exif_transpose(stored)
            stored.load()
        assert np.array_equal(np.asarray(turning.open(name)), np.asarray(expected))
        assert turning.size(name) == turning.open(name).size == expected.size
        assert np.array_equal(np.asarray(store.open(name)), np.asarray(stored))
        assert store.size(name) == store.open(name).size
        assert kind_of(turning, name) is None
        if number > 1 and kind != "TIFF":  # which Pillow turns itself
            assert (
                store.check(name)[1].kind == "turned" and f"EXIF orientation {number}" in store.check(name)[1].message
            )
        else:
            assert kind_of(store, name) is None


def test_a_picture_that_is_turned_and_cut_off_is_a_fault_when_decoded(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    data = encoded(noise(size=(64, 64)), "JPEG", exif=exif)
    (tmp_path / "a.jpg").write_bytes(data[: len(data) // 2])
    assert kind_of(ImageStore(tmp_path), "a.jpg") == "turned"
    assert kind_of(ImageStore(tmp_path), "a.jpg", full_decode=True) == "image_unreadable"


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_levels_of_32_bits_are_named(tmp_path, dtype):
    Image.fromarray(np.zeros((4, 4), dtype)).save(tmp_path / "a.tif")
    store = ImageStore(tmp_path)
    assert kind_of(store, "a.tif") == "image_unreadable"
    with pytest.raises(ImageError, match=r"a\.tif.*levels of 32 bits.*convert it to 8 bits"):
        store.open("a.tif")


def test_colours_that_cannot_become_rgb_are_named_by_the_header(tmp_path):
    Image.new("LAB", (4, 4)).save(tmp_path / "a.tif")
    assert "colours of mode LAB; convert it to RGB" in ImageStore(tmp_path).check("a.tif")[1].message


def test_unusual_modes_of_8_bits_are_decoded_as_pillow_stores_them(folder):
    palette = noise("L").convert("P")
    palette.info["transparency"] = bytes(range(256))
    sixteen = Image.fromarray(np.arange(63, dtype=np.uint16).reshape(7, 9) * 1000)
    cases = {"cmyk.jpg": noise("CMYK"), "palette.png": palette, "sixteen.png": sixteen, "alpha.png": noise("RGBA")}
    store = ImageStore(folder / "images")
    for name, image in cases.items():
        image.save(folder / "images" / name)
        with Image.open(folder / "images" / name) as expected:
            found = store.open(name)
            assert found.mode == ("RGB" if name == "sixteen.png" else expected.mode) and np.array_equal(
                np.asarray(to_rgb(found)), np.asarray(to_rgb(expected))
            )
        assert kind_of(store, name, full_decode=True) is None


# --- broken containers ------------------------------------------------------------------------------------------------


def test_a_broken_zip_file_is_named(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK not really")
    with pytest.raises(ValueError, match="--image_folder .*a.zip: neither a folder nor a readable zip file"):
        ImageStore(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("x", b"")
    data = bytearray((tmp_path / "c.zip").read_bytes())
    listed = data.index(b"PK\x01\x02")
    data[listed + 28], data[listed + 30] = 0, 1  # the name's only byte counts as an extra field: there is no name
    (tmp_path / "c.zip").write_bytes(data)
    with pytest.raises(ValueError, match="c.zip: neither"):
        ImageStore(tmp_path / "c.zip")
    with zipfile.ZipFile(tmp_path / "b.zip", "w"):
        pass
    with pytest.raises(ValueError, match="b.zip: the zip file holds no files"):
        ImageStore(tmp_path / "b.zip")


def test_damage_inside_a_zip_file_is_named_and_never_read_as_a_picture(tmp_path):
    data = encoded(noise(size=(30, 30)))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", data)
        archive.writestr("zeros.png", bytes(1 << 20))
        archive.writestr("bzip.png", data, zipfile.ZIP_BZIP2)
    whole = (tmp_path / "a.zip").read_bytes()
    broken = tmp_path / "b.zip"
    for flipped in range(0, 300, 7):
        changed = bytearray(whole)
        changed[flipped] ^= 0x55
        broken.write_bytes(changed)
        with suppress(OSError):
            assert ZipMembers(broken).read("a.png", 1 << 20) == data  # a field of the header that nothing depends on
    store = ImageStore(tmp_path / "a.zip")
    assert "deflate" in store.check("bzip.png")[1].message
    images_limit, images.LARGEST_FILE = images.LARGEST_FILE, 1 << 19
    try:
        assert "once unpacked" in store.check("zeros.png")[1].message
    finally:
        images.LARGEST_FILE = images_limit


def test_a_zip_file_that_was_replaced_is_listed_anew(tmp_path):
    for seed in (1, 2):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("a.png", encoded(noise(seed=seed)))
        store = ImageStore(tmp_path / "a.zip")
        assert np.array_equal(np.asarray(store.open("a.png")), np.asarray(noise(seed=seed)))


def test_a_shard_that_vanishes_or_breaks_is_named(tmp_path, everywhere):
    root, _ = everywhere
    path = tmp_path / "rows.parquet"
    data = bytearray((root / "rows.parquet").read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    store = ImageStore(None)
    assert kind_of(store, RowImage(str(path), 0)) == "image_unreadable"
    assert kind_of(store, RowImage(str(path), 39)) is None  # after an error the reader goes on
    assert kind_of(store, RowImage(str(path), 400)) == "image_unreadable"
    assert kind_of(store, RowImage(str(tmp_path / "gone.parquet"), 0)) in ("image_missing", "image_unreadable")


@pytest.mark.parametrize("compression", ["snappy", "gzip", "none"])
def test_no_row_gets_another_rows_picture_after_a_damaged_page(tmp_path, compression):
    rows = [bytes([i]) * 300 + random.Random(i).randbytes(50) for i in range(40)]
    path = tmp_path / "rows.parquet"
    pages = {"data_page_size": 300 * 8, "write_batch_size": 8, "use_dictionary": False}
    pq.write_table(pa.table({"image": pa.array(rows)}), path, compression=compression, **pages)
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
    from llava.model.multimodal_projector.adapter import read_tensors

    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    import torch

    torch.save({"model.mm_projector.0.weight": Payload()}, tmp_path / "mm_projector.bin")
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(Payload()))
    (tmp_path / "cut.bin").write_bytes((tmp_path / "mm_projector.bin").read_bytes()[:100])
    torch.save([1, 2], tmp_path / "list.bin")
    for name in ("mm_projector.bin", "raw.bin", "cut.bin", "list.bin"):
        with pytest.raises(ValueError, match=name):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "executed").exists()
