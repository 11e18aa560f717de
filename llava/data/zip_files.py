"""Pictures from a zip file as it was downloaded: its list of members is read once and kept as sorted arrays on disk.

`zipfile` reads the list at every opening and keeps an object per member: for half a million pictures 10 seconds and
hundreds of MB in every worker. Here a worker maps 48 bytes per member, and reads each by its offset. Nothing is ever
extracted to a file, so a member's name cannot lead anywhere.
"""

import os
import zipfile
import zlib
from functools import cached_property, partial
from hashlib import blake2b, sha256
from pathlib import Path
from struct import Struct
from unicodedata import normalize

import numpy as np

from llava.data.cache import cache_folders, made_once
from llava.data.errors import DataError
from llava.utils.digests import settled_stamp

_FORMAT = 3  # of the kept arrays
_LOCAL_HEADER = Struct("<4sHHHHHIIIHH")
_UTF8, _ENCRYPTED = 0x800, 0x1


class ZipMembers:
    """The members of a zip file, by name; safe to use in processes forked from the one that made it.

    The list of members is kept in `cache_dir`, by default `.llava_cache` beside the zip file.

    Raises:
        DataError: it is not a zip file, or holds no files.
        OSError: no cache folder can be written.
    """

    def __init__(self, path: Path, cache_dir: str | None = None):
        self.path = path
        # The file is too large to be read at every start: its path and stamp stand for its content.
        stamp = sha256(f"{path.absolute()} {settled_stamp(path)}".encode()).hexdigest()[:16]
        name = f"{path.name}.{stamp}.members{_FORMAT}.npy"
        self._list = made_once(name, cache_folders(path, cache_dir), partial(_write_list, path))

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_list": self._list}

    @cached_property
    def members(self) -> np.ndarray:
        """The list of members: a row per field and a column per member, uint64, sorted by the hash of the name."""
        return np.load(self._list, mmap_mode="r")

    @cached_property
    def content(self) -> str:
        """A hash of all members' names, sizes and checksums."""
        return sha256(self.members.tobytes()).hexdigest()

    @cached_property
    def _file(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def read(self, name: str, largest: int) -> bytes:
        """The content of a member.

        Raises:
            FileNotFoundError: there is no member of that name.
            OSError: it is damaged, encrypted, packed by a method other than deflate, or of more than `largest` bytes.
        """
        key = np.uint64(_name_hash(name))
        place = int(self.members[0].searchsorted(key))
        if place == self.members.shape[1] or self.members[0, place] != key:
            raise FileNotFoundError(name)
        offset, packed, size, crc, method = (int(value) for value in self.members[1:, place])
        if size > largest:
            raise OSError(f"{size:,} bytes once unpacked; expected at most {largest:,}")
        header = self._bytes(offset, _LOCAL_HEADER.size)
        signature, _, flags, *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        stored = self._bytes(offset + len(header), name_length)
        if signature != b"PK\x03\x04" or _name_hash(_decoded(stored, flags)) != key:
            raise OSError("the zip file does not hold what its list says")
        if flags & _ENCRYPTED or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise OSError("encrypted, or packed by a method other than deflate; pack the zip file again")
        data = self._bytes(offset + len(header) + name_length + extra_length, packed)
        if method == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)  # never more than the list says
            except zlib.error as error:
                raise OSError(f"damaged in the zip file: {error}") from error
        if len(data) != size or zlib.crc32(data) != crc:
            raise OSError("damaged in the zip file: its checksum differs")
        return data

    def example(self) -> str:
        """The name of the first member; empty where it cannot be read."""
        offset = int(self.members[1].min())
        try:
            fields = _LOCAL_HEADER.unpack(self._bytes(offset, _LOCAL_HEADER.size))
            return _decoded(self._bytes(offset + _LOCAL_HEADER.size, fields[-2]), fields[2])
        except OSError:
            return ""

    def _bytes(self, offset: int, count: int) -> bytes:
        data = os.pread(self._file, count, offset)  # not `read`: forked processes share the file's position
        if len(data) != count:
            raise OSError("the zip file is cut off")
        return data


def _decoded(name: bytes, flags: int) -> str:
    """A member's name; Info-ZIP and macOS write UTF-8 without the flag that says so."""
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return name.decode("utf-8" if flags & _UTF8 else "cp437", "replace")


def _name_hash(name: str) -> int:
    """The hash of a name, in whichever form its accents are written."""
    name = normalize("NFC", name)
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _write_list(path: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
        coded = [info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437") for info in members]
        files = {_decoded(name, info.flag_bits): info for name, info in zip(coded, members, strict=True)}  # the last
        if "" in files:
            raise ValueError("a member has no name")
        rows = [
            (_name_hash(name), info.header_offset, info.compress_size, info.file_size, info.CRC, info.compress_type)
            for name, info in files.items()
        ]
        columns = np.array(rows, np.uint64).T
    except Exception as error:  # zipfile raises whatever a damaged list leads it to
        raise DataError(path, f"neither a folder nor a readable zip file ({error})") from error
    if not files:
        raise DataError(path, "the zip file holds no files")
    with target.open("wb") as file:
        np.save(file, np.ascontiguousarray(columns[:, columns[0].argsort()]))
