"""The plugin for vLLM, without vLLM: what its entry point registers.

`bash tests/nightly/serving/run.sh` tests it in a real server.
"""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

from paths import ROOT
from transformers import CONFIG_MAPPING, AutoConfig

from llava.export import vllm_plugin
from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration


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
