"""The configs of a tiny Ovis 2.5: fields and names as in its repository."""

from transformers import Qwen3Config
from transformers.configuration_utils import PretrainedConfig


class Siglip2NavitConfig(PretrainedConfig):
    model_type = "siglip2_navit"

    def __init__(
        self,
        hidden_size: int = 24,
        intermediate_size: int = 32,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_channels: int = 3,
        patch_size: int = 4,
        hidden_stride: int = 2,
        temporal_patch_size: int = 1,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_channels = num_channels
        self.patch_size = patch_size
        self.hidden_stride = hidden_stride
        self.temporal_patch_size = temporal_patch_size


class Ovis2_5_Config(PretrainedConfig):
    model_type = "ovis2_5"
    sub_configs = {"llm_config": Qwen3Config, "vit_config": Siglip2NavitConfig}

    def __init__(self, llm_config=None, vit_config=None, visual_vocab_size: int = 40, hidden_size=None, **kwargs):
        self.llm_config = Qwen3Config(**llm_config) if isinstance(llm_config, dict) else llm_config
        self.vit_config = Siglip2NavitConfig(**vit_config) if isinstance(vit_config, dict) else vit_config
        self.visual_vocab_size = visual_vocab_size
        self.hidden_size = hidden_size
        super().__init__(**kwargs)
