"""The plugin for vLLM, without vLLM: what its entry point registers, and that every arm's norm ends the projector.

`bash tests/nightly/serving/run.sh` tests it in a real server.
"""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from paths import ROOT
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from llava.export import vllm_plugin
from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration, LlavaNormProjector
from llava.model.multimodal_projector.norm import NORM_TYPES

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_the_entry_point_registers_config_and_model_and_may_be_called_twice(monkeypatch):
    assert f'{LlavaNormConfig.model_type} = "{vllm_plugin.__name__}:register"' in (ROOT / "pyproject.toml").read_text()
    registry = Mock()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))  # registered for a test
    vllm_plugin.register()
    vllm_plugin.register()
    name = LlavaNormForConditionalGeneration.__name__
    registry.register_model.assert_called_with(name, f"llava.export.vllm_model:{name}")
    assert isinstance(AutoConfig.for_model("llava_norm"), LlavaNormConfig)


@pytest.mark.parametrize("arm", NORM_TYPES)
def test_the_served_projector_ends_in_the_arms_norm(arm):
    text, vision = SMALL | {"model_type": "llama"}, SMALL | {"model_type": "siglip_vision_model"}
    config = LlavaNormConfig(text_config=text, vision_config=vision, mm_projector_norm=arm)
    config.mm_projector_norm_init_gain = 0.25
    projector = LlavaNormProjector(config).eval()
    tokens = torch.randn(2, 3, 8)
    before = projector.linear_2(nn.functional.gelu(projector.linear_1(tokens)))
    assert type(projector.norm) is (NORM_TYPES[arm] or type(None))
    expected = before if projector.norm is None else projector.norm.normalize(before)
    torch.testing.assert_close(projector(tokens), expected)
