"""LLaVA-1.5's picture sets: what records name is fetched into LLaVA's folders, resumed, and counted if it is gone."""

import hashlib
import io
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import hub_server
import pytest
from data_files import TURNS, encoded, noise
from file_server import serve_files

from llava.data import picture_sets, prepare

pytestmark = pytest.mark.usefixtures("files_count_as_old")

SOURCE, RECORDS = "llava-665k", "llava_v1_5_mix665k.json"
ARCHIVED = ["coco/train2017", "gqa/images", "textvqa/train_images", "vg/VG_100K", "vg/VG_100K_2"]
JPEG, PNG, GIF = (encoded(noise(seed=i), kind) for i, kind in enumerate(("JPEG", "PNG", "GIF")))
PIXEL = encoded(noise(seed=9).resize((1, 1)), "GIF")
COVERS = {"101": (JPEG, ".jpg"), "102": (GIF, ".gif"), "103": (PNG, ".png")}


def zipped(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return content.getvalue()


def picture(folder: str, number: int) -> bytes:
    return encoded(noise(seed=10 * ARCHIVED.index(folder) + number), "JPEG")


@pytest.fixture
def web(tmp_path, monkeypatch):
    """The hub with small records, and a server with the archives and links of all sets."""
    names = [f"{folder}/{number}.jpg" for folder in ARCHIVED for number in (1, 2)]
    names += [f"ocr_vqa/images/{isbn}.jpg" for isbn in COVERS]
    records = [{"id": name, "image": name, "conversations": TURNS} for name in names]
    records += [{"id": "again", "image": names[0], "conversations": TURNS}]
    records += [{"id": "text", "conversations": [{"from": "human", "value": "hi"}, TURNS[1]]}]

    repository = hub_server.Repository(prepare.SOURCES[SOURCE].repository, public=True)
    repository.branches["main"] = {RECORDS: json.dumps(records).encode(), "llava_instruct_80k.json": b"not needed"}
    monkeypatch.setattr("time.sleep", lambda _: None)
    with hub_server.serve() as hub, serve_files() as files:
        hub.models[repository.name] = repository
        hub_server.use(hub, monkeypatch)
        files.hub = hub
        sets = [
            replace(each, archive=each.archive and f"{files.address}/{each.folder}.zip",
                    links=each.links and f"{files.address}/dataset.json")
            for each in picture_sets.LLAVA_665K
        ]  # fmt: skip
        monkeypatch.setitem(prepare.SOURCES, SOURCE, replace(prepare.SOURCES[SOURCE], pictures=tuple(sets)))
        for folder in ARCHIVED:
            members = {f"{folder.split('/')[1]}/{number}.jpg": picture(folder, number) for number in (1, 2, 3)}
            files.contents[f"/{folder}.zip"] = zipped(members)
        links = {isbn: {"imageURL": f"{files.address}/{isbn}{end}"} for isbn, (_, end) in COVERS.items()}
        files.contents["/dataset.json"] = json.dumps(links).encode()
        files.contents |= {f"/{isbn}{end}": content for isbn, (content, end) in COVERS.items()}
        yield files


def run(folder: Path, *flags: str) -> int:
    return prepare.main([SOURCE, "--folder", str(folder), *flags])


def test_the_sources_are_those_that_llavas_readme_names():
    sets = {each.folder: each.archive or each.links for each in prepare.SOURCES[SOURCE].pictures}
    assert sorted(sets) == sorted([*ARCHIVED, "ocr_vqa/images"])
    hosts = {folder: address.split("/")[2] for folder, address in sets.items()}
    assert hosts["coco/train2017"] == "images.cocodataset.org" and hosts["gqa/images"] == "downloads.cs.stanford.edu"
    assert hosts["textvqa/train_images"] == "dl.fbaipublicfiles.com" and hosts["vg/VG_100K"] == "cs.stanford.edu"


def test_every_set_lies_in_llavas_folders_and_the_preflight_finds_nothing(web, tmp_path, capsys):
    folder = tmp_path / "mix"
    assert run(folder, "--full_decode") == 0
    out = capsys.readouterr().out
    for place in ARCHIVED:
        assert f"({place}): 2, all here" in out
        assert {file.name for file in (folder / place).iterdir()} == {"1.jpg", "2.jpg"}  # 3.jpg: no record names it
        assert all((folder / place / f"{number}.jpg").read_bytes() == picture(place, number) for number in (1, 2))
    assert "OCR-VQA (ocr_vqa/images): 3, all here" in out
    assert f"DATA_PATH={folder}/llava_v1_5_mix665k.json IMAGE_FOLDER={folder} PRESET" in out
    assert "records   15: 14 with images, 1 text only" in out and "faults    none" in out
    assert [name for name in web.hub.received if name.startswith("GET")] == [f"GET {RECORDS}"]
    web.asked.clear(), web.hub.received.clear()
    assert run(folder) == 0 and not web.asked and not web.hub.received


def test_book_covers_get_the_names_of_the_records_whatever_their_format(web, tmp_path):
    assert run(tmp_path) == 0
    found = {file.name: file.read_bytes() for file in (tmp_path / "ocr_vqa/images").iterdir()}
    assert found == {f"{isbn}.jpg": content for isbn, (content, _) in COVERS.items()}


def test_local_only_lists_what_is_missing_by_count_and_source(web, tmp_path, capsys):
    shutil.copytree(Path(__file__).parent, tmp_path / "gqa/images", ignore=lambda *_: _[1])  # an empty folder
    assert run(tmp_path) == 0
    (tmp_path / "gqa/images/2.jpg").unlink()
    shutil.rmtree(tmp_path / "ocr_vqa")
    asked = len(web.asked)
    capsys.readouterr()
    assert run(tmp_path, "--local_only") == 2
    told = capsys.readouterr()
    assert f"GQA (gqa/images): 1 of 2 here, 1 missing (2.jpg); source {web.address}/gqa/images.zip" in told.out
    assert "OCR-VQA (ocr_vqa/images): 0 of 3 here, 3 missing (101.jpg, 102.jpg, 103.jpg)" in told.out
    assert "4 pictures are missing; without --local_only they are downloaded" in told.err
    assert len(web.asked) == asked


# ---- interruptions ---------------------------------------------------------------------------------------------------


def test_a_cut_connection_is_continued_where_it_stopped(web, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)  # bytes; what a cut may lose
    whole = web.contents["/gqa/images.zip"]
    web.cuts["/gqa/images.zip"] = 1000
    assert any(run(tmp_path) == 0 for _ in range(5))  # the hub's client resumes by itself from some version on
    starts = [start for path, start in web.asked if path == "/gqa/images.zip"]
    assert len(whole) > 2000 and starts == list(range(0, len(whole), 1000))
    kept = hashlib.sha256((tmp_path / "archives/gqa-images.zip").read_bytes()).hexdigest()
    assert kept == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("request_", ["HEAD", "GET"])
def test_a_hub_that_cuts_the_connection_is_named_and_the_same_command_resumes(web, tmp_path, capsys, request_):
    web.hub.fails = f"{request_} /datasets/liuhaotian/LLaVA-Instruct-150K/resolve/"
    assert run(tmp_path) == 2
    assert "liuhaotian/LLaVA-Instruct-150K cannot be downloaded to" in (err := capsys.readouterr().err)
    assert "rerun the same command to resume" in err and not web.asked
    web.hub.fails = None
    assert run(tmp_path) == 0


def test_a_source_that_fails_does_not_stop_the_others_and_the_same_command_resumes(web, tmp_path, capsys):
    whole = web.contents["/coco/train2017.zip"]
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives/coco-train2017.zip.incomplete").write_bytes(whole[:500])  # what a killed process leaves
    web.contents["/coco/train2017.zip"] = 403
    assert run(tmp_path) == 2
    told = capsys.readouterr()
    assert "error: COCO train2017: " in told.err and "1 of the sources above failed" in told.err and "rerun" in told.err
    assert (
        "COCO train2017 (coco/train2017): 0 of 2 here, 2 missing" in told.out and "GQA (gqa/images): 2, all" in told.out
    )
    assert (tmp_path / "archives/coco-train2017.zip.incomplete").read_bytes() == whole[:500]
    web.contents["/coco/train2017.zip"], web.asked[:] = whole, []
    assert run(tmp_path) == 0
    assert web.asked == [("/coco/train2017.zip", 500)]


def test_a_download_that_was_complete_before_the_kill_is_taken(web, tmp_path):
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives/gqa-images.zip.incomplete").write_bytes(web.contents["/gqa/images.zip"])
    assert run(tmp_path) == 0
    assert [start for path, start in web.asked if path == "/gqa/images.zip"] == [len(web.contents["/gqa/images.zip"])]


def test_an_interruption_while_unpacking_leaves_whole_pictures_and_goes_on(web, tmp_path, monkeypatch, capsys):
    written = []

    def cut_off(path, content):
        if len(written) == 3:
            path.with_name(f".{path.name}.tmp").write_bytes(content[:10])
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(picture_sets, "write_bytes", cut_off)
        assert run(tmp_path) == 130
    assert capsys.readouterr().err.endswith("interrupted: rerun the same command to resume\n")
    web.asked.clear()
    assert run(tmp_path) == 0
    assert "/coco/train2017.zip" not in [path for path, _ in web.asked]
    assert (tmp_path / "gqa/images/2.jpg").read_bytes() == picture("gqa/images", 2)


# ---- what is gone, and what is wrong ---------------------------------------------------------------------------------


def test_dead_links_are_counted_by_cause_and_the_preflight_names_their_records(web, tmp_path, capsys):
    links = json.loads(web.contents["/dataset.json"])
    del links["101"]
    web.contents["/dataset.json"] = json.dumps(links).encode()
    web.contents |= {"/102.gif": 404, "/103.png": PIXEL}
    assert run(tmp_path, "--list") == 1
    out = capsys.readouterr().out
    assert "OCR-VQA (ocr_vqa/images): 0 of 3 here, 3 missing: " in out
    assert f"1 without a link in {tmp_path}/ocr_vqa/dataset.json" in out and "2 dead links" in out
    assert "3 image_missing" in out and all(f"ocr_vqa/images/{isbn}.jpg" in out for isbn in COVERS)
    assert list((tmp_path / "ocr_vqa/images").iterdir()) == []


@pytest.mark.parametrize("content", [b"<html>gone</html>", b"", PIXEL, 404, 410, 403])
def test_what_is_no_picture_is_a_dead_link(web, tmp_path, content, capsys):
    web.contents["/102.gif"] = content
    assert run(tmp_path) == 1
    assert "2 of 3 here, 1 missing: 1 dead links (102.jpg)" in capsys.readouterr().out


@pytest.mark.parametrize("content", [500, 429, "cut"])
def test_a_link_that_fails_for_now_is_asked_again_by_the_next_call(web, tmp_path, content, capsys):
    if content == "cut":
        web.cuts["/102.gif"] = 20
    else:
        web.contents["/102.gif"] = content
    assert run(tmp_path) == 1
    assert "1 missing: 1 links that could not be reached (rerun the same command)" in capsys.readouterr().out
    web.contents["/102.gif"], web.cuts = GIF, {}
    assert run(tmp_path) == 0


def test_without_a_network_the_links_are_given_up_early(web, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(picture_sets, "_HOPELESS", 2)
    web.contents |= dict.fromkeys(["/101.jpg", "/102.gif", "/103.png"], 503)
    assert run(tmp_path) == 2
    assert "none of the first 2 links could be reached" in capsys.readouterr().err


def test_a_link_to_a_file_of_this_machine_is_not_followed(tmp_path):
    (tmp_path / "own.jpg").write_bytes(JPEG)
    assert picture_sets._follow_one(f"file://{tmp_path}/own.jpg", tmp_path / "copy.jpg") == picture_sets.DEAD
    assert not (tmp_path / "copy.jpg").exists()


def test_an_archive_of_ones_own_fills_in_what_the_links_lack(web, tmp_path):
    web.contents["/102.gif"] = 404
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives/ocr_vqa-images.zip").write_bytes(zipped({"images/102.jpg": GIF}))
    assert run(tmp_path) == 0
    assert (tmp_path / "ocr_vqa/images/102.jpg").read_bytes() == GIF


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>log in</html>", "expected a zip file, found 19 bytes of something else"),
        (zipped({"val2017/1.jpg": JPEG}), "expected members train2017/NAME, found val2017/1.jpg; delete it"),
    ],
)
def test_a_wrong_archive_is_refused_by_name(web, tmp_path, content, message, capsys):
    web.contents["/coco/train2017.zip"] = content
    assert run(tmp_path) == 2
    err = capsys.readouterr().err
    assert "error: COCO train2017: " in err and "coco" in err.split("error: COCO train2017: ")[1].split(": expected")[0]
    assert message in err and not list((tmp_path / "coco/train2017").iterdir())
    if zipfile.is_zipfile(tmp_path / "archives/coco-train2017.zip"):
        (tmp_path / "archives/coco-train2017.zip").unlink()  # as the message says; what is no zip file is gone already
    web.contents["/coco/train2017.zip"] = zipped({f"train2017/{i}.jpg": picture("coco/train2017", i) for i in (1, 2)})
    assert run(tmp_path) == 0


def test_a_damaged_archive_is_refused_and_no_picture_is_written_from_the_damage(web, tmp_path, capsys):
    content = bytearray(web.contents["/vg/VG_100K.zip"])
    place = content.index(picture("vg/VG_100K", 1)) + 30
    content[place] ^= 1
    web.contents["/vg/VG_100K.zip"] = bytes(content)
    assert run(tmp_path) == 2
    assert "vg-VG_100K.zip: damaged (Bad CRC-32" in capsys.readouterr().err
    assert not (tmp_path / "vg/VG_100K/1.jpg").exists()


def test_pictures_that_an_archive_lacks_and_unknown_folders_are_counted(web, tmp_path, capsys):
    web.contents["/gqa/images.zip"] = zipped({"images/1.jpg": picture("gqa/images", 1)})
    assert run(tmp_path) == 1
    assert f"1 of 2 here, 1 missing: 1 not in {tmp_path}/archives/gqa-images.zip (2.jpg)" in capsys.readouterr().out
    file = tmp_path / RECORDS
    file.write_text(json.dumps([{"id": 1, "image": "other/../gqa/9.jpg", "conversations": TURNS}]))
    assert run(tmp_path) == 1
    assert "other/../gqa: 1 named by records, from no source that is known here" in capsys.readouterr().out
    assert not (tmp_path / "gqa/9.jpg").exists()


def test_a_list_of_links_that_is_none_is_refused(web, tmp_path, capsys):
    web.contents["/dataset.json"] = b"<html>quota exceeded</html>"
    assert run(tmp_path) == 2
    assert 'dataset.json: expected a JSON object of {"NAME": {"imageURL": ...}}' in capsys.readouterr().err
