"""Records whose pictures have all shapes, and the flags that cut them into crops of the tiny tower's 16 pixels."""

import json
from pathlib import Path

from data_files import noise, turns

GRIDS = "[[16,32],[32,16],[32,32],[48,16]]"
ANYRES = {"image_aspect_ratio": "anyres_max_2", "image_grid_pinpoints": GRIDS, "mm_patch_merge_type": "spatial_unpad"}
SHAPES = [(20, 16), (64, 17), (17, 64), (48, 16), (15, 15), (100, 100), (90, 11), (8, 70)]


def write_shapes(folder: Path) -> dict[str, Path]:
    """Writes records about pictures of `SHAPES`, some with two pictures or none; the flags that name them."""
    (folder / "images").mkdir(parents=True)
    records = []
    for index, shape in enumerate(SHAPES):
        noise(size=shape, seed=index).save(folder / "images" / f"{index}.png")
        records.append({"image": f"{index}.png", "conversations": turns("<image>\nWhat?", "It is." + "!" * index)})
    records.insert(2, {"image": ["1.png", "5.png"], "conversations": turns("<image> or <image>?", "Both.")})
    records.insert(5, {"conversations": turns("Which colour?", "Red.")})
    for index, record in enumerate(records):
        record["id"] = str(index)
    captions = [r | {"conversations": turns("<image>", "noise")} for r in records if isinstance(r.get("image"), str)]
    for name, some in (("finetune", records), ("pretrain", captions)):
        (folder / f"{name}.json").write_text(json.dumps(some))
    return {"data_path": folder / "finetune.json", "image_folder": folder / "images"}
