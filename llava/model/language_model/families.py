"""The decoders that LLaVA is built on: one row per family, from which its LLaVA classes are made.

Everything else that depends on the family is read from this table or from the decoder itself. CONTRIBUTING.md says how
to add a family.
"""

from typing import Any, NamedTuple

import transformers as hf
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from llava.model.llava_arch import LlavaMetaConfig, LlavaMetaForCausalLM, LlavaMetaModel
from llava.model.loss import LMHead


class Decoder(NamedTuple):
    """A family's classes in transformers, and its name: `Llava<name>ForCausalLM`, model type `llava_<name>`."""

    name: str
    config: type[PretrainedConfig]
    model: type[PreTrainedModel]
    causal_lm: type[PreTrainedModel]

    @property
    def model_type(self) -> str:
        """The model type of LLaVA checkpoints; that of plain language models is `config.model_type`."""
        return f"llava_{self.name.lower()}"


DECODERS = [
    Decoder("Llama", hf.LlamaConfig, hf.LlamaModel, hf.LlamaForCausalLM),  # also Vicuna, SmolLM2
    Decoder("Qwen", hf.Qwen2Config, hf.Qwen2Model, hf.Qwen2ForCausalLM),  # Qwen2 and 2.5, by LLaVA-NeXT's name
    Decoder("Qwen3", hf.Qwen3Config, hf.Qwen3Model, hf.Qwen3ForCausalLM),
    Decoder("Mistral", hf.MistralConfig, hf.MistralModel, hf.MistralForCausalLM),
    Decoder("Gemma3", hf.Gemma3TextConfig, hf.Gemma3TextModel, hf.Gemma3ForCausalLM),  # text models alone
    Decoder("Phi3", hf.Phi3Config, hf.Phi3Model, hf.Phi3ForCausalLM),  # also Phi-4
    Decoder("Olmo2", hf.Olmo2Config, hf.Olmo2Model, hf.Olmo2ForCausalLM),  # no Pre-Norm: a control for the theory
    Decoder("SmolLM3", hf.SmolLM3Config, hf.SmolLM3Model, hf.SmolLM3ForCausalLM),
    Decoder("Granite", hf.GraniteConfig, hf.GraniteModel, hf.GraniteForCausalLM),
]

# Fields that change attention, logits, prompts (LLaVA before 1.5 put tokens around pictures) or pictures (by EXIF) as
# nothing here does.
_UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "mm_use_im_start_end",
    "image_orientation",
)


class LlavaClasses(NamedTuple):
    """What `llava_classes` makes of a family."""

    config: type[PretrainedConfig]
    model: type[LlavaMetaModel]
    causal_lm: type[LlavaMetaForCausalLM]


def llava_classes(family: Decoder) -> LlavaClasses:
    """The family's LLaVA config, decoder and causal LM, registered with the Auto classes.

    Modules and their order are those of upstream's hand-written classes, and so are the checkpoint keys.
    """

    def define(suffix: str, bases: tuple, docstring: str, **members: Any) -> type:
        return type(f"Llava{family.name}{suffix}", bases, {"__doc__": docstring, "__module__": __name__, **members})

    config_class = define(
        "Config",
        (LlavaMetaConfig, family.config),
        f"{family.config.__name__} plus the `mm_*` fields of tower, projector and norm.",
        model_type=family.model_type,
    )
    model_class = define(
        "Model",
        (LlavaMetaModel, family.model),
        f"{family.model.__name__} with `vision_tower` and `mm_projector`.",
        config_class=config_class,
    )

    def init(self: Any, config: PretrainedConfig) -> None:
        check_supported(config)
        # pyrefly: ignore[invalid-argument]  # the parent is known when the class is made
        super(family.causal_lm, self).__init__(config)  # not its own, which would build a second decoder
        self.model = model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.logits_scaling = getattr(config, "logits_scaling", 1.0)
        self.post_init()

    causal_lm_class = define(
        "ForCausalLM",
        (LlavaMetaForCausalLM, family.causal_lm),
        f"{family.causal_lm.__name__} that sees images; raises ValueError for what `check_supported` refuses.",
        config_class=config_class,
        __init__=init,
    )
    AutoConfig.register(family.model_type, config_class)
    AutoModelForCausalLM.register(config_class, causal_lm_class)
    return LlavaClasses(config_class, model_class, causal_lm_class)


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError for a config field that asks for what is not supported."""
    for field in _UNSUPPORTED:
        if (value := getattr(config, field, None)) not in (None, False, "stored"):
            raise ValueError(f"config.{field}={value} ({config.model_type}): not supported")


LLAVA_CLASSES = {family.model_type: llava_classes(family) for family in DECODERS}
"""Each family's classes, by LLaVA's model type."""

# So that pickle and `from ... import` find the classes by name.
globals().update({made.__name__: made for classes in LLAVA_CLASSES.values() for made in classes})

# By the checkpoint's model_type, either a plain language model's or LLaVA's.
MODEL_CLASSES: dict[str, type[LlavaMetaForCausalLM]] = {
    model_type: LLAVA_CLASSES[family.model_type].causal_lm
    for family in DECODERS
    for model_type in (family.config.model_type, family.model_type)
}
MODEL_CLASSES["llava"] = MODEL_CLASSES["llama"]  # the type of the first LLaVA checkpoints


def decoder_of(config: PretrainedConfig | type[PretrainedConfig]) -> Decoder:
    """The row that a LLaVA config, or its class, was made from."""
    return next(family for family in DECODERS if family.model_type == config.model_type)
