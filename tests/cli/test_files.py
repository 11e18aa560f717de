"""A file or folder is replaced at once: the old content stays until the new one is complete."""

from llava.utils.files import replace_folder, replacing


def test_the_old_content_stays_until_the_new_content_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, synced=True) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_another_and_of_none(tmp_path):
    new, place, old = (tmp_path / name for name in ("new", "place", "old"))
    for content in ("first", "second"):
        new.mkdir()
        (new / content).touch()
        old.mkdir()  # left by a process that was killed
        (old / "left").touch()
        replace_folder(new, place, old)
        assert list(tmp_path.iterdir()) == [place] and [file.name for file in place.iterdir()] == [content]
