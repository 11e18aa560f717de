"""The language model's file for llama.cpp: its fields, weights and tokenizer.

A decoder is a row of `DECODERS`, a tokenizer's way of cutting text a row of `PRE_TOKENIZERS`; others are refused by
name.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from llava.conversation import Conversation
from llava.export.chat_template import chat_template
from llava.export.gguf_file import library
from llava.model.context import context_length
from llava.model.language_model.families import family_of
from llava.model.llava_arch import LlavaMetaForCausalLM

if TYPE_CHECKING:
    from gguf import GGUFWriter


class Decoder(NamedTuple):
    """How llama.cpp represents a family of `llava.model.language_model.families`.

    Attributes:
        architecture: llama.cpp's name of it.
        interleaved: llama.cpp's rotary embedding turns neighbouring elements, where transformers' turns halves.
    """

    architecture: str
    interleaved: bool


DECODERS = {"Llama": Decoder("llama", True), "Qwen": Decoder("qwen2", False)}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Keys: the steps of the pre-tokenizer in tokenizer.json, and whether whole words of the vocabulary skip the merges.
PRE_TOKENIZERS = {
    (("digits", "bytes and words"), False): "smollm",
    (("bytes and words",), False): "gpt-2",
    ((_WORDS % r"\p{N}{1,3}", "bytes"), True): "llama-bpe",
    ((_WORDS % r"\p{N}", "bytes"), False): "qwen2",
}


def check(model: LlavaMetaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError where llama.cpp would not compute what the model does."""
    family = family_of(model.config).name
    if family not in DECODERS:
        raise ValueError(f"the decoder is a {family}; only {', '.join(DECODERS)} were compared with llama.cpp")
    rotary = model.get_model().rotary_emb
    kind = getattr(rotary, "rope_type", "default")
    if kind not in ("default", "linear", "llama3") or getattr(rotary, "attention_scaling", 1.0) != 1.0:
        raise ValueError(f"the decoder's rotary embedding is of type {kind}; expected default, linear or llama3")
    if getattr(model.config, "use_sliding_window", False):
        raise ValueError("the decoder's attention has a sliding window, which was not compared with llama.cpp")
    pre_tokenizer(tokenizer)


def decoder_of(model: LlavaMetaForCausalLM) -> Decoder:
    """The row of the model's family."""
    return DECODERS[family_of(model.config).name]


def fields(
    model: LlavaMetaForCausalLM, tokenizer: PreTrainedTokenizerBase, template: Conversation
) -> Callable[["GGUFWriter"], None]:
    """A function that writes the fields of the language model into a `GGUFWriter`."""
    config = model.config

    def add(writer: "GGUFWriter") -> None:
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(context_length(config))
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(_head_dim(config))
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
        _add_tokenizer(writer, tokenizer, config.vocab_size, template)
        tags = getattr(config, "mm_use_im_start_end", False)
        writer.add_chat_template(chat_template(template, tokenizer, tags, marks_answers=False))

    return add


def tensors(model: LlavaMetaForCausalLM) -> dict[str, torch.Tensor]:
    """The decoder's weights by llama.cpp's names; a tied output matrix is left out, as llama.cpp does."""
    gguf, config, decoder = library(), model.config, decoder_of(model)
    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == decoder.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    renamed = {}
    for name, tensor in model.state_dict().items():
        if ".vision_tower." in name or ".mm_projector." in name:
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = name.split(".")[-2]
        if decoder.interleaved and part in heads:
            tensor = interleave(tensor, heads[part])
        renamed[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor
    factors = rotary_factors(model)
    return renamed if factors is None else renamed | {"rope_freqs.weight": factors}


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix [heads * 2 * half, D], or bias, with the two halves of each head in turn."""
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rotary_factors(model: LlavaMetaForCausalLM) -> torch.Tensor | None:
    """What each rotary frequency is divided by, [head_dim / 2]; None if that is 1 for all."""
    config, frequencies = model.config, model.get_model().rotary_emb.inv_freq.double().cpu()
    exponents = torch.arange(0, _head_dim(config), 2, dtype=torch.float64) / _head_dim(config)
    factors = config.rope_parameters["rope_theta"] ** -exponents / frequencies
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors.float()


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """llama.cpp's name of the way in which a byte-level BPE tokenizer cuts text.

    Raises:
        ValueError: the tokenizer is of another kind, or cuts in a way that was not compared.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, pre = content["model"], content["pre_tokenizer"] or {}
    steps = tuple(_step(part) for part in pre.get("pretokenizers", [pre]))
    known_as = PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))
    normalizer = (content["normalizer"] or {}).get("type")
    if model["type"] != "BPE" or model.get("byte_fallback") or normalizer not in (None, "NFC") or known_as is None:
        known = ", ".join(PRE_TOKENIZERS.values())
        raise ValueError(
            f"the tokenizer ({model['type']}, normalized by {normalizer}, cut by {', then '.join(steps)}) is none of "
            f"those that were compared with llama.cpp: {known}"
        )
    return known_as


def _step(part: dict[str, Any]) -> str:
    match part:
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return "bytes and words" if use_regex else "bytes"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return pattern
    return f"{part.get('type')} ({', '.join(f'{k}={v}' for k, v in part.items() if k != 'type')})"


def _add_tokenizer(writer: "GGUFWriter", tokenizer: PreTrainedTokenizerBase, rows: int, template: Conversation) -> None:
    kinds = library().TokenType
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    words, types = [], []
    for index in range(rows):
        words.append(vocabulary.get(index, f"[PAD{index}]"))
        special = added[index].special if index in added else None
        types.append(
            kinds.UNUSED
            if index not in vocabulary
            else kinds.NORMAL
            if special is None
            else kinds.CONTROL
            if special
            else kinds.USER_DEFINED
        )
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]])
    for name in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if (end := end_token(tokenizer, template)) is not None:
        writer.add_eot_token_id(end)
    writer.add_add_bos_token(False)  # the chat template writes it where training had it


def end_token(tokenizer: PreTrainedTokenizerBase, template: Conversation) -> int | None:
    """The token that closes an answer of the template; None where it takes more than one."""
    sample = template.copy()
    sample.messages = [[sample.roles[0], "question"], [sample.roles[1], "answer"]]
    end = [part.text for part in sample.parts() if part.kind == "end"][-1].strip()
    ids = tokenizer(end, add_special_tokens=False).input_ids
    return ids[0] if len(ids) == 1 else None
