"""Code is loaded only from folders into which nobody else can write."""

import os
from pathlib import Path

import pytest
from torch.utils.cpp_extension import get_default_build_root
from transformers.utils.hub import HF_MODULES_CACHE

from llava.analysis.models import config_fields
from llava.train.kernels import compile_layers
from llava.train.train import parse_arguments
from llava.utils.code_folders import CODE_FOLDERS, refuse_shared, refuse_shared_variable

OTHER_USER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def test_a_folder_that_only_its_user_writes_is_taken_and_made_where_it_is_missing(tmp_path):
    folder = tmp_path / "made" / "here"
    refuse_shared(folder, "--folder ")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    (folder / "gone").symlink_to("nowhere")
    refuse_shared(folder, "--folder ")
    if os.getegid() == os.geteuid():
        folder.chmod(0o775)  # writable for the user's own group, as where the umask is 002
        refuse_shared(folder, "--folder ")


@pytest.mark.parametrize("mode", [0o757, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=f"--folder {tmp_path}: .*others can write into it .mode {mode:o}.") as error:
        refuse_shared(tmp_path, "--folder ")
    assert "\n" not in str(error.value)


@AS_ROOT
@pytest.mark.parametrize("whose", ["the folder", "a file in it", "the link to it", "the group"])
def test_what_belongs_to_another_user_is_refused(tmp_path, whose):
    folder = link = tmp_path / "folder"
    folder.mkdir()
    if whose == "the folder":
        os.chown(folder, OTHER_USER, -1)
    elif whose == "a file in it":
        (folder / "op.so").touch()
        os.chown(folder / "op.so", OTHER_USER, -1)
    elif whose == "the link to it":
        link = tmp_path / "link"
        link.symlink_to(folder)
        os.chown(link, OTHER_USER, -1, follow_symlinks=False)
    else:
        folder.chmod(0o775)
        os.chown(folder, -1, OTHER_USER)
    with pytest.raises(ValueError, match="code is executed from there"):
        refuse_shared(link, "--folder ")


@pytest.mark.parametrize("cache", [None, "/home/user/my cache"])
def test_the_folders_are_those_that_the_libraries_take(monkeypatch, cache):
    assert str(Path(os.environ.get("HF_MODULES_CACHE", CODE_FOLDERS["HF_MODULES_CACHE"]()))) == HF_MODULES_CACHE
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert get_default_build_root() == str(CODE_FOLDERS["TORCH_EXTENSIONS_DIR"]())


@pytest.mark.parametrize(
    ("variable", "use"),
    [
        ("TORCH_EXTENSIONS_DIR", lambda: parse_arguments(["--deepspeed", "deepspeed_configs/zero2.json"])),
        ("TORCHINDUCTOR_CACHE_DIR", lambda: compile_layers([])),
        ("TRITON_CACHE_DIR", lambda: compile_layers([])),
        ("HF_MODULES_CACHE", lambda: config_fields("no-such-model", trust_remote_code=True)),
    ],
)
def test_every_user_of_such_a_folder_looks_at_it_first(tmp_path, monkeypatch, variable, use):
    for name in CODE_FOLDERS:
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / variable).mkdir()
    (tmp_path / variable).chmod(0o777)
    with pytest.raises(ValueError, match=f"^{variable}="):
        use()
    with pytest.raises(ValueError, match=f"^{variable}="):
        refuse_shared_variable(variable)
