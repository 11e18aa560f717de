"""What the trainings of an item need that is not here: models of the hub, data sets, and what the caller must provide.

The trainer downloads models into the cache of the hub's library, and `llava.data.prepare` fetches the recipes' data.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llava.compare.engine import DEMO
from llava.compare.published import DATASET, Published
from llava.data.prepare import SOURCES
from llava.launch.inputs import HUB, MISSING, PREPARED, WRONG, cache_of, is_cached

Recipe = dict[str, Any]
"""A stage's run, as `DRY_RUN=json` prints it."""


def from_hub(recipes: Sequence[Recipe]) -> list[Published]:
    """The models and data sets that are downloaded before or in a training."""
    models = [Published(name, place=cache_of(name)) for name in _values(recipes, ("model", "vision tower"), HUB)
              if not is_cached(name)]  # fmt: skip
    sources = [SOURCES[name] for name in missing_data(recipes)]
    return models + [Published(each.repository, DATASET, each.patterns, Path(each.folder)) for each in sources]


def missing_data(recipes: Sequence[Recipe]) -> list[str]:
    """The data sets of `llava.data.prepare` of which files are missing where the scripts expect them."""
    missing = [Path(path) for path in _values(recipes, ("data", "images"), MISSING)]
    return [name for name, source in SOURCES.items() if any(path.is_relative_to(source.folder) for path in missing)]


def callers(recipes: Sequence[Recipe]) -> list[str]:
    """The inputs that are missing or wrong, and that neither a training nor a command of this tree makes."""
    lacking = [(recipe["preset"], each) for recipe in recipes for each in recipe["inputs"] if each["what"] != "adapter"]
    return [
        f"{each['what']} {each['value']}: {each['hint']}"
        for preset, each in lacking
        if each["state"] == WRONG or (each["state"] == MISSING and not _is_made(preset, Path(each["value"])))
    ]


def _is_made(preset: str, path: Path) -> bool:
    """Whether a command of this tree makes it for the preset: the playground's inputs for the demo, else the data."""
    folders = [PREPARED] if preset == DEMO else [source.folder for source in SOURCES.values()]
    return any(path.is_relative_to(folder) for folder in folders)


def _values(recipes: Sequence[Recipe], kinds: Sequence[str], state: str) -> Iterator[str]:
    """The values of the inputs of these kinds in this state, each once."""
    inputs = [each for recipe in recipes for each in recipe["inputs"]]
    yield from dict.fromkeys(each["value"] for each in inputs if each["what"] in kinds and each["state"] == state)
