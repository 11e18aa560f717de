"""Opens the pictures of records: files below a folder, members of a zip file, bytes in rows of Parquet files.

Names in records are not trusted: a path may not lead out of the folder by `..` or from the root. Links, which the owner
of the folder made, are followed. Only formats that Pillow itself decodes are tried, and a file that is too large for a
picture is not read.
"""

import functools
import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from unicodedata import normalize

from PIL import Image

from llava.data.checks import ImagePlace, PlacedImage, Problem, RowImage, starts_from
from llava.data.errors import DataError, named_by
from llava.data.parquet_files import LostRows, RowReader
from llava.data.zip_files import ZipMembers
from llava.utils.digests import bytes_digest
from llava.utils.pixels import (
    check_header,
    exif_orientation,
    has_wide_levels,
    to_rgb,
)

LARGEST_FILE = 1 << 29  # bytes; more than any picture has within Pillow's limit of pixels
# EPS would start another program; the other formats that are missing here are no pictures, or not used for data.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "MPO", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
Image.init()
_KNOWN_FORMATS = tuple(name for name in _FORMATS if name in Image.OPEN)  # that this Pillow was built with


class ImageError(ValueError):
    """A picture that cannot be opened: `problem.kind` is `image_missing`, `image_outside` or `image_unreadable`."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.problem = Problem(kind, message)


class ImageStore:
    """Opens the pictures that records name.

    Args:
        image_folder: a folder, a `.zip` file, or None for the working directory.
        cache_dir: see `ZipMembers`.
        others: the folders or zip files of `PlacedImage`s; None stands for `image_folder`.
        setting: the flag or entry that gave `image_folder`, as messages name it.

    Raises:
        DataError: there is no such folder, or the zip file cannot be read.
        OSError: see `ZipMembers`.
    """

    def __init__(
        self,
        image_folder: str | Path | None,
        cache_dir: str | None = None,
        others: Sequence[str | None] = (),
        setting: str = "--image_folder",
    ):
        self.root, self.setting = Path(image_folder or ""), setting
        with named_by(setting):
            if not self.root.exists():
                raise DataError(self.root, f"no such folder or zip file{starts_from(self.root)}")
            self.archive = ZipMembers(self.root, cache_dir) if self.root.is_file() else None
        self._rows = RowReader()
        entry = "the mixture entry's image_folder"
        self.others = {other: ImageStore(other, cache_dir, setting=entry) for other in others if other is not None}

    def identity(self) -> str:
        """A text that identifies the pictures by path, and a zip file by content too."""
        own = f"{os.path.realpath(self.root)} {self.archive.content if self.archive else ''}"
        return "; ".join([own, *(store.identity() for store in self.others.values())])

    def content(self, images: Iterable[ImagePlace], shard_digest: Callable[[Path], str] = bytes_digest) -> str:
        """16 hexadecimal digits of a SHA-256 over names and bytes of pictures, wherever their folder is.

        Of a zip file the checksums of all members count, of a picture in a row the `shard_digest` of its Parquet file.
        """
        digest, shard_digest = hashlib.sha256(), functools.cache(shard_digest)
        for image in dict.fromkeys(images):
            digest.update(f"{self._content(image, shard_digest)};".encode())
        return digest.hexdigest()[:16]

    def _content(self, image: ImagePlace, shard_digest: Callable[[Path], str]) -> str:
        if isinstance(image, PlacedImage):
            return self.others[image.folder]._content(image.name, shard_digest)
        if isinstance(image, RowImage):
            return f"{image.row} {image.number} {shard_digest(Path(image.shard))}"
        if self.archive:
            return f"{image} {self.archive.content}"
        try:
            return f"{image} {bytes_digest(Path(self._file(image)))}"
        except (OSError, ImageError) as error:
            return f"{image} {self._fault(image, error).problem.kind}"

    def open(self, image: ImagePlace) -> Image.Image:
        """The picture, decoded, with levels of 8 bits; of an animated picture, the first frame.

        Raises:
            ImageError: it is missing, is outside the folder, or cannot be decoded; the message names it.
        """
        with self._header(image) as picture:
            return decoded(picture)

    def size(self, image: ImagePlace) -> tuple[int, int]:
        """Width and height of the picture that `open` gives, from its header alone.

        Raises:
            ImageError: it is missing, is outside the folder, or is not a picture; the message names it.
        """
        with self._header(image) as picture:
            return picture.size

    def check(self, image: ImagePlace, full_decode: bool = False) -> tuple[tuple[int, int], Problem | None]:
        """The size of a picture, and what is wrong with it, by its header or by decoding it, or the first warning."""
        try:
            with self._header(image) as picture:
                problem = self._warning(picture, full_decode)
                named = problem and Problem(problem.kind, f"image {self.name(image)}: {problem.message}")
                return picture.size, named
        except ImageError as error:
            return (0, 0), error.problem

    def _warning(self, picture: Image.Image, full_decode: bool) -> Problem | None:
        if full_decode or has_wide_levels(picture):  # few have; only their levels show what becomes of them
            decoded(picture)
        late = picture.format == "PNG" and "exif" not in picture.info  # a search behind the pixels would decode them
        if not late and (number := exif_orientation(picture)) != 1:
            advice = "if that is on its side, save it upright"
            return Problem("turned", f"it is used as stored, not by its EXIF orientation {number}; {advice}")
        return None

    @contextmanager
    def _header(self, image: ImagePlace) -> Iterator[Image.Image]:
        if isinstance(image, PlacedImage):
            with self.others[image.folder]._header(image.name) as picture:
                yield picture
            return
        try:
            with picture_header(self._source(image)) as picture:
                yield picture
        except LostRows:
            raise
        except Exception as error:  # Pillow's decoders raise whatever damaged bytes lead them to
            raise self._fault(image, error) from error

    def _source(self, image: str | RowImage) -> str | BytesIO:
        if isinstance(image, RowImage):
            data = self._rows.read(image)
        elif self.archive:
            data = self.archive.read(image, LARGEST_FILE)
        else:
            return self._file(image)
        if not data:
            raise OSError("it has no bytes")
        return BytesIO(data)

    def _file(self, name: str) -> str:
        paths = [os.path.join(self.root, form) for form in (name, normalize("NFC", name), normalize("NFD", name))]
        path, root = next(filter(os.path.exists, paths), paths[0]), os.path.abspath(self.root)
        try:
            target = os.path.abspath(path)
            status = os.stat(path) if os.path.commonpath([root, target]) == root else None
        except ValueError as error:  # a name that no file can have
            raise OSError(str(error)) from error
        if status is None:
            advice = "name a folder that holds all images or links to them, or give a mixture's entries their own"
            message = f"image {self.name(name)} is outside {self.setting} {self.root} (at {target:.500}); {advice}"
            raise ImageError("image_outside", message)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if not 0 < status.st_size <= LARGEST_FILE:
            raise OSError(f"{status.st_size:,} bytes; expected 1 to {LARGEST_FILE:,}")
        return path

    def name(self, image: ImagePlace) -> str:
        """What messages call a picture."""
        return str(image) if not isinstance(image, str) else f"{os.path.join(self.root, image)!s:.500}"

    def _fault(self, image: str | RowImage, error: Exception) -> ImageError:
        """What is wrong with a picture that could not be read."""
        if isinstance(error, ImageError):
            return error
        if not isinstance(error, FileNotFoundError):
            fault = str(error) or type(error).__name__
            return ImageError("image_unreadable", f"image {self.name(image)} cannot be decoded ({fault:.500})")
        example = f" (a member of the zip file is {self.archive.example()!r})" if self.archive else ""
        where = "" if self.archive else starts_from(self.root)
        advice = f"check {self.setting} and the record{example}"
        return ImageError("image_missing", f"image {self.name(image)} does not exist{where}; {advice}")


@contextmanager
def picture_header(source: str | Path | BytesIO) -> Iterator[Image.Image]:
    """A picture that is not decoded yet; only `_FORMATS` are tried, and Pillow's limit of pixels is enforced.

    Raises:
        Exception: whatever damaged bytes lead Pillow's decoders to, here and within the context.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(source, formats=_KNOWN_FORMATS) as picture:
            check_header(picture)
            if picture.format == "TIFF":
                picture.filename = ""  # Pillow 13 maps an uncompressed one that it turns, with its sides swapped
            yield picture


def decoded(picture: Image.Image) -> Image.Image:
    """A picture of `picture_header`, decoded as it is stored, with levels of at most 8 bits.

    Raises:
        Exception: see `picture_header`.
    """
    picture.load()
    return to_rgb(picture) if has_wide_levels(picture) else picture
