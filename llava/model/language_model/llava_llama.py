"""LLaVA on a Llama decoder: model type `llava_llama`, registered with the Auto classes."""

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from llava.model.llava_arch import LlavaConfigMixin, LlavaMetaForCausalLM, LlavaMetaModel


class LlavaLlamaConfig(LlavaConfigMixin, LlamaConfig):
    """A Llama config plus the `mm_*` fields of tower, projector and norm."""

    model_type = "llava_llama"


class LlavaLlamaModel(LlavaMetaModel, LlamaModel):
    """The Llama decoder with `vision_tower` and `mm_projector`."""

    config_class = LlavaLlamaConfig


class LlavaLlamaForCausalLM(LlavaMetaForCausalLM, LlamaForCausalLM):
    """Llama LLaVA with LM head; checkpoint keys are those of upstream's class of the same name."""

    config_class = LlavaLlamaConfig

    def __init__(self, config: LlavaLlamaConfig):
        super(LlamaForCausalLM, self).__init__(config)  # not LlamaForCausalLM's own: it would build a second decoder
        self.model = LlavaLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(LlavaLlamaConfig.model_type, LlavaLlamaConfig)
AutoModelForCausalLM.register(LlavaLlamaConfig, LlavaLlamaForCausalLM)
