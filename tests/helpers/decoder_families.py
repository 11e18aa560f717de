"""A tiny random language model of each decoder family."""

from pathlib import Path

import torch
from tiny_models import SIZES, byte_tokenizer

from llava.model.language_model.families import DECODERS

# What makes a tiny model of the family show what sets it apart; windows are shorter than the samples.
CASES = {
    "Llama": {},
    "Qwen": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 3},
    "Gemma3": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 3, "tie_word_embeddings": True}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
    | {"attention_multiplier": 0.2},
}
NAMES = [family.name for family in DECODERS]


def write_families(root: Path) -> Path:
    """Writes `families/<name>`, model and tokenizer, into `root`, if they are not there; returns `root`."""
    tokenizer = byte_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for family in DECODERS:
        folder = root / "families" / family.name
        if folder.exists():
            continue
        torch.manual_seed(0)
        options = special | {"pad_token_id": 0, "tie_word_embeddings": False} | CASES[family.name]
        model = family.causal_lm(family.config(**SIZES, **options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # norms away from the identity
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    parameter.mul_(10 if "embed" in name else 3)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return root
