"""Families through the command line, from a folder with model, tokenizer and processor as people download them.

`FAMILIES=all` runs every family; six are usual.
"""

import contextlib
import inspect
import itertools
import json

import pytest
import saved_models
import torch
import transformers
from PIL import Image
from saved_models import CHOSEN, SAVED
from vision_language_models import IMAGE, batch_of

from llava.analysis import attention, interface_norms, update_rates
from llava.analysis.__main__ import main
from llava.analysis.attention import PIXELS, picture_grid, shape_input
from llava.analysis.models import library_inputs, load_processor
from llava.analysis.probe import Probe
from llava.analysis.samples import PicturePrompt
from llava.attach import attach
from llava.families import REFUSED, REFUSED_LLMS, family_of, find_parts

PROMPT = "What is it?"
KINDS = ("encoder tokens", "visual tokens after the projector", "visual tokens entering the LLM")
NUMBERS = ("count", "mean", "std", "min", "max")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with three pictures of different shape."""
    folder, generator = tmp_path_factory.mktemp("pictures"), torch.Generator().manual_seed(0)
    for index, (width, height) in enumerate(((40, 20), (24, 36), (30, 30))):
        noise = torch.rand(height, width, 3, generator=generator) * 255
        Image.fromarray(noise.byte().numpy()).save(folder / f"{index}.png")
    return folder


def run(command, folder, out, pictures, *flags) -> list[dict]:
    shared = ("--model", f"m={folder}", "--data", str(pictures), "--samples", "3", "--prompt", PROMPT)
    shared += ("--device", "cpu")
    assert main([command, *shared, "--output-dir", str(out), *flags]) == 0
    return json.loads((out / f"{command}.json").read_text())["rows"]


@contextlib.contextmanager
def watching(saved, model):
    """Within the block, a forward fills the dict with the tokens of encoder and projector, hooked by module path."""
    tokens = {kind: [] for kind in KINDS}

    def see_encoder(module, args, kwargs, result):
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        bound = bound | bound.pop("kwargs", {})
        tokens[KINDS[0]].append(saved.encoder[1](bound, result).flatten(0, -2))

    def see_projector(module, args, kwargs, result):
        first = next(iter((*args, *kwargs.values())))
        for rows in result if isinstance(result, list) else [result]:
            if first.is_floating_point():  # Ovis also looks its markers up
                tokens[KINDS[1]].append((rows if isinstance(rows, torch.Tensor) else rows[0]).flatten(0, -2))

    handles = [model.get_submodule(saved.encoder[0]).register_forward_hook(see_encoder, with_kwargs=True)]
    handles.append(model.get_submodule(saved.projector).register_forward_hook(see_projector, with_kwargs=True))
    yield tokens
    for handle in handles:
        handle.remove()


@torch.no_grad()
def alone(name, model, folder, pictures) -> dict[str, torch.Tensor]:
    """The norms of `KINDS`, and per layer those of the visual states, each picture run alone."""
    saved, family = SAVED[name], family_of(model.config.model_type)
    processor = load_processor(str(folder))
    if saved.mark is None:
        text = family.prompt.format(picture=family.picture, prompt=PROMPT)
    else:
        text = f"user: {saved.mark}{PROMPT}\nassistant:"
    layers = []
    with watching(saved, model) as tokens:
        for file in sorted(pictures.iterdir()):
            picture = Image.open(file)
            images = [picture] if family.page_lists else [[picture]]
            inputs = processor(images=images, text=[text], return_tensors="pt")
            inputs.pop("labels", None)
            inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}  # Llama 4's are bf16
            states = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
            visual = inputs["input_ids"] == IMAGE
            tokens[KINDS[2]].append(states[0][visual])
            layers.append([state[visual] for state in states[:-1]])
    rows = tokens | dict(enumerate(zip(*layers, strict=True)))
    return {kind: torch.cat(parts).norm(dim=-1).double() for kind, parts in rows.items()}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (interface_norms, update_rates, attention):
        monkeypatch.setattr(module, "draw_rows", lambda *args, **options: None)
    monkeypatch.setattr(attention, "draw_maps", lambda *args: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_saved_familys_tables_equal_an_independent_run(name, pictures, tmp_path):
    saved = SAVED[name]
    saved_models.write(saved, tmp_path / "model")
    rows = run("interface-norms", tmp_path / "model", tmp_path / "out", pictures)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype="float32").eval()
    expected = alone(name, model, tmp_path / "model", pictures)
    numbers = {row["norms of"]: [row[name] for name in NUMBERS] for row in rows}
    for kind in KINDS:
        norms = expected[kind]
        reference = [len(norms), *(float(v) for v in (norms.mean(), norms.std(correction=0), *norms.aminmax()))]
        assert numbers[kind] == pytest.approx(reference, rel=1e-4, abs=1e-6), kind
    (row,) = run("attention", tmp_path / "model", tmp_path / "out", pictures)
    assert row["samples"] == 3
    if name in PLACES:
        assert (row["with a map"] == 0) == (PLACES[name][1] is None)
    run("layer-norms", tmp_path / "model", tmp_path / "out", pictures)
    layers = json.loads((tmp_path / "out/layer-norms-layers.json").read_text())["rows"]
    visual = {row["layer"]: row for row in layers if row["tokens"] == "visual"}
    for index, norms in expected.items():
        if isinstance(index, int) and index not in saved.added:
            assert visual[index]["norm mean with sinks"] == pytest.approx(float(norms.mean()), rel=1e-4), index


# A picture's width and height, and the rows and columns of its visual tokens, if they are places.
PLACES = {
    "llava": ((64, 16), (4, 4)),  # of a centred crop
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), ((64, 16), (2, 8))),
    "glm4v": ((16, 64), (5, 1)),
    **dict.fromkeys(("ovis2", "gemma3"), ((64, 16), (2, 2))),  # squeezed
    "internvl": ((16, 16), (2, 2)),
    "llava_next": ((64, 64), None),
    **dict.fromkeys(("idefics2", "aria"), ((64, 64), None)),
    "paligemma": ((16, 64), (4, 4)),
    "gemma4": ((16, 64), (16, 4)),
}


def cells_of(height: int, width: int, grid) -> dict[tuple[int, int], tuple[slice, slice]]:
    """The pixels of each cell of a grid, by row and column."""
    parts = []
    for length, count in zip((height, width), grid, strict=True):
        edges = [length * step // count for step in range(count + 1)]
        parts.append([slice(*pair) for pair in itertools.pairwise(edges)])
    return {(r, c): (parts[0][r], parts[1][c]) for r, c in itertools.product(*map(range, grid))}


@pytest.mark.parametrize("name", CHOSEN)
@torch.no_grad()
def test_a_marked_place_of_the_picture_lights_its_cell(name, tmp_path):
    """It is the brightest of the map of how much every token changed, for its usual change."""
    model, (size, grid) = saved_models.write(SAVED[name], tmp_path).eval(), PLACES[name]
    family = family_of(model.config.model_type)
    prepare = library_inputs(load_processor(str(tmp_path)), model.device, model.dtype, family)
    probe = Probe("m", model, find_parts(model, family), prepare)
    plain = torch.rand(size[1], size[0], 3, generator=torch.Generator().manual_seed(0)) * 80 + 80

    def entering(inputs):
        batch = batch_of(**inputs)
        seen = probe.run(batch)
        return seen.hidden_states[0][seen.visual]

    def prepared(pixels):
        return probe.prepare(PicturePrompt("x", Image.fromarray(pixels.byte().numpy()), PROMPT)).inputs

    inputs = prepared(plain)
    before = entering(inputs)
    assert picture_grid(model, inputs, len(before)) == grid
    if grid is None:
        return
    source = shape_input(model, inputs)
    whole, changes = inputs[source] if source in PIXELS else plain.movedim(-1, 0), {}
    for cell, (rows, columns) in cells_of(*whole.shape[-2:], grid).items():
        marked, (low, high) = whole.clone(), (-1.25, 1.25) if source in PIXELS else (0, 255)
        marked[..., rows, columns] = torch.tensor([high, low, low])[:, None, None]  # red
        changed = inputs | {source: marked} if source in PIXELS else prepared(marked.movedim(0, -1))
        changes[cell] = (entering(changed) - before).norm(dim=-1)
    usual = torch.stack(list(changes.values())).mean(dim=0)
    assert [divmod(int((change / usual).argmax()), grid[1]) for change in changes.values()] == list(changes)


def test_a_family_that_cannot_be_measured_is_refused_by_name_in_one_line(pictures, tmp_path, capsys):
    configs = {name: {"model_type": name} for name in REFUSED} | {"t5gemma2": {"model_type": "t5gemma2"}}
    configs["t5gemma2"]["is_encoder_decoder"] = True
    for name in REFUSED_LLMS:
        configs[f"llava with {name}"] = {"model_type": "llava", "text_config": {"model_type": name}}
    for name, config in configs.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = ["theory", "--model", str(tmp_path), "--data", str(pictures), "--output-dir", str(tmp_path)]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"{name} cannot be measured: " in error and error.count("\n") == 1


def test_a_model_with_an_attached_norm_is_measured_with_it(tmp_path, pictures):
    model = attach(saved_models.write(SAVED["llava"], tmp_path / "m"))
    model.save_pretrained(tmp_path / "m")
    target = model.get_input_embeddings().weight.norm(dim=1).mean().item()
    rows = {row["norms of"]: row for row in run("interface-norms", tmp_path / "m", tmp_path / "out", pictures)}
    assert rows[KINDS[1]]["mean"] == pytest.approx(target, rel=1e-3)
