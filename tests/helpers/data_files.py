"""Records and pictures, and the files that hold them."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
WARM = ("red", "yellow")
QUESTIONS = ["Is there a warm colour?", "Is there a warm colour in the image?"]
POPE_SUFFIX = "\nAnswer the question using a single word or phrase."  # what lmms-eval's task writes after a question
HUMAN, GPT = {"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}
TURNS = [HUMAN, GPT]


def turns(*texts):
    """A conversation that begins with the human."""
    return [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]


def write_varied(tiny: Path, path: Path) -> Path:
    """Writes the tiny model's 24 conversations as samples of 110 to 330 tokens; returns `path`."""
    records = json.loads((tiny / "data/finetune.json").read_text())
    for index, record in enumerate(records):
        record["conversations"][0]["value"] += "?" * (index * 7 % 24 * 9)
    path.write_text(json.dumps(records))
    return path


def write_without_targets(tiny: Path, path: Path, indices: set[int]) -> Path:
    """Writes the tiny model's conversations, those of `indices` with questions of 2,000 characters; returns `path`."""
    records = json.loads((tiny / "data/finetune.json").read_text())
    for index in indices:
        records[index]["conversations"][0]["value"] += "?" * 2000
    path.write_text(json.dumps(records))
    return path


def write_data(folder, num_records: int = 24) -> None:
    """Coloured squares with questions; every third record is text only."""
    (folder / "images").mkdir(parents=True)
    captions, questions = [], []
    for index in range(num_records):
        colour = list(COLOURS)[index % len(COLOURS)]
        image = Image.new("RGB", (20, 16), "white")
        ImageDraw.Draw(image).rectangle((4, 4, 12, 12), fill=COLOURS[colour])
        image.save(folder / "images" / f"{index}.png")
        own, answer = {"image": f"{index}.png"}, colour + "!" * (index % 5)
        caption = turns("<image>\nSay what it is.", f"a {colour} square")
        captions.append({"id": f"c{index}", **own, "conversations": caption})
        if index % 3 == 2:
            questions.append({"id": f"q{index}", "conversations": turns(f"Spell {colour}.", answer)})
        else:
            questions.append({"id": f"q{index}", **own, "conversations": turns("<image>\nWhich colour?", answer)})
    (folder / "pretrain.json").write_text(json.dumps(captions))
    (folder / "finetune.json").write_text(json.dumps(questions))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (9, 7), seed: int = 0) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    levels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    return Image.fromarray(levels if bands > 1 else levels[:, :, 0], mode)


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
BYTES = [encoded(noise(seed=i)) for i in range(8)]


def shard(path: Path, images: pa.Array | None, count: int, rows: int = 3, turns: list | None = None, **more) -> Path:
    """Rows with a placeholder for each image that they have, unless `turns` are given."""
    counts = [how_many(image) for image in images.to_pylist()] if images is not None else [0] * count
    conversations = pa.array([turns or [{"from": "human", "value": "<image>" * n + "?"}, GPT] for n in counts])
    columns = {"id": pa.array([f"{path.stem}-{i}" for i in range(count)]), "conversations": conversations}
    columns |= {"data_source": pa.array(["x"] * count), **more} | ({} if images is None else {"image": images})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def how_many(image: object) -> int:
    if isinstance(image, list):
        return len(image)
    return any(image.values()) if isinstance(image, dict) else image is not None
