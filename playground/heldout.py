"""Held-out questions of the prepared pictures as data sets for lmms-eval: Parquet files with a README."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from llava.utils.digests import bytes_digest
from playground.options import PICTURES
from playground.records import IMAGE_TOKEN
from playground.store import PlaygroundError, build, read_manifest

FOLDER = "harness"  # holds data sets as <org>/<name>, by which tasks name them
ORGANISATION = "heldout"
FORMAT = 1  # raise it when the same pictures and questions give other files
README = """---
configs:
- config_name: default
  data_files:
  - split: test
    path: data/test-*
---
"""
# The types by which `datasets` reads the columns; it takes them from the file's own metadata.
TEXT, NUMBER = ({"dtype": name, "_type": "Value"} for name in ("string", "float64"))
FEATURES = {
    "id": TEXT,
    "kind": TEXT,
    "question": TEXT,
    "answer": TEXT,
    "chance": NUMBER,
    "image": {"_type": "Image"},
}


@dataclass
class Settings:
    """What `python -m playground heldout` makes: no settings, it follows the prepared sets."""


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/harness` with one data set for each prepared set, made unless it is complete."""
    prepared = [name for name in PICTURES if (root / name / "heldout.json").is_file()]
    if not prepared:
        raise PlaygroundError(f"{root}: no prepared pictures; run `python -m playground {PICTURES[0]}` first")
    for name in prepared:
        manifest = read_manifest(root / name)
        records = bytes_digest(root / name / "heldout.json")  # which a user may have replaced
        source = {"source": manifest and manifest["settings"], "records": records, "format": FORMAT}
        build(root / FOLDER / ORGANISATION / name, "heldout", source, partial(write_set, root / name), force)
    return root / FOLDER


def write_set(source: Path, folder: Path) -> dict[str, Any]:
    """Write the data set of one prepared set to `folder`; return the facts for the manifest."""
    records = json.loads((source / "heldout.json").read_text(encoding="utf-8"))
    rows = [row(record, source / "images") for record in records]
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    types = {"chance": pyarrow.float64(), "image": image}
    schema = pyarrow.schema(
        [(name, types.get(name, pyarrow.string())) for name in FEATURES],
        metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
    )
    (folder / "data").mkdir()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows, schema=schema), folder / "data/test-00000-of-00001.parquet"
    )
    (folder / "README.md").write_text(README, encoding="utf-8")
    return {"questions": len(rows)}


def row(record: dict[str, Any], images: Path) -> dict[str, Any]:
    """Return one row of the data set; `chance` is the probability of guessing right among the choices."""
    question, answer = (message["value"] for message in record["conversations"][:2])
    return {
        "id": record["id"],
        "kind": record["kind"],
        "question": question.removeprefix(f"{IMAGE_TOKEN}\n"),
        "answer": answer,
        "chance": 1 / len(record["choices"]),
        "image": {"bytes": (images / record["image"]).read_bytes(), "path": record["image"]},
    }
