"""Context length of a decoder: longer prompts are refused, never cut. Only training cuts samples."""

from collections.abc import Iterable

from transformers import PretrainedConfig

# Rope types whose configs may leave `max_position_embeddings` unscaled; the rest write the scaled length there.
_EXTENDED_BY_FACTOR = ("linear", "dynamic", "yarn")


def context_length(config: PretrainedConfig) -> int:
    """Tokens that the decoder takes, after rope scaling."""
    if stated := getattr(config, "max_sequence_length", None):  # Vicuna's long versions write it
        return stated
    length, rope = config.max_position_embeddings, config.rope_parameters or {}
    if rope.get("rope_type") not in _EXTENDED_BY_FACTOR:  # with one rope per kind of layer (Gemma 3) there is no type
        return length
    return max(length, int(rope["factor"] * (rope.get("original_max_position_embeddings") or length)))


def check_fits(lengths: Iterable[int], config: PretrainedConfig) -> None:
    """Raises ValueError if a prompt of a batch is longer than the decoder's context.

    Args:
        lengths: tokens of each prompt, visual tokens included.
        config: the decoder's.
    """
    limit = context_length(config)
    for sample, length in enumerate(lengths):
        if length > limit:
            raise ValueError(
                f"sample {sample} of the batch has {length} tokens with its pictures, and the model takes {limit} "
                "(config.json: max_position_embeddings and rope scaling); shorten the prompt"
            )
