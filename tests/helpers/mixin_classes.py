"""transformers' own test mixins on its LLaVA and on the exported class; writes what each test came to.

    python tests/helpers/mixin_classes.py OUTCOMES.json

The folder with the library's package `tests` comes first on PYTHONPATH. `OUTCOMES.json` has the outcome of every test
by class and name, and the mixin that each name is of.
"""

import json
import os
import sys
import unittest
from pathlib import Path

import pytest
import torch
import transformers
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor
from transformers.models.auto import modeling_auto

from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration, LlavaNormModel
from llava.model.multimodal_projector.norm import NORM_TYPES

STOCK = "stock"
IMAGE, SIDE, TEXT = 0, 4, 7  # the image token's id, patches along a crop's side, tokens of text
LLAMA = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
}
CLIP = {"image_size": 8, "patch_size": 2, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "projection_dim": 32,
}
# The mixins look up in the library's tables which class has no head, and which one takes labels.
NORM_CLASSES = (LlavaNormModel, LlavaNormForConditionalGeneration)
transformers.AutoConfig.register(LlavaNormConfig.model_type, LlavaNormConfig)
transformers.AutoModel.register(LlavaNormConfig, LlavaNormModel)
modeling_auto.MODEL_MAPPING_NAMES[LlavaNormConfig.model_type] = LlavaNormModel.__name__
modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[LlavaNormConfig.model_type] = NORM_CLASSES[1].__name__


class TinyLlava:
    """What the mixins call a model tester: a config, and the inputs of a forward pass."""

    is_training = True
    batch_size, visual_tokens = 3, SIDE**2
    vocab_size, hidden_size = LLAMA["vocab_size"], LLAMA["hidden_size"]
    num_hidden_layers, num_attention_heads = LLAMA["num_hidden_layers"], LLAMA["num_attention_heads"]

    def __init__(self, config_class: type, **fields: object):
        self.config_class, self.fields = config_class, fields
        self.seq_length = self.visual_tokens + TEXT

    def get_config(self) -> transformers.LlavaConfig:
        return self.config_class(
            text_config={"model_type": "llama"} | LLAMA,
            vision_config={"model_type": "clip_vision_model"} | CLIP,
            image_token_index=IMAGE,
            image_seq_length=self.visual_tokens,
            vision_feature_layer=-1,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[transformers.LlavaConfig, dict[str, torch.Tensor]]:
        first = max(IMAGE, LLAMA["pad_token_id"]) + 1
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - first) + first
        ids[:, : self.visual_tokens] = IMAGE
        return self.get_config(), self.pictures() | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def pictures(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": floats_tensor([self.batch_size, 3, CLIP["image_size"], CLIP["image_size"]])}


MIXINS = (ModelTesterMixin, GenerationTesterMixin)


class Mixins(*MIXINS):
    """Both mixins on `all_model_classes`."""

    _is_composite = True
    test_can_init_all_missing_weights_before_2023 = True  # the exported files have no year, which counts as an old one
    test_all_params_have_gradient = False  # nothing reads the norm after CLIP's last layer


def case_of(name: str, tester: type, config_class: type, model_classes: tuple[type, ...], **fields: object) -> type:
    """A class of tests, found under its name."""

    def set_up(self):
        self.model_tester = tester(config_class, **fields)

    return type(name, (Mixins, unittest.TestCase), {"setUp": set_up, "all_model_classes": model_classes})


STOCK_CLASSES = (transformers.LlavaModel, transformers.LlavaForConditionalGeneration)
globals()[STOCK] = case_of(STOCK, TinyLlava, transformers.LlavaConfig, STOCK_CLASSES)
for _norm in NORM_TYPES:
    _fields = {"mm_projector_norm": _norm, "mm_projector_norm_init_gain": 0.2}
    globals()[_norm] = case_of(_norm, TinyLlava, LlavaNormConfig, NORM_CLASSES, **_fields)


class Outcomes:
    """A plug-in of pytest that keeps the worst of what a test and its subtests came to."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, name, test = report.nodeid.split("::")
        outcomes = self.of.setdefault(name, {})
        order = ("passed", "skipped", "failed")
        if report.when == "call" or report.outcome != "passed":
            outcomes[test] = max(outcomes.get(test, "passed"), report.outcome, key=order.index)


def main(file: Path) -> None:
    """Runs all classes and writes `file`."""
    outcomes = Outcomes()
    options = ["-q", "--noconftest", "-c", os.devnull, "--rootdir", str(file.parent), "-p", "no:cacheprovider"]
    pytest.main([__file__, *options, "-o", "python_classes=", "-W", "ignore", "--tb=short"], plugins=[outcomes])
    names = {test for tests in outcomes.of.values() for test in tests}
    mixin_of = {name: next(mixin.__name__ for mixin in MIXINS if hasattr(mixin, name)) for name in names}
    file.write_text(json.dumps({"outcomes": outcomes.of, "mixin of": mixin_of}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
