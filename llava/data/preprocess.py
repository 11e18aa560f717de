"""From one conversation to `input_ids` and `labels`: written once, tokenised once, labelled by characters.

`llava.conversation` writes the conversation as pieces that know who speaks. The joined text is split at `<image>`, each
chunk goes through the fast tokenizer once, and a token is a target if it overlaps a piece that is to be learnt. Cost:
one tokenizer call per chunk; nothing is tokenised twice to find out where a turn begins.

Label masks: `assistant` learns what the assistant says and the token that ends its turn. `upstream` computes the labels
of LLaVA and LLaVA-NeXT, for comparisons; docs/upstream.md lists where it does not, and why.

Shapes: S sequence (an image placeholder counts one).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from llava.constants import (
    DEFAULT_IM_END_TOKEN,
    DEFAULT_IM_START_TOKEN,
    DEFAULT_IMAGE_TOKEN,
    IGNORE_INDEX,
    IMAGE_TOKEN_INDEX,
)
from llava.conversation import Conversation, Part, SeparatorStyle, get_template
from llava.mm_utils import encode_chunk, leading_ids

LABEL_MASKINGS = ("assistant", "upstream")
LabelMasking = Literal["assistant", "upstream"]
Turn = tuple[str, str]
"""Speaker ("human", "gpt" or "system") and text."""

_SPEAKERS = ("human", "gpt", "system")
_CHATML = (SeparatorStyle.CHATML, SeparatorStyle.QWEN)
_ROLE_TAGGED = (*_CHATML, SeparatorStyle.LLAMA_3)
_UPSTREAM_STYLES = (
    SeparatorStyle.PLAIN, SeparatorStyle.TWO, SeparatorStyle.LLAMA_2, SeparatorStyle.MPT, *_ROLE_TAGGED
)  # fmt: skip


class Sample(NamedTuple):
    """One conversation as LongTensors [S]; `labels` is IGNORE_INDEX where nothing is learnt."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class _Tokens(NamedTuple):
    """Ids, the character each token starts at, and whether it overlaps a marked character; arrays [S]."""

    ids: np.ndarray
    starts: np.ndarray
    marked: np.ndarray


def preprocess(
    conversations: list[dict[str, str]],
    tokenizer: Any,
    template: str | Conversation,
    *,
    label_masking: LabelMasking = "assistant",
    mm_use_im_start_end: bool = False,
    has_image: bool = True,
) -> Sample:
    """Token ids and labels of one conversation.

    Args:
        conversations: LLaVA's list of `{"from": "human" | "gpt" | "system", "value": str}`.
        tokenizer: a fast tokenizer.
        template: from `llava.conversation`, or its name.
        label_masking: `assistant` or `upstream`, see the module.
        mm_use_im_start_end: put `<im_start>` and `<im_end>` around every image.
        has_image: False reads `<image>` as a word, as LLaVA does in records without an image; `plain` always has one.

    Returns:
        `input_ids` with IMAGE_TOKEN_INDEX for every image, and `labels`; neither is cut to a length.

    Raises:
        ValueError: the conversation is malformed or the template cannot express it; the message says what was expected.
    """
    template = get_template(template) if isinstance(template, str) else template
    _check_arguments(tokenizer, template, label_masking)
    upstream = label_masking == "upstream"
    has_image = has_image or template.sep_style is SeparatorStyle.PLAIN
    turns = _training_turns(parse_turns(conversations), template, upstream, has_image)
    if has_image:
        turns = normalize_image_tokens(turns, template, label_masking, mm_use_im_start_end)
    parts = write_parts(turns, template, keep_empty=not upstream or template.sep_style in _ROLE_TAGGED)
    tokens = _tokenize(parts, _is_target(template, upstream), tokenizer, has_image)
    targets = _upstream_targets(tokens, parts, template, tokenizer) if upstream else tokens.marked
    labels = np.where(targets & (tokens.ids != IMAGE_TOKEN_INDEX), tokens.ids, IGNORE_INDEX)
    return Sample(torch.from_numpy(tokens.ids), torch.from_numpy(labels))


def generation_ids(
    conversations: list[dict[str, str]],
    tokenizer: Any,
    template: str | Conversation,
    *,
    mm_use_im_start_end: bool = False,
) -> torch.Tensor:
    """`input_ids` [S] that ask for the next answer: a conversation that ends with a human turn, and an open header.

    `preprocess` of the conversation with that answer begins with the same ids.

    Raises:
        ValueError: as `preprocess`, or the last turn is not a human's.
    """
    template = get_template(template) if isinstance(template, str) else template
    _check_arguments(tokenizer, template, "assistant")
    turns = parse_turns(conversations)
    if turns[-1][0] != "human":
        raise ValueError(f"expected the last turn to be 'human', found {turns[-1][0]!r}")
    _check_order(turns, template, complete=False)
    turns = normalize_image_tokens(turns, template, "assistant", mm_use_im_start_end)
    parts = write_parts(turns, template, keep_empty=True, open_answer=True)
    return torch.from_numpy(_tokenize(parts, _is_target(template, False), tokenizer, True).ids)


# --- turns ------------------------------------------------------------------------------------------------------------


def parse_turns(conversations: Any) -> list[Turn]:
    """The turns as (speaker, text).

    Raises:
        ValueError: not a list of `{"from", "value"}` with known speakers, empty, or a system turn after the first.
    """
    if not isinstance(conversations, list) or not conversations:
        found = "an empty list" if conversations == [] else type(conversations).__name__
        raise ValueError(f"'conversations': expected a non-empty list of turns, found {found}")
    return [_parse_turn(index, turn) for index, turn in enumerate(conversations)]


def _parse_turn(index: int, turn: Any) -> Turn:
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        found = f"the keys {sorted(map(str, turn))}" if isinstance(turn, dict) else type(turn).__name__
        raise ValueError(f"turn {index}: expected {{'from': ..., 'value': ...}}, found {found}")
    speaker, text = turn["from"], turn["value"]
    if speaker not in _SPEAKERS:
        raise ValueError(f"turn {index}: 'from' is {speaker!r}, expected one of {', '.join(_SPEAKERS)}")
    if not isinstance(text, str):
        raise ValueError(f"turn {index}: 'value' is {type(text).__name__}, expected a string")
    if speaker == "system" and index > 0:
        raise ValueError(f"turn {index}: a system turn must be the first")
    return speaker, text


def _training_turns(turns: list[Turn], template: Conversation, upstream: bool, has_image: bool) -> list[Turn]:
    if upstream:
        turns = _drop_leading_answer(turns, template, has_image)
    _check_order(turns, template)
    if not upstream and not any(speaker == "gpt" for speaker, _ in turns):
        raise ValueError("expected at least one 'gpt' turn, found none: there is nothing to learn")
    return turns


def _check_order(turns: list[Turn], template: Conversation, complete: bool = True) -> None:
    style, speakers = template.sep_style, [speaker for speaker, _ in turns]
    if style is SeparatorStyle.PLAIN:
        expected = ["human", "gpt"] if complete else ["human"]
        if speakers != expected or DEFAULT_IMAGE_TOKEN not in turns[0][1]:
            raise ValueError(
                f"template plain: expected the turns {expected}, the first with {DEFAULT_IMAGE_TOKEN}, found {speakers}"
            )
        return
    spoken = [speaker for speaker in speakers if speaker != "system"]
    if not spoken:
        raise ValueError("expected a human or gpt turn after the system turn, found none")
    if style is SeparatorStyle.LLAMA_2 and spoken[0] != "human":
        raise ValueError("template llama_2: expected the human to speak first, found 'gpt'")
    if style not in (*_ROLE_TAGGED, SeparatorStyle.GEMMA):
        for index in range(1, len(spoken)):
            if spoken[index] == spoken[index - 1]:
                raise ValueError(
                    f"two {spoken[index]!r} turns in a row: templates of style {style.name} "
                    "need human and gpt to take turns"
                )


def _check_arguments(tokenizer: Any, template: Conversation, label_masking: str) -> None:
    if label_masking not in LABEL_MASKINGS:
        raise ValueError(f"--label_masking {label_masking!r}: expected one of {', '.join(LABEL_MASKINGS)}")
    if label_masking == "upstream" and template.sep_style not in _UPSTREAM_STYLES:
        raise ValueError(f"--label_masking upstream: not available for templates of style {template.sep_style.name}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__}: labels by spans need a fast tokenizer (one with character offsets)"
        )


def normalize_image_tokens(
    turns: list[Turn], template: Conversation, label_masking: LabelMasking, mm_use_im_start_end: bool = False
) -> list[Turn]:
    """The turns with their `<image>` where and how the template wants them.

    `assistant` leaves any number of images at any place. `upstream` does as LLaVA-NeXT: the only image of a turn moves
    to its front, on a line of its own. Both give `mmtag` templates their tags, and `mm_use_im_start_end` its tokens.
    """
    image = DEFAULT_IMAGE_TOKEN
    if mm_use_im_start_end and template.sep_style is not SeparatorStyle.PLAIN:
        image = DEFAULT_IM_START_TOKEN + image + DEFAULT_IM_END_TOKEN
    if "mmtag" in template.version:
        image = f"<Image>{image}</Image>"
    if label_masking == "upstream":
        turns = [(speaker, _image_first(text)) for speaker, text in turns]
    return [(speaker, text.replace(DEFAULT_IMAGE_TOKEN, image)) for speaker, text in turns]


def _image_first(text: str) -> str:
    text = text.replace("QA_GT_caption_based_noisy", "")  # a tag of LLaVA-NeXT's data that it takes out of the text
    if text.count(DEFAULT_IMAGE_TOKEN) != 1 or text.startswith(DEFAULT_IMAGE_TOKEN):
        return text
    rest = text.replace(DEFAULT_IMAGE_TOKEN, "").strip()
    return f"{DEFAULT_IMAGE_TOKEN}\n{rest}".strip()


def _drop_leading_answer(turns: list[Turn], template: Conversation, has_image: bool) -> list[Turn]:
    if turns[0][0] != "gpt" or template.sep_style is SeparatorStyle.PLAIN or len(turns) == 1:
        return turns
    if has_image and DEFAULT_IMAGE_TOKEN in turns[0][1]:
        raise ValueError("label_masking upstream drops a leading 'gpt' turn, but this one holds an image")
    return turns[1:]


# --- text -------------------------------------------------------------------------------------------------------------


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
    if upstream and template.sep_style in _ROLE_TAGGED:
        kinds = ("header", "body", "end", "tail")
    return lambda part: part.speaker == "assistant" and part.kind in kinds


# --- tokens -----------------------------------------------------------------------------------------------------------


def _tokenize(parts: list[Part], is_target: Callable[[Part], bool], tokenizer: Any, has_image: bool) -> _Tokens:
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


def _tokenize_chunk(chunk: str, marks: np.ndarray, tokenizer: Any, origin: int) -> _Tokens:
    ids, offsets = encode_chunk(chunk, tokenizer)
    starts, ends = offsets.T
    borders = np.flatnonzero(marks[1:] & ~marks[:-1]) + 1
    across = borders.searchsorted(starts, "right") < borders.searchsorted(ends, "left")
    if across.any():
        # A token lies across the border, as where "\n" ends a header and begins an answer. Generation starts at the
        # border, so the tokens have to end there as well.
        border = int(borders[borders.searchsorted(starts[across.argmax()], "right")])
        head = _tokenize_chunk(chunk[:border], marks[:border], tokenizer, origin)
        tail = _tokenize_chunk(chunk[border:], marks[border:], tokenizer, origin + border)
        return _joined([head, tail])
    # An empty span is the space that SentencePiece puts before a text: it belongs to the character that follows.
    ends = np.minimum(np.maximum(ends, starts + 1), len(marks))
    marked_before = np.concatenate(([0], marks.cumsum()))
    return _Tokens(np.array(ids, np.int64), origin + starts, marked_before[ends] > marked_before[starts])


# --- upstream's labels ------------------------------------------------------------------------------------------------


def _upstream_targets(tokens: _Tokens, parts: list[Part], template: Conversation, tokenizer: Any) -> np.ndarray:
    if template.sep_style in _ROLE_TAGGED:
        return tokens.marked | np.isin(tokens.ids, _always_learnt(template, tokenizer))
    if template.sep_style in (SeparatorStyle.TWO, SeparatorStyle.LLAMA_2) and _is_ignored(
        tokens, parts, template, tokenizer
    ):
        return np.zeros_like(tokens.marked)
    return tokens.marked


def _always_learnt(template: Conversation, tokenizer: Any) -> list[int]:
    """The ids that LLaVA-NeXT makes targets in every turn, the user's too."""
    if template.sep_style in _CHATML:
        newline = 198  # by its id in the Qwen vocabularies, whatever it is in others
        return [newline, *tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])]
    markers = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return tokenizer.convert_tokens_to_ids(markers)


def _is_ignored(tokens: _Tokens, parts: list[Part], template: Conversation, tokenizer: Any) -> bool:
    """Whether LLaVA loses the whole sample ("tokenization mismatch").

    It finds rounds and answers again by splitting the text at its separators, adds up their lengths, and drops the
    sample if the sum differs from the length, unless the sum reaches the maximum length.
    """
    text = "".join(part.text for part in parts)
    answer_mark = "[/INST] " if template.sep_style is SeparatorStyle.LLAMA_2 else f"{template.sep}{template.roles[1]}: "
    rounds = text.split(template.sep2)
    begins = accumulate((len(piece) + len(template.sep2) for piece in rounds), initial=0)
    broken = next((begin for begin, piece in zip(begins, rounds, strict=False) if piece.count(answer_mark) != 1), None)
    counted = len(tokens.ids)
    if broken is not None and broken < len(text):
        counted = int((tokens.starts < broken).sum())
    elif (
        tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokens.ids
    ):  # <unk> is LLaVA's padding, which the length leaves out
        return False
    return counted < tokenizer.model_max_length
