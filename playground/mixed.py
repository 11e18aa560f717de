"""Scenes and stamps as one training set, for one model on both."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava.utils.files import write_json
from playground import scenes, stamps
from playground.store import PlaygroundError, build, read_manifest

FOLDER = "mixed"
SETS = (scenes.FOLDER, stamps.FOLDER)
STAGES = ("pretrain.json", "finetune.json")


@dataclass
class Settings:
    """`python -m playground mixed` has no settings: it follows the two sets."""


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/mixed` with both stages' records; pictures stay where they are, named from `root`."""
    manifests = {name: read_manifest(root / name) for name in SETS}
    for name, manifest in manifests.items():
        if manifest is None:
            raise PlaygroundError(f"{root / name}: no prepared pictures. Run `python -m playground {name}` first.")

    def write(folder: Path) -> dict[str, Any]:
        for stage in STAGES:
            write_json(folder / stage, [record for name in SETS for record in records_from(root, name, stage)])
        return {"sets": list(SETS)}

    return build(
        root / FOLDER, "mixed", {name: manifest["settings"] for name, manifest in manifests.items()}, write, force
    )


def records_from(root: Path, name: str, stage: str) -> list[dict[str, Any]]:
    """Return the set's records of one stage, their pictures named from `root`."""
    records = json.loads((root / name / stage).read_text(encoding="utf-8"))
    return [r | {"image": f"{name}/images/{r['image']}"} if "image" in r else r for r in records]
