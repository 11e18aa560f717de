"""Plug-ins: a user's own parts through flags, training, resuming, loading, comparing and export."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import saved_models
import torch
from analysis_commands import arguments
from analysis_commands import run as analyzed
from saved_models import SAVED
from tiny_models import SIZES, make
from training import flags, load
from transformers import AutoModelForCausalLM, SeedOssConfig, SeedOssForCausalLM

from llava.analysis import measure, samples
from llava.analysis.commands import NamedModel
from llava.attach import attach, attached_norms
from llava.compare.answers import described
from llava.export.hf import export
from llava.export.remote_code import code
from llava.mm_utils import load_tokenizer
from llava.model.language_model.families import DECODERS, LLAVA_CLASSES, MODEL_CLASSES
from llava.model.multimodal_encoder.towers import TOWERS
from llava.model.multimodal_projector.builder import PROJECTOR_TYPES
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.train import train as train_module
from llava.train.arguments import parse_flags
from llava.utils import plugins
from llava.utils.versions import made_by

NORM = """
from llava.model.multimodal_projector.norm import AlignedRMSNorm
from llava.plugin import register_norm

class HalfNorm(AlignedRMSNorm):
    def normalize(self, x):
        return 0.5 * super().normalize(x)

register_norm("half_rmsnorm", HalfNorm)
"""
OTHERS = """
import torch
from torch import nn
from transformers import AutoConfig, CLIPVisionConfig
from llava.model.multimodal_encoder.towers import CLIPVisionTower
from llava.model.multimodal_projector.builder import MergePatches
from llava.plugin import register_projector, register_tower

class OwnConfig(CLIPVisionConfig):
    model_type = "own_clip"

class OwnTower(CLIPVisionTower):
    config_class = OwnConfig

AutoConfig.register("own_clip", OwnConfig, exist_ok=True)
register_tower(OwnTower)
register_projector(
    "pooled_Nx", lambda e, d, n: nn.Sequential(MergePatches(n), nn.Linear(n * n * e, d)), merge=2
)
"""


TABLES = (NORM_TYPES, PROJECTOR_TYPES, TOWERS, MODEL_CLASSES, LLAVA_CLASSES, plugins.digests)
BEFORE, DECODERS_BEFORE = [dict(table) for table in TABLES], list(DECODERS)


def forget() -> None:
    """Leaves the tables as a new process has them."""
    for table, before in zip(TABLES, BEFORE, strict=True):
        table.clear()
        table.update(before)
    DECODERS[:] = DECODERS_BEFORE
    plugins.registered.clear()


@pytest.fixture(autouse=True)
def forgotten():
    """Every test begins and ends without plug-ins."""
    yield
    forget()


@pytest.fixture
def half(tmp_path):
    path = tmp_path / "my_parts.py"
    path.write_text(NORM)
    return path


@pytest.fixture(scope="module")
def trained_half(tiny, tmp_path_factory):
    """A finished run of the plug-in's norm, with checkpoints; the plug-in is beside it."""
    folder = tmp_path_factory.mktemp("plugin")
    path = folder / "my_parts.py"
    path.write_text(NORM)
    options = {"plugin": path, "save_strategy": "steps", "save_steps": 1}
    train_module.train(flags(tiny, folder / "run", 2, norm="half_rmsnorm", **options))
    forget()
    return folder / "run", path


def digest(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- through a run ----------------------------------------------------------------------------------------------------


def test_a_resume_with_another_digest_is_refused_with_both(tiny, tmp_path, trained_half):
    run, path = trained_half
    changed = tmp_path / path.name
    changed.write_text(NORM.replace("0.5 *", "0.25 *"))
    shutil.copytree(run / "checkpoint-1", tmp_path / "run/checkpoint-1")
    shutil.copy(run / "resume.json", tmp_path / "run")
    with pytest.raises(ValueError, match=f"plugins: .*{digest(path)}.*now .*{digest(changed)}"):
        train_module.train(flags(tiny, tmp_path / "run", 2, norm="half_rmsnorm", plugin=changed))


def test_results_that_an_edited_file_would_change_are_not_reused(tiny, trained_half, half, tmp_path, monkeypatch):
    run, out = trained_half[0], tmp_path / "out"
    args = arguments("layer-norms", "--data", tiny / "data/finetune.json", "--samples", 1, "--output-dir", out)
    drawn, identities = samples.choose(args), []
    assert "plugins" not in made_by(())
    monkeypatch.setenv("PLUGINS", str(half))
    for gain in ("0.5", "0.5", "0.25"):
        half.write_text(NORM.replace("0.5", gain))
        forget()  # as another process
        values = {"values_of": lambda *_: {"x": np.ones(1)}, "load": lambda *_: None}
        measure.per_sample("x", NamedModel("m", run), drawn, args, **values)
        identities.append(described(run, 1).identity())
    assert len([*out.rglob("*.npz")]) == 2
    assert identities[0] == identities[1] != identities[2]


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_not_loaded_without_its_plug_in(trained_half):
    for loading in (lambda: load(trained_half[0], None), lambda: AutoModelForCausalLM.from_pretrained(trained_half[0])):
        with pytest.raises(ValueError, match=r"found 'half_rmsnorm' \(--plugin FILE adds one;"):
            loading()


def test_it_loads_with_the_file_of_the_variable(trained_half, monkeypatch):
    monkeypatch.setenv("PLUGINS", str(trained_half[1]))
    assert type(load(trained_half[0], None).get_model().mm_projector[-1]).__name__ == "HalfNorm"


def test_export_says_which_part_it_cannot_carry(trained_half, tmp_path):
    run, path = trained_half
    plugins.load(path)
    with pytest.raises(ValueError, match="its norm half_rmsnorm is code of your own"):
        export(str(run), tmp_path / "exported")
    assert not (tmp_path / "exported").exists() and "Half" not in code()


# --- in other trainers ------------------------------------------------------------------------------------------------


def test_attach_takes_a_plug_ins_norm(half):
    model = saved_models.filled(SAVED["llava"].model()).eval()
    with pytest.raises(ValueError, match="norm: expected one of layernorm, .*; found 'half_rmsnorm'"):
        attach(model, "half_rmsnorm")
    plugins.load(half)
    attach(model, "half_rmsnorm")
    assert [type(norm).__name__ for norm in attached_norms(model)] == ["HalfNorm"]


# --- flags and files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "FileNotFoundError"),
        (NORM.replace("half_rmsnorm", "layernorm"), "the norm 'layernorm' exists already; take another name"),
        (NORM + "1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_parser(tiny, tmp_path, capsys, content, message):
    path = tmp_path / "bad.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        parse_flags([*flags(tiny, tmp_path / "run", 1), "--plugin", str(path)])
    assert re.search(f"error: --plugin {path}.*{message}", capsys.readouterr().err)
    assert not plugins.digests


# --- other parts ------------------------------------------------------------------------------------------------------


def test_a_tower_and_a_projector_train_and_load(tiny, tmp_path):
    path = tmp_path / "other.py"
    path.write_text(OTHERS)
    tower = shutil.copytree(tiny / "clip", tmp_path / "own_clip")
    config = json.loads((tower / "config.json").read_text())
    (tower / "config.json").write_text(json.dumps(config | {"model_type": "own_clip"}))
    options = {"mm_projector_type": "pooled_2x", "plugin": path}
    train_module.train(flags(tiny, tmp_path / "run", 2, tower=tower, **options))
    model = load(tmp_path / "run", None)
    assert type(model.get_vision_tower()).__name__ == "OwnTower" and model.crop_rules().tokens_per_crop == 1
    forget()
    with pytest.raises(ValueError, match="vision tower 'own_clip': expected one of"):
        load(tmp_path / "run", None)
    words = ["interface-norms", "--plugin", path, "--model", f"own={tower}", "--data", tiny / "data/finetune.json"]
    (row,) = analyzed(tmp_path / "measured", *words, "--samples", 2)["rows"]
    assert row["norms of"] == "encoder tokens" and row["count"] == 8


FAMILY = """
from transformers import SeedOssConfig, SeedOssForCausalLM, SeedOssModel
from llava.model.language_model.families import Decoder
from llava.plugin import register_family

register_family(Decoder("OwnSeed", SeedOssConfig, SeedOssModel, SeedOssForCausalLM))
"""


def test_a_decoder_family_computes_as_the_plain_decoder(tiny, tmp_path):
    (tmp_path / "decoder.py").write_text(FAMILY)
    torch.manual_seed(0)
    options = {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": True}
    plain = SeedOssForCausalLM(SeedOssConfig(**SIZES | options, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()
    plain.save_pretrained(tmp_path / "plain")
    load_tokenizer(str(tiny / "llama")).save_pretrained(tmp_path / "plain")
    plugins.load(tmp_path / "decoder.py")
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=ids).logits for model in (make(tiny, tmp_path / "plain"), plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
