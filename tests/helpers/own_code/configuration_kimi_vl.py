"""The config of a tiny Kimi-VL: fields and names as in its repository."""

from transformers import DeepseekV3Config
from transformers.configuration_utils import PretrainedConfig

from .configuration_moonvit import MoonViTConfig


class KimiVLConfig(PretrainedConfig):
    model_type = "kimi_vl"

    def __init__(self, vision_config=None, text_config=None, media_placeholder_token_id: int = 300, **kwargs):
        self.vision_config = MoonViTConfig(**vision_config) if isinstance(vision_config, dict) else vision_config
        self.text_config = DeepseekV3Config(**text_config) if isinstance(text_config, dict) else text_config
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**kwargs)
