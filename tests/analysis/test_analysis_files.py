"""`embedding-norms` and `norm-params`: what they read from files alone, against loaded models and closed forms."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llava.analysis.__main__ import main
from llava.analysis.commands import NamedModel
from llava.analysis.embedding_norms import read_embedding_norms
from llava.analysis.weights import WeightFiles


def run(folder, *flags) -> dict:
    assert main([*map(str, flags), "--output-dir", str(folder)]) == 0
    return json.loads((folder / f"{flags[0]}.json").read_text())


def save(folder, tensors, config=None, file_name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    if file_name.endswith(".bin"):
        torch.save(tensors, folder / file_name)
    else:
        save_file(tensors, folder / file_name)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    return str(folder)


def embedding(rows=40, seed=0):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "qwen_tied"])
def test_norms_from_the_file_equal_those_of_the_loaded_model(tiny, name):
    weight = AutoModelForCausalLM.from_pretrained(tiny / name).get_input_embeddings().weight.detach().double()
    embedding = read_embedding_norms(NamedModel(name, str(tiny / name)))
    assert torch.allclose(torch.from_numpy(embedding.norms), weight.norm(dim=1), rtol=1e-6)
    assert embedding.tokens[65] == "b" and embedding.tokens[-1] == "(unused row)"


def test_the_text_embedding_is_found_in_shards_among_other_tables(tmp_path):
    weight = embedding().bfloat16()
    save(
        tmp_path, {"model.visual.embed_tokens.weight": embedding(3), "vte.weight": embedding(4)}, None, "a.safetensors"
    )
    save(tmp_path, {"model.language_model.embed_tokens.weight": weight}, None, "b.safetensors")
    shards = {
        "model.visual.embed_tokens.weight": "a",
        "vte.weight": "a",
        "model.language_model.embed_tokens.weight": "b",
    }
    index = {"weight_map": {name: f"{shard}.safetensors" for name, shard in shards.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "a.safetensors").write_bytes(b"never read")
    files = WeightFiles(str(tmp_path))
    assert files.embedding_name() == "model.language_model.embed_tokens.weight"
    assert torch.equal(files.read(files.embedding_name()), weight)
    save(tmp_path, {"model.language_model.embed_tokens.weight": 2 * weight})  # transformers loads this one
    files = WeightFiles(str(tmp_path))
    assert torch.equal(files.read(files.embedding_name()), 2 * weight)


def test_an_embedding_in_two_tensors_is_read_as_one(tmp_path):
    first, second = embedding(), embedding(5, 1)
    names = [f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")]
    path = save(tmp_path / "two", dict(zip(names, (first, second), strict=True)))
    norms = torch.cat([first, second]).norm(dim=1).double()
    assert torch.allclose(torch.from_numpy(read_embedding_norms(NamedModel("m", path)).norms), norms, rtol=1e-6)
    path = save(tmp_path / "odd", {"words": first})
    (row,) = run(tmp_path / "out", "interface-norms", "--model", path, "--embedding-name", "words")["rows"]
    assert row["mean"] == pytest.approx(first.norm(dim=1).mean().item(), rel=1e-6)


def test_a_matrix_with_another_name_is_named(tmp_path):
    path = save(tmp_path / "untied", {"lm_head.weight": embedding()})
    with pytest.raises(ValueError, match="found none; name it by --embedding-name"):
        WeightFiles(path).embedding_name()
    assert WeightFiles(path).embedding_name("lm_head.weight") == "lm_head.weight"


def test_zero_rows_are_counted_and_a_descendant_stands_beside_its_base(tmp_path):
    base, descendant = embedding(), embedding()
    base[:4] = 0
    descendant[7] *= 100
    save(tmp_path / "Qwen2.5-7B", {"model.embed_tokens.weight": base})
    save(tmp_path / "vl", {"model.embed_tokens.weight": descendant})
    models = ["--model", f"base={tmp_path / 'Qwen2.5-7B'}", "--model", f"vl={tmp_path / 'vl'}"]
    first, second = run(tmp_path / "out", "embedding-norms", *models, "--top", "3")["rows"]
    assert (first["zero rows"], second["zero rows"]) == (4, 0)
    assert first["mean without zero rows"] == pytest.approx(first["mean"] * 40 / 36)
    assert (first["mean (paper)"], first["std (paper)"]) == (0.8031, 0.1801) and "mean (paper)" not in second
    tokens = json.loads((tmp_path / "out/embedding-norms-tokens.json").read_text())["rows"]
    assert [row["model"] for row in tokens] == ["base"] * 3 + ["vl"] * 3
    assert tokens[3]["id"] == 7
    assert tokens[3]["norm"] == pytest.approx(100 * tokens[3]["norm in base"])
    assert (tmp_path / "out/embedding-norms.png").stat().st_size > 10_000


def run_folder(folder, gain, bias):
    tensors = {"model.mm_projector.0.weight": torch.ones(4, 2), "model.mm_projector.2.weight": torch.ones(4, 4)}
    for step, file_name in ((20, "mm_projector.bin"), (100, "model.safetensors")):
        norm = {"model.mm_projector.3.weight": gain * step, "model.mm_projector.3.bias": bias}
        config = {"mm_projector_norm_init": "text_norm", "mm_projector_norm_target": 3.0}
        save(folder / f"checkpoint-{step}", tensors | norm, config, file_name)
    save(folder / "plain", tensors)
    return folder


def test_gain_and_bias_over_a_runs_checkpoints_equal_closed_forms(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", torch.tensor([1.0, -1.0, 3.0, -3.0]), torch.tensor([0.5, -0.5, 0.5, -0.5]))
    shutil.move(folder / "plain", tmp_path / "plain")
    flags = ["--model", f"run={folder}", "--model", f"plain={tmp_path / 'plain'}"]
    first, second, *paper = run(tmp_path / "out", "norm-params", *flags)["rows"]
    assert (first["step"], second["step"]) == (20, 100)
    for row, step in ((first, 20), (second, 100)):
        assert row["gain L2"] == pytest.approx(step * math.sqrt(20))
        assert row["gain mean |.|"] == pytest.approx(2 * step) and row["gain std |.|"] == pytest.approx(step)
        assert (row["bias mean |.|"], row["bias std |.|"]) == (0.5, 0)
    assert [row["gain L2"] for row in paper] == [53.25, 2.2812]
    assert f"no norm in the projector, so no row: {tmp_path / 'plain'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "names, others",
    [
        (
            ["vit.perceive.before_rms", "vit.perceive.after_rms"],
            ["vit.perceive.proj.0", "vit.layers.0.input_layernorm"],
        ),
        (["model.connector.layer_norm"], ["model.text_model.norm"]),
        (["model.resampler_model.spatial_linear.ln", "model.resampler_model.after_norm"], ["model.norm"]),
        (["model.vision_model.connector.ln_in", "model.vision_model.connector.ln_out"], ["model.text_model.norm"]),
    ],
)
def test_every_gain_of_another_models_projector_has_a_row(tmp_path, names, others):
    gains = {name: torch.linspace(0.5, index + 1, 8) for index, name in enumerate(names)}
    tensors = {f"{name}.weight": gain for name, gain in gains.items()}
    tensors |= {f"{name}.weight": torch.ones(8, 8) if "norm" not in name else torch.ones(8) for name in others}
    path = save(tmp_path / "m", tensors | {"model.connector.proj.bias": torch.ones(8)})
    rows = run(tmp_path / "out", "norm-params", "--model", f"x={path}")["rows"][: len(names)]
    expected = {f"x, {name}" if len(names) > 1 else "x": gain.norm().item() for name, gain in gains.items()}
    assert {row["model"]: row["gain L2"] for row in rows} == pytest.approx(expected)
    assert [row["D"] for row in rows] == [8] * len(names)


def test_a_bfloat16_gain_is_summed_in_double_precision(tmp_path):
    gain = torch.full((3072,), 0.0400, dtype=torch.bfloat16)
    path = save(tmp_path / "m", {"mm_projector.2.weight": torch.ones(2, 2), "mm_projector.3.weight": gain})
    row = run(tmp_path / "out", "norm-params", "--model", path)["rows"][0]
    assert row["gain mean |.|"] == gain[0].item() and row["bias mean |.|"] is None
    assert row["gain L2"] == pytest.approx(gain[0].item() * math.sqrt(3072), rel=1e-12)


def test_what_holds_no_readable_weights_is_refused_in_one_line(tmp_path, capsys):
    zero = tmp_path / "checkpoint-5"
    (zero / "global_step5").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for path, message in (
        (zero, "only DeepSpeed's partitioned state. Gather it first: python"),
        (tmp_path / "empty", "no weights, expected model.safetensors"),
        (tmp_path / "absent", "absent"),
    ):
        assert main(["norm-params", "--model", str(path), "--output-dir", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    path = save(tmp_path / "m", {"model.mm_projector.2.weight": torch.ones(2, 2)})
    assert main(["norm-params", "--model", path, "--output-dir", str(tmp_path)]) == 2
    assert "none of the given models has a norm" in capsys.readouterr().err
