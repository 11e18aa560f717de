"""From one conversation to `input_ids` and `labels`: written once, tokenised once, labelled by characters.

`llava.conversation` writes the conversation as pieces that know who speaks. The joined text is split at `<image>`, each
chunk goes through the fast tokenizer once, and a token is a target if it overlaps a piece that is to be learnt. Cost:
one tokenizer call per chunk; nothing is tokenised twice to find where a turn begins.

Label masks: `assistant` learns what the assistant says and the token that ends its turn. `upstream` computes the labels
of LLaVA and LLaVA-NeXT, for comparisons; docs/upstream.md lists where it does not, and why.

Shapes: S sequence (an image placeholder counts as one).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from llava.constants import DEFAULT_IMAGE_TOKEN, IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import Conversation, Part, SeparatorStyle, get_template
from llava.data.turns import (
    CHATML_STYLES,
    ROLE_TAGGED,
    LabelMasking,
    Turn,
    check_label_masking,
    check_order,
    normalize_image_tokens,
    parse_turns,
    training_turns,
)
from llava.mm_utils import encode_chunk, leading_ids


class TokenizedSample(NamedTuple):
    """One conversation as LongTensors [S]; `labels` is IGNORE_INDEX where nothing is learnt."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class _Tokens(NamedTuple):
    """Ids, the character at which each token starts, and whether it overlaps a marked character; arrays [S]."""

    ids: np.ndarray
    starts: np.ndarray
    marked: np.ndarray


def preprocess(
    conversations: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    template: str | Conversation,
    *,
    label_masking: LabelMasking = "assistant",
    has_image: bool = True,
) -> TokenizedSample:
    """Token ids of one conversation, with IMAGE_TOKEN_INDEX for every image, and labels; not cut to a length.

    Args:
        conversations: LLaVA's list of `{"from": "human" | "gpt" | "system", "value": str}`.
        tokenizer: a fast tokenizer.
        template: from `llava.conversation`, or its name.
        label_masking: `assistant` or `upstream`, see the module.
        has_image: False reads `<image>` as a word, as LLaVA does in records without an image; `plain` always has one.

    Raises:
        ValueError: the conversation is malformed or the template cannot express it; the message says what was expected.
    """
    template = get_template(template) if isinstance(template, str) else template
    check_label_masking(label_masking, template)
    _check_tokenizer(tokenizer)
    upstream = label_masking == "upstream"
    has_image = has_image or template.sep_style is SeparatorStyle.PLAIN
    turns = training_turns(conversations, template, label_masking, has_image)
    if has_image:
        turns = normalize_image_tokens(turns, template, label_masking)
    parts = write_parts(turns, template, keep_empty=not upstream or template.sep_style in ROLE_TAGGED)
    tokens = _tokenize(parts, _is_target(template, upstream), tokenizer, has_image)
    targets = _upstream_targets(tokens, parts, template, tokenizer) if upstream else tokens.marked
    labels = np.where(targets & (tokens.ids != IMAGE_TOKEN_INDEX), tokens.ids, IGNORE_INDEX)
    return TokenizedSample(torch.from_numpy(tokens.ids), torch.from_numpy(labels))


def generation_ids(
    conversations: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, template: str | Conversation
) -> torch.Tensor:
    """`input_ids` [S] that ask for the next answer: a conversation that ends with a human turn, and an open header.

    `preprocess` of the conversation with its answer begins with the same ids.

    Raises:
        ValueError: see `preprocess`; or the last turn is not a human's.
    """
    template = get_template(template) if isinstance(template, str) else template
    _check_tokenizer(tokenizer)
    turns = parse_turns(conversations)
    if turns[-1][0] != "human":
        raise ValueError(f"expected the last turn to be 'human', found {turns[-1][0]!r}")
    check_order(turns, template, complete=False)
    turns = normalize_image_tokens(turns, template, "assistant")
    parts = write_parts(turns, template, keep_empty=True, open_answer=True)
    return torch.from_numpy(_tokenize(parts, _is_target(template, False), tokenizer, True).ids)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__}: labels need a fast tokenizer (one with character offsets)")


def write_parts(
    turns: list[Turn], template: Conversation, *, keep_empty: bool = True, open_answer: bool = False
) -> list[Part]:
    """The turns as the template's pieces; `open_answer` adds the header of an answer to come."""
    if template.sep_style is SeparatorStyle.PLAIN:
        return _write_plain(turns, template)
    system = [text for speaker, text in turns if speaker == "system"]
    messages = [[template.roles[speaker == "gpt"], text] for speaker, text in turns if speaker != "system"]
    conversation = replace(template.with_system(system[0]) if system else template, messages=messages)
    if open_answer:
        conversation.append_message(conversation.roles[1], None)
    return conversation.parts(keep_empty)


def _write_plain(turns: list[Turn], template: Conversation) -> list[Part]:
    """Images and caption, without the question's words."""
    parts = [Part(DEFAULT_IMAGE_TOKEN * turns[0][1].count(DEFAULT_IMAGE_TOKEN), "user", "body")]
    if len(turns) > 1:
        parts += [Part(turns[1][1], "assistant", "body"), Part(template.sep, "assistant", "end")]
    return parts


def _is_target(template: Conversation, upstream: bool) -> Callable[[Part], bool]:
    """A function that says whether a piece is to be learnt."""
    kinds = ("body", "end")
    if upstream and template.sep_style in ROLE_TAGGED:
        kinds = ("header", "body", "end", "tail")
    return lambda part: part.speaker == "assistant" and part.kind in kinds


def _tokenize(
    parts: list[Part], is_target: Callable[[Part], bool], tokenizer: PreTrainedTokenizerBase, has_image: bool
) -> _Tokens:
    text = "".join(part.text for part in parts)
    marks = np.repeat([is_target(part) for part in parts], [len(part.text) for part in parts])
    bos = leading_ids(text, tokenizer)
    pieces = [_Tokens(np.array(bos, np.int64), np.zeros(len(bos), np.int64), np.zeros(len(bos), bool))]
    start = 0
    for index, chunk in enumerate(text.split(DEFAULT_IMAGE_TOKEN) if has_image else [text]):
        if index:
            placeholder = np.array([start - len(DEFAULT_IMAGE_TOKEN)])
            pieces.append(_Tokens(np.array([IMAGE_TOKEN_INDEX]), placeholder, np.array([False])))
        pieces.append(_tokenize_chunk(chunk, marks[start : start + len(chunk)], tokenizer, start))
        start += len(chunk) + len(DEFAULT_IMAGE_TOKEN)
    return _joined(pieces)


def _joined(pieces: list[_Tokens]) -> _Tokens:
    return _Tokens(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _tokenize_chunk(chunk: str, marks: np.ndarray, tokenizer: PreTrainedTokenizerBase, origin: int) -> _Tokens:
    ids, offsets = encode_chunk(chunk, tokenizer)
    assert offsets is not None  # `preprocess` refuses slow tokenizers
    starts, ends = offsets.T
    borders = np.flatnonzero(marks[1:] & ~marks[:-1]) + 1
    across = borders.searchsorted(starts, "right") < borders.searchsorted(ends, "left")
    if across.any():
        # A token spans the border, for example where "\n" ends a header and begins an answer. Generation starts
        # at the border, so the tokens have to end there too.
        cuts = [0, *np.unique(borders[borders.searchsorted(starts[across], "right")]).tolist(), len(chunk)]
        return _joined([_tokenize_chunk(chunk[i:j], marks[i:j], tokenizer, origin + i) for i, j in pairwise(cuts)])
    # An empty span is the space that SentencePiece puts before a text: it belongs to the character that follows.
    ends = np.minimum(np.maximum(ends, starts + 1), len(marks))
    marked_before = np.concatenate(([0], marks.cumsum()))
    return _Tokens(np.array(ids, np.int64), origin + starts, marked_before[ends] > marked_before[starts])


def _upstream_targets(
    tokens: _Tokens, parts: list[Part], template: Conversation, tokenizer: PreTrainedTokenizerBase
) -> np.ndarray:
    if template.sep_style in ROLE_TAGGED:
        return tokens.marked | np.isin(tokens.ids, _always_learnt(template, tokenizer))
    by_rounds = template.sep_style in (SeparatorStyle.TWO, SeparatorStyle.LLAMA_2)
    ignored = by_rounds and _is_ignored(tokens, parts, template, tokenizer)
    return np.zeros_like(tokens.marked) if ignored else tokens.marked


def _always_learnt(template: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that LLaVA-NeXT makes targets in every turn, the user's too."""
    if template.sep_style in CHATML_STYLES:
        newline = [198]  # its id in the Qwen vocabularies; LLaVA-NeXT takes it in others too
        markers = ["<|im_start|>", "<|im_end|>"]
    else:
        newline = []
        markers = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    ids = tokenizer.convert_tokens_to_ids(markers)
    assert isinstance(ids, list)  # as the markers are
    return newline + ids


def _is_ignored(tokens: _Tokens, parts: list[Part], template: Conversation, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether LLaVA loses the whole sample ("tokenization mismatch").

    LLaVA finds rounds and answers again by splitting the text at its separators, adds up their lengths, and drops the
    sample if the sum differs from the sample's length, unless the sum reaches the maximum length.
    """
    text = "".join(part.text for part in parts)
    answer_mark = "[/INST] " if template.sep_style is SeparatorStyle.LLAMA_2 else f"{template.sep}{template.roles[1]}: "
    separator = template.sep2 or ""  # templates of these styles have one
    rounds = text.split(separator)
    begins = accumulate((len(piece) + len(separator) for piece in rounds), initial=0)
    broken = next((begin for begin, piece in zip(begins, rounds, strict=False) if piece.count(answer_mark) != 1), None)
    counted = len(tokens.ids)
    if broken is not None and broken < len(text):
        counted = int((tokens.starts < broken).sum())
    elif tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokens.ids:
        return False  # <unk> is LLaVA's padding, which the length leaves out
    return counted < tokenizer.model_max_length
