"""Tiny random language models, towers and the LLaVA models made of them, from fixed seeds."""

import torch
from data_files import write_data
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.model.builder import load_language_model
from llava.train.arguments import ModelArguments
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, VISION_TOWER, set_trainable

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION_SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2} | {
    "image_size": 16,
    "patch_size": 8,
}
V = 4  # visual tokens of a tiny picture
# What each stage trains.
STAGE_1, STAGE_2 = frozenset({ADAPTER}), frozenset({ADAPTER, LANGUAGE_MODEL, VISION_TOWER})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus ChatML's two markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def write_tiny(root):
    """What the fixture `tiny` gives, in `root`."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    language_models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, **special, tie_word_embeddings=False)),
        "qwen": Qwen2ForCausalLM(Qwen2Config(**SIZES, **special, tie_word_embeddings=False)),
        "qwen_tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, **special, tie_word_embeddings=True)),
        "llama_tied": LlamaForCausalLM(LlamaConfig(**SIZES, **special, tie_word_embeddings=True)),
    }
    for name, model in language_models.items():
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(5)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    SiglipVisionModel(SiglipVisionConfig(**VISION_SIZES)).save_pretrained(root / "siglip")
    SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(root / "siglip")
    CLIPVisionModel(CLIPVisionConfig(**VISION_SIZES)).save_pretrained(root / "clip")
    write_data(root / "data")
    return root


def vision_arguments(tiny, tower="siglip", norm="gwc_layernorm", **fields) -> ModelArguments:
    return ModelArguments(model_name_or_path="", vision_tower=str(tiny / tower), mm_projector_norm=norm, **fields)


def make(tiny, language_model="llama", tower="siglip", norm="gwc_layernorm", **fields):
    """An untrained LLaVA in eval mode, made of parts in the folder of the fixture `tiny`."""
    torch.manual_seed(0)
    model = load_language_model(str(tiny / language_model))
    model.get_model().initialize_vision_modules(vision_arguments(tiny, tower, norm, **fields))
    return model.eval()


def trained(tiny, parts, **options):
    """A LLaVA in training mode of which `parts` are trained, without padding."""
    model = make(tiny, **options).train()
    set_trainable(model, parts)
    model.padding_free = True
    return model
