"""Inputs of a training run that are there, as far as a look at their names tells; no run can read them."""

from pathlib import Path


def inputs_in(folder: Path) -> dict[str, Path]:
    """Makes them in `folder`; the variables that name them."""
    (folder / "config.json").write_text("{}")
    (folder / "data.json").write_text("[]")
    return {"MODEL_PATH": folder, "VISION_TOWER": folder, "DATA_PATH": folder / "data.json", "IMAGE_FOLDER": folder}
