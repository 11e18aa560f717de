"""A file or folder is replaced at once: the old content stays until the new one is complete."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from paths import ROOT

from llava.utils.files import replace_folder, replacing, write_json, write_text


def test_the_old_content_stays_until_the_new_content_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, synced=True) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_an_error_keeps_the_old_content_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing(path) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_leaves_is_overwritten_by_the_next(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from llava.utils.files import replacing
        with replacing(Path(sys.argv[1])) as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "file"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], cwd=ROOT)
        assert not path.exists() and len(list(tmp_path.iterdir())) == 1
    write_text(path, "whole")
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_readable_utf_8_whatever_a_file_name_holds(tmp_path):
    write_json(tmp_path / "file", {"name": "größer"})
    assert (tmp_path / "file").read_bytes() == '{\n "name": "größer"\n}\n'.encode()
    name = os.fsdecode(b"undecodable \xff")
    write_json(tmp_path / "file", name)
    assert json.loads((tmp_path / "file").read_bytes()) == name


def test_a_folder_takes_the_place_of_another_and_of_none(tmp_path):
    new, place, old = (tmp_path / name for name in ("new", "place", "old"))
    for content in ("first", "second"):
        new.mkdir()
        (new / content).touch()
        old.mkdir()  # left by a process that was killed
        (old / "left").touch()
        replace_folder(new, place, old)
        assert list(tmp_path.iterdir()) == [place] and [file.name for file in place.iterdir()] == [content]
