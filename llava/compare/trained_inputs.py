"""What the trainings of an item take from the hub, and what they lack that the caller must provide.

The trainer downloads models into the hub's own cache, and `llava.data.prepare` fetches the recipes' data.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava.compare.published import Published
from llava.data.prepare import SOURCES
from llava.launch.inputs import HUB, MISSING, PREPARED, WRONG

Recipe = dict[str, Any]
"""A stage's run, as `DRY_RUN=json` prints it."""


def from_hub(recipes: Sequence[Recipe]) -> list[Published]:
    """The models that are not in the hub's cache, and the data sets of which files are missing."""
    from huggingface_hub import try_to_load_from_cache

    inputs = [each for recipe in recipes for each in recipe["inputs"] if each["state"] == HUB]
    names = dict.fromkeys(each["value"] for each in inputs if each["what"] in ("model", "vision tower"))
    models = [Published(name) for name in names if not try_to_load_from_cache(name, "config.json")]
    sources = [SOURCES[name] for name in missing_data(recipes)]
    return models + [Published(each.repository, Path(each.folder), "dataset", each.patterns) for each in sources]


def missing_data(recipes: Sequence[Recipe]) -> list[str]:
    """The data sets of `llava.data.prepare` of which files are missing where the scripts expect them."""
    missing = [Path(each["value"]) for each in _lacking(recipes)]
    return [name for name, source in SOURCES.items() if any(path.is_relative_to(source.folder) for path in missing)]


def of_the_caller(recipes: Sequence[Recipe]) -> list[str]:
    """The inputs that are missing or wrong, and that neither a training nor a command of this tree makes."""
    lines = [f"{each['what']} {each['value']}: {each['hint']}" for each in _lacking(recipes)
             if each["state"] == WRONG or not Path(each["value"]).is_relative_to(PREPARED)]  # fmt: skip
    return list(dict.fromkeys(lines))


def _lacking(recipes: Sequence[Recipe]) -> list[dict[str, str]]:
    inputs = [each for recipe in recipes for each in recipe["inputs"] if each["what"] != "adapter"]
    return [each for each in inputs if each["state"] in (MISSING, WRONG)]
