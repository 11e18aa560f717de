"""The files that the page opens and serves: those below its upload folder. Gradio alone would also fetch addresses.

A visitor writes every request's body, so a path in it may be an address, a device or any file of this machine.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

REFUSAL = "The picture is not a file that was uploaded to this page, or it is gone; please choose it again."
_FILE_ROUTE = re.compile(r"/gradio_api/file[=/](.*)", re.DOTALL)


def uploaded_file(path: object, folder: str | Path) -> Path:
    """The file at `path`, with links and `..` resolved.

    Raises:
        ValueError: it is not an existing regular file below `folder`; the message does not say what else it is.
    """
    try:
        if isinstance(path, str):
            file = Path(os.path.realpath(path))
            if file.is_relative_to(os.path.realpath(folder)) and file.is_file():
                return file
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise ValueError(REFUSAL)


def named_files(data: object) -> Iterator[object]:
    """Every file path in an event's inputs."""
    if isinstance(data, dict):
        if data.get("path"):
            yield data["path"]
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            yield from named_files(value)


def may_be_served(url_path: str, folder: str | Path) -> bool:
    """Whether a request's path names no file, or one below `folder`."""
    asked = _FILE_ROUTE.fullmatch(url_path)
    try:
        return not asked or bool(uploaded_file(asked[1], folder))
    except ValueError:
        return False


def refuse_other_files(gradio: ModuleType, page: Any, folder: str | Path) -> None:
    """Makes all events of the page refuse other files with a message, before Gradio copies or downloads them."""
    preprocess_data = page.preprocess_data

    async def checked(block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            for path in named_files(inputs):
                uploaded_file(path, folder)
        except ValueError as error:
            raise gradio.Error(str(error), print_exception=False) from None
        return await preprocess_data(block_fn, inputs, *args, **kwargs)

    page.preprocess_data = checked
