"""The paper's measurements of models whose code is in their repositories: tiny ones in their form.

What a command writes is compared with a float64 run of the same tiny model, whose inputs are made here.
"""

import io
import json

import numpy as np
import own_code_models as own
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import encoded
from PIL import Image

from llava.analysis.__main__ import main
from llava.compare.reproduce import MODELS

pytestmark = pytest.mark.slow
SHAPES = ((16, 16), (24, 16), (8, 32), (16, 8))  # multiples of two patches, which no processor resizes
QUESTION = "What is it?"
WRITERS = {"MoonViT-SO-400M": own.write_moonvit, "Kimi-VL": own.write_kimi_vl, "Ovis2.5": own.write_ovis2_5}


def pictures() -> list[np.ndarray]:
    """[H, W, 3] uint8."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in SHAPES]


def shard() -> bytes:
    """The pictures as a benchmark's file."""
    rows = []
    for picture in pictures():
        image = {"bytes": encoded(Image.fromarray(picture)), "path": None}
        rows.append({"image": image, "question": QUESTION, "answer": "A"})
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each model, named as its repository: by this name the paper's numbers are found."""
    root = tmp_path_factory.mktemp("own")
    found = {name: root / MODELS[name].rpartition("/")[2] for name in WRITERS}
    for name, write in WRITERS.items():
        write(found[name])
    return found


@pytest.fixture(scope="module")
def measure(folders, tmp_path_factory):
    """A function from a model to the rows of `interface-norms`."""
    root = tmp_path_factory.mktemp("measured")
    (root / "data").mkdir()
    (root / "data/a.parquet").write_bytes(shard())

    def rows(model):
        words = ["interface-norms", "--model", f"{model}={folders[model]}", "--data", str(root / "data")]
        words += ["--samples", "4", "--device", "cpu", "--trust-remote-code", "--output-dir", str(root / model)]
        assert main(words) == 0
        return json.loads((root / model / "interface-norms.json").read_text())["rows"]

    return rows


# --- float64 ----------------------------------------------------------------------------------------------------------


def patches_of(picture: np.ndarray, mean: float, std: float) -> torch.Tensor:
    """[H / 4, W / 4, 3, 4, 4] float64."""
    pixels = (picture / 255 - mean) / std
    rows, columns = picture.shape[0] // 4, picture.shape[1] // 4
    return torch.from_numpy(pixels.reshape(rows, 4, columns, 4, 3).transpose(0, 2, 4, 1, 3).copy())


def by_moonvit(tower: torch.nn.Module) -> list[list[torch.Tensor]]:
    """What the tower gives for each picture alone: a list of one tensor [G, 4, E]."""
    grids = [patches_of(picture, 0.5, 0.5) for picture in pictures()]
    return [tower(patches.flatten(0, 1), torch.tensor([patches.shape[:2]])) for patches in grids]


def close(row: dict, tensors) -> bool:
    """Whether a row has mean and standard deviation of the norms of these tokens."""
    norms = torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]).norm(dim=-1)
    expected = {"mean": norms.mean().item(), "std": norms.std(correction=0).item()}
    return all(row[name] == pytest.approx(value, rel=2e-4) for name, value in expected.items())


# --- what the paper's items measure -----------------------------------------------------------------------------------


@torch.no_grad()
def test_moonvit_is_measured_alone_after_its_last_norm(measure):
    (row,) = measure("MoonViT-SO-400M")
    assert row["norms of"] == "encoder tokens" and row["mean (paper)"] == 72.17
    assert close(row, [tokens for (tokens,) in by_moonvit(own.moonvit().double())])


@torch.no_grad()
def test_kimi_vl_is_measured_before_and_after_its_projector(measure):
    model, rows = own.kimi_vl().double(), {row["norms of"]: row for row in measure("Kimi-VL")}
    features = by_moonvit(model.vision_tower)
    assert close(rows["encoder tokens"], [tokens for (tokens,) in features])
    for place in ("after the projector", "entering the LLM"):
        assert close(rows[f"visual tokens {place}"], map(model.multi_modal_projector, features))
    assert close(rows["text embedding matrix"], [model.get_input_embeddings().weight])
    assert rows["visual tokens after the projector"]["mean (paper)"] == 4.78


@torch.no_grad()
def test_ovis_visual_and_text_vocabularies_are_measured(measure, folders):
    model, rows = own.ovis2_5(folders["Ovis2.5"]).double(), {row["norms of"]: row for row in measure("Ovis2.5")}
    features, projected = [], []
    for picture in pictures():
        patches = patches_of(picture, own.MEAN["image_mean"][0], own.MEAN["image_std"][0])
        height, width = patches.shape[:2]
        squares = patches.reshape(height // 2, 2, width // 2, 2, -1).transpose(1, 2).flatten(0, 3)
        grid = torch.tensor([[1, height, width]])
        features.append(model.visual_tokenizer.vit(squares, grid).hidden_states[-1])
        projected.append(model.vte(model.visual_tokenizer(squares, grid)))
    assert close(rows["visual vocabulary"], [model.vte.weight])
    assert close(rows["text embedding matrix"], [model.get_wte().weight])
    assert close(rows["encoder tokens"], features)
    for place in ("after the projector", "entering the LLM"):
        assert close(rows[f"visual tokens {place}"], projected)
    assert rows["visual vocabulary"]["mean (paper)"] == 64
