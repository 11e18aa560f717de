"""A file is replaced at once: the old content stays until the new one is complete."""

from llava.utils.files import replacing


def test_the_old_content_stays_until_the_new_content_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, synced=True) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
