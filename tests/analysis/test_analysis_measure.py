"""Statistics over layers and at the interface against plain NumPy over the same tokens; resuming, commands."""

import json
import pickle
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vision_language_models as families
from analysis_commands import arguments, run
from PIL import Image
from tiny_models import VISION_SIZES
from vision_language_models import our_checkpoint

from llava.analysis import interface_norms, measure, models, samples
from llava.analysis.__main__ import main
from llava.analysis.commands import NamedModel
from llava.analysis.measure import Measurement
from llava.analysis.probe import SPECIAL, TEXT_AFTER, VISUAL, Observation, Probe
from llava.analysis.update_rates import layer_rows
from llava.families import Family, family_of, find_parts
from llava.model.multimodal_encoder.towers import TOWERS


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    return our_checkpoint(tiny, tmp_path_factory.mktemp("ours") / "model")


@pytest.fixture
def data(tiny):
    return str(tiny / "data/finetune.json")  # 24 records, every third without a picture


def measured(path, data, folder, *flags) -> Measurement:
    args = arguments("layer-norms", "--data", data, "--output-dir", folder, *flags)
    return measure.measure_layers(NamedModel("m", path), samples.choose(args), args)


# --- values -----------------------------------------------------------------------------------------------------------


def observation(states, groups) -> Observation:
    one = torch.ones(1, 1)
    return Observation(torch.tensor(groups, dtype=torch.uint8), states, one, one, None, states[1:])


def made(group, sink=None, **values) -> Measurement:
    """A measurement of tokens with these values, by layer."""
    values = {name: np.array(layers) for name, layers in values.items()}
    sinks = np.zeros(len(group), dtype=bool) if sink is None else np.array(sink, dtype=bool)
    return Measurement([values | {"group": np.array(group), "sink": sinks}])


def test_each_layers_statistics_equal_plain_numpy():
    states = [torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    groups = [[SPECIAL, VISUAL, VISUAL, TEXT_AFTER, TEXT_AFTER], [VISUAL, TEXT_AFTER, TEXT_AFTER, 0, 0]]
    measurement = Measurement([measure.layer_values(observation(states, groups), "x")])
    for group in (SPECIAL, VISUAL, TEXT_AFTER):
        picked = [state.numpy()[np.array(groups) == group] for state in states]
        for layer in range(2):
            old, new = picked[layer], picked[layer + 1]
            cosine = (old * new).sum(1) / np.linalg.norm(old, axis=1) / np.linalg.norm(new, axis=1)
            start = (picked[0] * new).sum(1) / np.linalg.norm(picked[0], axis=1) / np.linalg.norm(new, axis=1)
            expected = {
                "norm": np.linalg.norm(old, axis=1),
                "cosine": cosine,
                "turn": np.rad2deg(np.arccos(cosine)),
                "update": np.linalg.norm(new - old, axis=1) / np.linalg.norm(old, axis=1),
            }
            for what, values in expected.items():
                assert measurement.of(what, group, layer) == pytest.approx(values, rel=1e-5, abs=1e-6)
            drift = measurement.of("drift", group, layer + 1).mean()
            assert drift == pytest.approx(np.rad2deg(np.arccos(start)).mean(), rel=1e-5)


@torch.no_grad()
def test_features_added_between_layers_are_in_no_layers_turn():
    case = families.qwen3_vl()  # adds the encoder's earlier states after the first two layers
    entered, left = {}, {}
    for index, layer in enumerate(case.model.model.language_model.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: entered.update({index: args[0].double()}))
        layer.register_forward_hook(lambda _, args, output, index=index: left.update({index: output.double()}))
    probe = Probe("x", case.model, find_parts(case.model, family_of("qwen3_vl")))
    batch = families.batch_of(**case.inputs)
    measurement = Measurement([measure.layer_values(probe.run(batch), "x")])
    visual = case.inputs["input_ids"] == families.IMAGE
    assert [bool((left[layer] != entered[layer + 1])[visual].any()) for layer in (0, 1)] == [True, True]

    def angles(before, after):
        cosine = torch.cosine_similarity(before[visual], after[visual], dim=-1)
        return torch.rad2deg(torch.acos(cosine.clamp(-1, 1))).mean().item()

    for layer in range(3):
        own = measurement.of("turn", VISUAL, layer, True).mean()
        assert own == pytest.approx(angles(entered[layer], left[layer]), rel=1e-3)
        if layer < 2:
            whole = angles(entered[layer], entered[layer + 1])
            assert own != pytest.approx(whole, rel=1e-2)


def test_small_angles_are_exact():
    tiny = torch.tensor([1e-4, 1e-6], dtype=torch.float64)
    first = torch.tensor([[1.0, 0.0]]).expand(2, 2)
    two = torch.stack([tiny.cos(), tiny.sin()], dim=-1).float()
    assert measure.angle(first, two).tolist() == pytest.approx(torch.rad2deg(tiny).tolist(), rel=1e-4)


def test_a_sink_is_found_and_measured_separately():
    states = [torch.ones(1, 8, 4), torch.ones(1, 8, 4), torch.ones(1, 8, 4)]
    states[1][0, 0] *= 1000  # first text token
    states[2][0, 4] *= 30  # third visual token
    states[2][0, 5] *= 9  # large, but no sink
    groups = [[SPECIAL, TEXT_AFTER, VISUAL, VISUAL, VISUAL, VISUAL, VISUAL, TEXT_AFTER]]
    measurement = Measurement([measure.layer_values(observation(states, groups), "x")] * 2)
    assert np.flatnonzero(measurement.values["sink"]).tolist() == [0, 4, 8, 12]
    assert max(measurement.of("norm", VISUAL, 2)) == 18 and max(measurement.of("norm", VISUAL, 2, True)) == 60
    assert not len(measurement.of("norm", SPECIAL))
    states[1][0, 3] = torch.nan
    with pytest.raises(ValueError, match=r"x: 1 of 24 measured values \(norm\) are NaN or infinite"):
        measure.layer_values(observation(states, groups), "x")


def contents(measurement: Measurement) -> dict:
    """Everything in a measurement, in a form that can be compared."""
    return {name: values.tobytes() for name, values in measurement.values.items()}


def test_an_interrupted_measurement_continues_and_a_finished_one_is_reused(
    checkpoint, data, tmp_path, monkeypatch, capsys
):
    flags = ("--samples", 4)
    whole = measured(checkpoint, data, tmp_path / "whole", *flags)
    layer_values, calls = measure.layer_values, []

    def stop_in_the_third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return layer_values(*args)

    monkeypatch.setattr(measure, "layer_values", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        measured(checkpoint, data, tmp_path / "cut", *flags)
    monkeypatch.setattr(measure, "layer_values", layer_values)
    assert sorted(file.name for file in (tmp_path / "cut").rglob("*.npz")) == ["0.npz", "1.npz"]
    continued = measured(checkpoint, data, tmp_path / "cut", *flags)
    assert "2 of 4 samples are measured already" in capsys.readouterr().out
    assert contents(continued) == contents(whole)

    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("measured again"))
    assert contents(measured(checkpoint, data, tmp_path / "cut", *flags)) == contents(continued)
    for others in (("--seed", 1), ("--samples", 3), ("--conv-mode", "v1"), ("--dtype", "bfloat16")):
        with pytest.raises(pytest.fail.Exception):  # another setting is another measurement
            measured(checkpoint, data, tmp_path / "cut", *flags, *others)
    for name in ("revision", "made_by"):  # of the weights; code and packages
        with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception):
            patch.setattr(measure, name, lambda *args: "another")
            measured(checkpoint, data, tmp_path / "cut", *flags)


def test_weights_that_change_during_a_measurement_leave_nothing(checkpoint, data, tmp_path, monkeypatch):
    revisions = iter(["before", "after"])
    monkeypatch.setattr(measure, "revision", lambda path: next(revisions))
    with pytest.raises(ValueError, match="m: weights changed while they were measured"):
        measured(checkpoint, data, tmp_path, "--samples", 2)
    assert not [*tmp_path.rglob("*.npz")]


def test_results_may_be_written_into_the_folder_of_the_model(checkpoint, data, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    once, again = (measured(str(folder), data, folder / "analysis", "--samples", 1) for _ in range(2))
    assert contents(again) == contents(once) and "1 of 1 samples are measured already" in capsys.readouterr().out


def test_a_damaged_file_is_refused_by_name(checkpoint, data, tmp_path):
    whole = contents(measured(checkpoint, data, tmp_path, "--samples", 1))
    (file,) = tmp_path.rglob("*.npz")
    for content in (b"", b"no zip", file.read_bytes()[:50], pickle.dumps({"done": 2}, protocol=2)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file}: damaged .*; delete it"):
            measured(checkpoint, data, tmp_path, "--samples", 1)
    file.unlink()
    assert contents(measured(checkpoint, data, tmp_path, "--samples", 1)) == whole


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_write_tables_and_figures_of_several_checkpoints(tiny, checkpoint, data, tmp_path):
    aligned = our_checkpoint(tiny, tmp_path / "run/checkpoint-4", "gwc_layernorm")
    our_checkpoint(tiny, tmp_path / "run/checkpoint-12", "gwc_layernorm")
    shared = ("--data", data, "--samples", 3)
    several = ("--model", f"baseline={checkpoint}", "--checkpoints", tmp_path / "run")
    rates = run(tmp_path / "out", "update-rates", *shared, *several)["rows"]
    name = f"{tmp_path.name}/run"
    assert list(dict.fromkeys(row["model"] for row in rates)) == ["baseline", f"{name}, step 4", f"{name}, step 12"]
    layers = json.loads((tmp_path / "out/update-rates-layers.json").read_text())["rows"]
    ours = [row for row in layers if (row["model"], row["tokens"]) == ("baseline", "visual")]
    ours = [row["cosine mean"] for row in ours if "cosine mean" in row]
    assert len(ours) == 2
    assert np.mean(ours) == pytest.approx(rates[0]["cosine mean"])
    run(tmp_path / "out", "layer-norms", *shared, *several)
    for name in ("update-rates", "update-rates-checkpoints", "layer-norms"):
        assert (tmp_path / f"out/{name}.png").stat().st_size > 10_000
    result = run(
        tmp_path / "out", "interface-norms", *shared, "--model", f"aligned={aligned}", "--model", tiny / "llama"
    )
    rows = {(row["model"], row["norms of"]): row for row in result["rows"]}
    target = json.loads((tmp_path / "run/checkpoint-4/config.json").read_text())["mm_projector_norm_target"]
    assert rows["aligned", "visual tokens entering the LLM"]["mean"] == pytest.approx(target, rel=1e-3)
    assert rows["aligned", "text embedding matrix"]["mean"] == pytest.approx(target, rel=1e-6)
    assert [what for model, what in rows if model.endswith("llama")] == ["text embedding matrix"]


@pytest.mark.parametrize("text, adds", [("<s>user: hi", False), ("user: hi", True)])
def test_a_template_that_writes_the_first_token_gets_no_second_one(text, adds):
    class Processor:
        model_input_names, image_processor = (), None
        tokenizer = SimpleNamespace(bos_token="<s>")
        apply_chat_template = staticmethod(lambda conversation, **options: text)

        def __call__(self, **options):
            assert options["add_special_tokens"] is adds
            return {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2)}

    prepare = models.library_inputs(Processor(), "cpu", torch.float32, Family())
    batch = prepare(samples.PicturePrompt("x", Image.new("RGB", (2, 2)), "hi"))
    assert batch.mask.all()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [-2, 0])
@pytest.mark.parametrize("model_type", sorted(TOWERS.keys() - {"siglip2_vision_model"}))
@torch.no_grad()
def test_a_lone_encoders_tokens_are_the_librarys_patches(tmp_path, model_type, layer):
    tower_class = TOWERS[model_type]
    encoder = tower_class.model_class(tower_class.config_class(**VISION_SIZES, vision_use_head=False)).eval()
    for parameter in encoder.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    encoder.save_pretrained(tmp_path)
    picture = Image.new("RGB", (16, 16), (200, 40, 90))
    picture.paste((0, 90, 0), (3, 3, 9, 12))
    args = arguments("interface-norms", "--vision-layer", layer)
    tokens = models.load_encoder(NamedModel("encoder", str(tmp_path)), args)(samples.PicturePrompt("x", picture, ""))
    tower = tower_class(encoder.config)
    pixels = tower.default_image_processor()(images=[picture], return_tensors="pt")["pixel_values"]
    state = encoder(pixels, output_hidden_states=True).hidden_states[layer]
    patches = state[:, tower.num_prefix_tokens :].flatten(0, 1)
    assert len(patches) == (16 // VISION_SIZES["patch_size"]) ** 2
    torch.testing.assert_close(tokens, patches, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_config_is_refused_before_another_is_measured(tiny, checkpoint, data, tmp_path, capsys):
    words = ["layer-norms", "--data", data, "--model", checkpoint, "--model", str(tmp_path / "nowhere")]
    assert main([*words, "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "no usable config.json" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="has no visual tokens: transformers"):
        models.load(NamedModel("x", str(tiny / "llama")), arguments("layer-norms"))


# --- the LLM's input --------------------------------------------------------------------------------------------------


def test_a_sink_has_rows_without_it(checkpoint, data, tmp_path, monkeypatch):
    norms = {"norm": [[0.9, 1.0, 1.1, 500.0, 2.0, 3.0, 4.0]]} | dict.fromkeys(
        (measure.FEATURES, measure.PROJECTED), [1.0]
    )
    measurement = made(group=[VISUAL] * 4 + [TEXT_AFTER] * 3, sink=[0, 0, 0, 1, 0, 0, 0], **norms)
    monkeypatch.setattr(measure, "measure_layers", lambda *args: measurement)
    rows = run(tmp_path / "out", "interface-norms", "--data", data, "--model", f"m={checkpoint}")["rows"]
    rows = {row["norms of"]: row for row in rows}
    assert (rows[interface_norms.ENTERING]["max"], rows[interface_norms.ENTERING]["count"]) == (500, 4)
    assert rows[interface_norms.ENTERING + ", without sinks"]["max"] == 1.1
    assert rows[interface_norms.TEXT_IN]["p50"] == 3 and interface_norms.TEXT_IN + ", without sinks" not in rows


def test_a_median_is_that_of_the_cosines_and_rows_count_the_sinks():
    degrees = np.linspace(1, 41, 81)
    turns = [*degrees, 0.0]
    cosine = np.cos(np.deg2rad(turns))
    measurement = made(group=[VISUAL] * 82, sink=[0] * 81 + [1], turn=[turns], cosine=[cosine])
    cosines = np.cos(np.deg2rad(degrees))
    (row,) = layer_rows({"x": measurement}, ("cosine",))
    assert (row["count"], row["sinks"]) == (81, 1)
    assert row["cosine mean"] == pytest.approx(cosines.mean())
    assert row["cosine median"] == pytest.approx(np.median(cosines), abs=1e-4)
    assert row["cosine mean with sinks"] == pytest.approx((cosines.sum() + 1) / 82)
