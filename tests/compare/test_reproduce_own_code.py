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
from transformers import PreTrainedTokenizerFast

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
    """A function from a command, a model and a file to the file's rows."""
    root = tmp_path_factory.mktemp("measured")
    (root / "data").mkdir()
    (root / "data/a.parquet").write_bytes(shard())

    def rows(command, model, file=None):
        words = [command, "--model", f"{model}={folders[model]}", "--data", str(root / "data"), "--samples", "4"]
        words += ["--device", "cpu", "--trust-remote-code", "--output-dir", str(root / model)]
        assert main(words) == 0
        return json.loads((root / model / f"{file or command}.json").read_text())["rows"]

    return rows


# --- float64 ----------------------------------------------------------------------------------------------------------


def patches_of(picture: np.ndarray, mean: float, std: float) -> torch.Tensor:
    """[H / 4, W / 4, 3, 4, 4] float64."""
    pixels = (picture / 255 - mean) / std
    rows, columns = picture.shape[0] // 4, picture.shape[1] // 4
    return torch.from_numpy(pixels.reshape(rows, 4, columns, 4, 3).transpose(0, 2, 4, 1, 3).copy())


class Seen:
    """What passed through the parts of a tiny model, one picture after the other, by hooks on its modules."""

    def __init__(self, model, encoder: str, projector: str | None = None, layers: str | None = None):
        self.features, self.projected, self.cosines = [], [], []
        model.get_submodule(encoder).register_forward_hook(lambda m, a, out: self.features.append(out))
        if projector:
            model.get_submodule(projector).register_forward_hook(self.project)
        for layer in model.get_submodule(layers) if layers else ():
            layer.register_forward_hook(self.turn, with_kwargs=True)

    def project(self, module, args, out) -> None:
        if not (torch.is_tensor(args[0]) and args[0].dtype == torch.long):  # Ovis' markers
            self.projected.append(out)

    def turn(self, module, args, kwargs, out) -> None:
        before, after = args[0][0], (out if torch.is_tensor(out) else out[0])[0]
        self.cosines.append(torch.cosine_similarity(before[self.visual], after[self.visual], dim=-1))


def moments(tensors) -> dict[str, float]:
    norms = torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]).norm(dim=-1)
    return {"mean": norms.mean().item(), "std": norms.std(correction=0).item()}


def layer_means(seen: Seen, layers: int) -> list[float]:
    """Per layer the mean cosine of visual tokens."""
    return [torch.cat(seen.cosines[layer::layers]).mean().item() for layer in range(layers)]


@pytest.fixture(scope="module")
def kimi(folders):
    """What passes through the tiny Kimi-VL in float64."""
    model = own.kimi_vl().double()
    model.language_model.set_experts_implementation("eager")  # the default has no float64
    seen = Seen(model, "vision_tower.encoder.final_layernorm", "multi_modal_projector", "language_model.model.layers")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders["Kimi-VL"])
    for picture in pictures():
        patches = patches_of(picture, 0.5, 0.5)
        grid = torch.tensor([patches.shape[:2]])
        pads = "<|media_pad|>" * (int(grid.prod()) // 4)
        text = f"<|media_start|>image<|media_content|>{pads}<|media_end|>{QUESTION}\nanswer:"
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        seen.visual = ids[0] == model.config.media_placeholder_token_id
        with torch.no_grad():
            model(ids, torch.ones_like(ids), pixel_values=patches.flatten(0, 1), image_grid_hws=grid, use_cache=False)
    return model, seen


@pytest.fixture(scope="module")
def ovis(folders):
    """What passes through the tiny Ovis 2.5 in float64."""
    model = own.ovis2_5(folders["Ovis2.5"]).double()
    seen = Seen(model, "visual_tokenizer.vit.vision_model.layers.1", "vte", "llm.model.layers")
    for picture in pictures():
        patches = patches_of(picture, own.MEAN["image_mean"][0], own.MEAN["image_std"][0])
        rows, columns = patches.shape[:2]
        squares = patches.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).flatten(0, 3)
        text = [model.text_tokenizer(part).input_ids for part in ("", f"{QUESTION}\nanswer:")]
        ids = torch.tensor([[*text[0], -301, *[-300] * (rows * columns // 4), -302, *text[1]]])
        seen.visual = ids[0] == -300
        with torch.no_grad():
            grid = torch.tensor([[1, rows, columns]])
            model(ids, torch.ones_like(ids), squares, grid, use_cache=False)
    return model, seen


def close(row: dict, expected: dict[str, float]) -> bool:
    return all(row[name] == pytest.approx(value, rel=2e-4) for name, value in expected.items())


# --- what the paper's items measure -----------------------------------------------------------------------------------


def test_moonvit_is_measured_alone_after_its_last_norm(measure):
    model = own.moonvit().double()
    seen = Seen(model, "encoder.final_layernorm")
    for picture in pictures():
        patches = patches_of(picture, 0.5, 0.5)
        with torch.no_grad():
            model(patches.flatten(0, 1), torch.tensor([patches.shape[:2]]))
    (row,) = measure("interface-norms", "MoonViT-SO-400M")
    assert row["norms of"] == "encoder tokens" and close(row, moments(seen.features))
    assert row["mean (paper)"] == 72.17


def test_kimi_vl_is_measured_before_and_after_its_projector(measure, kimi):
    model, seen = kimi
    rows = {row["norms of"]: row for row in measure("interface-norms", "Kimi-VL")}
    assert close(rows["encoder tokens"], moments(seen.features))
    assert close(rows["visual tokens after the projector"], moments(seen.projected))
    assert close(rows["text embedding matrix"], moments([model.get_input_embeddings().weight]))
    assert rows["visual tokens after the projector"]["mean (paper)"] == 4.78


def test_ovis_visual_and_text_vocabularies_are_measured(measure, ovis):
    model, seen = ovis
    rows = {row["norms of"]: row for row in measure("interface-norms", "Ovis2.5")}
    assert close(rows["visual vocabulary"], moments([model.vte.weight]))
    assert close(rows["text embedding matrix"], moments([model.get_wte().weight]))
    assert close(rows["encoder tokens"], moments(seen.features))
    assert close(rows["visual tokens after the projector"], moments(seen.projected))
    assert rows["visual vocabulary"]["mean (paper)"] == 64


@pytest.mark.parametrize("model", ["Ovis2.5", "Kimi-VL"])
def test_update_rates_show_how_far_visual_tokens_turn(measure, model, request):
    seen = request.getfixturevalue({"Ovis2.5": "ovis", "Kimi-VL": "kimi"}[model])[1]
    rows = [row for row in measure("update-rates", model, "update-rates-layers") if row["tokens"] == "visual"]
    cosines = [row["cosine mean with sinks"] for row in rows if "cosine mean with sinks" in row]
    assert cosines == pytest.approx(layer_means(seen, 3), rel=2e-4)
