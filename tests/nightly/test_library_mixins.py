"""transformers' own tests of a model: what passes on its LLaVA class passes on the exported one, with every norm.

They are in the source distribution of the installed release, which comes from PyPI.
"""

import subprocess
import sys
import tarfile
import unittest
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration, LlavaNormModel
from llava.model.multimodal_projector.norm import NORM_TYPES

RELEASE = f"transformers-{transformers.__version__}"
REQUIRED = "parameterized==0.9.0"  # by the tests
LEAST = 80
"""So many tests at least pass on the stock class; fewer say that they did not run."""
EXCEPTIONS = {
    "test_reverse_loading_mapping": "skips itself: no older release saved this model type's weights under other names",
    "test_can_init_all_missing_weights": "of a class outside transformers from_pretrained draws CLIP's missing linear "
    "layers with the usual deviation, not CLIP's own; an export has all weights",
}
"""Tests that pass on the stock class alone, each with the reason."""
LEFT_OUT = {  # by the source distribution; the tests import them
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
}
IMAGE, SIDE, TEXT = 0, 4, 7  # the image token's id, patches along a picture's side, tokens of text
SIZES = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 512, "pad_token_id": 1}
CLIP = SIZES | {"model_type": "clip_vision_model", "image_size": 2 * SIDE, "patch_size": 2, "projection_dim": 32}
pytestmark = pytest.mark.slow


def pip(*words: object) -> None:
    """Runs pip; skips the test where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "20", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{words[-1]} cannot be had from PyPI here: {done.stderr.strip()[-300:]}")


def unpack(folder: Path) -> None:
    """Unpacks the library's package `tests` below `folder`, and what it imports."""
    source = ["--no-binary", "transformers", "--no-build-isolation", RELEASE.replace("-", "==")]
    pip("download", "--no-deps", "--dest", folder, *source)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as tar:
        tests = [member for member in tar if member.name.startswith(f"{RELEASE}/tests/")]
        tar.extractall(folder, tests, filter="data")
    for file, stub in LEFT_OUT.items():
        path = folder / RELEASE / "tests" / file
        path.parent.mkdir()
        path.write_text(stub)
        (path.parent / "__init__.py").touch()
    (folder / RELEASE / "tests/__init__.py").touch()
    pip("install", "-q", "--no-deps", "--no-compile", "--target", folder / RELEASE, REQUIRED)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """The library's module `tests.test_modeling_common`."""
    unpack(folder := tmp_path_factory.mktemp("library"))
    # The tests look up in the library's tables which class has no head, and which one takes labels.
    model_type, classes = LlavaNormConfig.model_type, (LlavaNormModel, LlavaNormForConditionalGeneration)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / RELEASE)
        patch.setattr(pytest.mark, "_config", None)  # marks of the library, which are not in pyproject.toml
        transformers.AutoConfig.register(model_type, LlavaNormConfig, exist_ok=True)
        transformers.AutoModel.register(LlavaNormConfig, LlavaNormModel, exist_ok=True)
        tables = (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        for table, model in zip(tables, classes, strict=True):
            patch.setitem(table, model_type, model.__name__)
        from tests import test_modeling_common

        yield test_modeling_common


class TinyLlava:
    """What the tests call a model tester: a config, and the inputs of a forward pass."""

    is_training, batch_size, seq_length = True, 3, SIDE**2 + TEXT
    vocab_size, hidden_size = LLAMA["vocab_size"], LLAMA["hidden_size"]
    num_hidden_layers, num_attention_heads = LLAMA["num_hidden_layers"], LLAMA["num_attention_heads"]

    def __init__(self, config_class: type, **fields: object):
        self.config_class, self.fields = config_class, fields

    def get_config(self) -> transformers.LlavaConfig:
        ids = {"image_token_index": IMAGE, "image_seq_length": SIDE**2, "vision_feature_layer": -1}
        return self.config_class(text_config=LLAMA, vision_config=CLIP, **ids, **self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[transformers.LlavaConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(2, self.vocab_size, (self.batch_size, self.seq_length))  # 1 is padding
        ids[:, : SIDE**2] = IMAGE
        pixels = torch.rand(self.batch_size, 3, CLIP["image_size"], CLIP["image_size"])
        return self.get_config(), {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@cache
def outcomes(mixin: type, classes: tuple[type, ...], config_class: type, **fields: object) -> dict[str, str]:
    """What each of the library's tests comes to on the classes."""

    class Case(mixin, unittest.TestCase):
        all_model_classes, _is_composite = classes, True
        test_can_init_all_missing_weights_before_2023 = True  # the exported files have no year: an old one
        test_all_params_have_gradient = False  # nothing reads the norm after CLIP's last layer

        def setUp(self):
            self.model_tester = TinyLlava(config_class, **fields)

    found = {}
    for test in unittest.defaultTestLoader.loadTestsFromTestCase(Case):
        test.run(result := unittest.TestResult())
        found[test._testMethodName] = ["failed", "skipped" if result.skipped else "passed"][result.wasSuccessful()]
    return found


@pytest.mark.parametrize("norm", NORM_TYPES)
def test_what_passes_on_the_stock_class_passes_on_the_exported_one(common, norm):
    stock = (transformers.LlavaModel, transformers.LlavaForConditionalGeneration)
    theirs = outcomes(common.ModelTesterMixin, stock, transformers.LlavaConfig)
    fields = {"mm_projector_norm": norm, "mm_projector_norm_init_gain": 0.2}
    exported = (LlavaNormModel, LlavaNormForConditionalGeneration)
    ours = outcomes(common.ModelTesterMixin, exported, LlavaNormConfig, **fields)
    passed = {name for name, outcome in theirs.items() if outcome == "passed"}
    assert len(passed) >= LEAST, theirs
    assert {name for name in passed if ours[name] != "passed"} == {*EXCEPTIONS}
