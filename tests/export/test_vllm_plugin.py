"""The plugin for vLLM, without vLLM: what it registers, and that every arm's norm ends the projector that it serves.

`bash tests/nightly/serving/run.sh` tests it in a real server.
"""

import contextlib
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from paths import ROOT
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig

from llava.export import hf, vllm_plugin
from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration, LlavaNormProjector
from llava.model.multimodal_projector.norm import NORM_TYPES

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class Registry:
    """Stands for vLLM's registries: keeps what is registered."""

    def __init__(self):
        self.models = {}

    def register_model(self, architecture: str, model: str) -> None:
        self.models[architecture] = model

    def register_processor(self, *_, **__):
        return lambda model: model


class TheirLlava(nn.Module):
    """Stands for vLLM's class: looks the projector's activation up, as it does, before ours replaces it."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        assert vllm_config.model_config.hf_config.projector_hidden_act == "gelu"
        self.multi_modal_projector = nn.Identity()

    @contextlib.contextmanager
    def _mark_tower_model(self, vllm_config, modality):
        yield


@pytest.fixture
def vllm(monkeypatch):
    """What the plugin imports of vLLM, as stand-ins; the registry is returned."""
    registry = Registry()
    llava_names = ("LlavaDummyInputsBuilder", "LlavaMultiModalProcessor", "LlavaProcessingInfo")
    modules = {
        "vllm": {"ModelRegistry": registry},
        "vllm.config": {"VllmConfig": object},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.llava": dict.fromkeys(llava_names, object)
        | {"LlavaForConditionalGeneration": TheirLlava},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": registry},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))  # registered for a test
    yield registry
    sys.modules.pop("llava.export.vllm_model", None)


def resolved(name: str):
    """What `module:attribute` names."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def test_the_entry_point_registers_config_and_model_and_may_be_called_twice(vllm):
    assert f'{LlavaNormConfig.model_type} = "{vllm_plugin.__name__}:register"' in (ROOT / "pyproject.toml").read_text()
    vllm_plugin.register()
    vllm_plugin.register()
    ((architecture, model),) = vllm.models.items()
    assert architecture == LlavaNormForConditionalGeneration.__name__
    assert resolved(model).__name__ == architecture
    assert isinstance(AutoConfig.for_model("llava_norm"), LlavaNormConfig)


@pytest.mark.parametrize("arm", NORM_TYPES)
def test_served_projector_ends_in_the_arms_norm(arm, vllm):
    config = LlavaNormConfig(
        text_config=SMALL | {"model_type": "llama"},
        vision_config=SMALL | {"model_type": "siglip_vision_model"},
        mm_projector_norm=arm,
        mm_projector_norm_init_gain=0.25,
        projector_hidden_act=hf.NEEDS_TRUST,
    )
    served = resolved(vllm_plugin.MODEL)(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))
    projector = served.multi_modal_projector.eval()
    assert isinstance(projector, LlavaNormProjector)
    norm = projector.norm
    assert type(norm) is (NORM_TYPES[arm] or type(None))
    tokens = torch.randn(2, 3, 8)
    before = projector.linear_2(nn.functional.gelu(projector.linear_1(tokens)))
    torch.testing.assert_close(projector(tokens), before if norm is None else norm.normalize(before))
