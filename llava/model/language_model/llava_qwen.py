"""LLaVA on a Qwen2 decoder: model type `llava_qwen`, registered with the Auto classes."""

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from llava.model.llava_arch import LlavaConfigMixin, LlavaMetaForCausalLM, LlavaMetaModel


class LlavaQwenConfig(LlavaConfigMixin, Qwen2Config):
    """A Qwen2 config plus the `mm_*` fields of tower, projector and norm."""

    model_type = "llava_qwen"


class LlavaQwenModel(LlavaMetaModel, Qwen2Model):
    """The Qwen2 decoder with `vision_tower` and `mm_projector`."""

    config_class = LlavaQwenConfig


class LlavaQwenForCausalLM(LlavaMetaForCausalLM, Qwen2ForCausalLM):
    """Qwen2 LLaVA with LM head; checkpoint keys are those of upstream's class of the same name."""

    config_class = LlavaQwenConfig

    def __init__(self, config: LlavaQwenConfig):
        super(Qwen2ForCausalLM, self).__init__(config)  # not Qwen2ForCausalLM's own: it would build a second decoder
        self.model = LlavaQwenModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(LlavaQwenConfig.model_type, LlavaQwenConfig)
AutoModelForCausalLM.register(LlavaQwenConfig, LlavaQwenForCausalLM)
