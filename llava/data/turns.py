"""Who speaks in a conversation, in what order a template takes it, and where its images are; no tokens yet.

Imports no torch, so that the preflight can apply the rules of training in many small processes.
"""

from itertools import pairwise
from typing import Literal

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.conversation import Conversation, SeparatorStyle

LABEL_MASKINGS = ("assistant", "upstream")
LabelMasking = Literal["assistant", "upstream"]
MMTAG = f"<Image>{DEFAULT_IMAGE_TOKEN}</Image>"
"""An image in `mmtag` templates."""
Turn = tuple[str, str]  # speaker ("human", "gpt" or "system") and text

CHATML_STYLES = (SeparatorStyle.CHATML, SeparatorStyle.QWEN)
ROLE_TAGGED = (*CHATML_STYLES, SeparatorStyle.LLAMA_3)
_UPSTREAM_STYLES = (
    SeparatorStyle.PLAIN, SeparatorStyle.TWO, SeparatorStyle.LLAMA_2, SeparatorStyle.MPT, *ROLE_TAGGED
)  # fmt: skip
_SPEAKERS = ("human", "gpt", "system")


def check_label_masking(label_masking: str, template: Conversation) -> None:
    """Raises ValueError where `label_masking` is unknown, or has no labels for `template`."""
    if label_masking not in LABEL_MASKINGS:
        raise ValueError(f"--label_masking {label_masking!r}: expected one of {', '.join(LABEL_MASKINGS)}")
    if label_masking == "upstream" and template.sep_style not in _UPSTREAM_STYLES:
        style = f"not available for templates of style {template.sep_style.name}"
        raise ValueError(f"--label_masking upstream: {style}; pass --label_masking assistant")


def parse_turns(conversations: object) -> list[Turn]:
    """The turns as (speaker, text).

    Raises:
        ValueError: not a list of `{"from", "value"}` with known speakers, empty, or a system turn after the first.
    """
    if not isinstance(conversations, list) or not conversations:
        raise ValueError(f"'conversations': expected a non-empty list of turns, found {conversations!r:.80}")
    for index, turn in enumerate(conversations):
        if not isinstance(turn, dict) or turn.get("from") not in _SPEAKERS or not isinstance(turn.get("value"), str):
            expected = f"'from' one of {', '.join(_SPEAKERS)} and a string under 'value'"
            raise ValueError(f"turn {index}: expected {expected}, found {turn!r:.80}")
        if turn["from"] == "system" and index > 0:
            raise ValueError(f"turn {index}: a system turn must be the first")
    return [(turn["from"], turn["value"]) for turn in conversations]


def training_turns(
    conversations: object, template: Conversation, label_masking: LabelMasking, has_image: bool
) -> list[Turn]:
    """The turns that are written and learnt; `upstream` drops an answer before the first question, as LLaVA does.

    Raises:
        ValueError: the conversation is malformed, the template cannot express it, or there is nothing to learn.
    """
    turns = parse_turns(conversations)
    upstream = label_masking == "upstream"
    if upstream:
        turns = _drop_leading_answer(turns, template, has_image)
    check_order(turns, template)
    if not upstream and not any(speaker == "gpt" for speaker, _ in turns):
        raise ValueError("expected at least one 'gpt' turn, found none: there is nothing to learn")
    if upstream and template.sep_style is SeparatorStyle.LLAMA_2 and not any(text for _, text in turns):
        raise ValueError("template llama_2: every turn is empty, and upstream writes none of them")
    return turns


def check_order(turns: list[Turn], template: Conversation, complete: bool = True) -> None:
    """Raises ValueError where `template` cannot write the speakers in this order; `complete` expects a last answer."""
    style, speakers = template.sep_style, [speaker for speaker, _ in turns]
    if style is SeparatorStyle.PLAIN:
        expected = ["human", "gpt"] if complete else ["human"]
        if speakers != expected:
            raise ValueError(f"template plain: expected the turns {expected}, found {speakers}")
        if DEFAULT_IMAGE_TOKEN not in turns[0][1]:
            raise ValueError(f"the plain template needs an image: found no {DEFAULT_IMAGE_TOKEN} in the human's turn")
        return
    if "system" in speakers:
        template.with_system("")  # raises where it has no place for one
    spoken = [speaker for speaker in speakers if speaker != "system"]
    if not spoken:
        raise ValueError("expected a human or gpt turn after the system turn, found none")
    if style is SeparatorStyle.LLAMA_2 and spoken[0] != "human":
        raise ValueError("template llama_2: expected the human to speak first, found 'gpt'")
    twice = next((speaker for speaker, following in pairwise(spoken) if speaker == following), None)
    if twice and style not in (*ROLE_TAGGED, SeparatorStyle.GEMMA):
        expected = f"templates of style {style.name} need human and gpt to take turns"
        raise ValueError(f"two {twice!r} turns in a row: {expected}")


def _drop_leading_answer(turns: list[Turn], template: Conversation, has_image: bool) -> list[Turn]:
    if turns[0][0] != "gpt" or template.sep_style is SeparatorStyle.PLAIN or len(turns) == 1:
        return turns
    if has_image and DEFAULT_IMAGE_TOKEN in turns[0][1]:
        raise ValueError("label_masking upstream drops a leading 'gpt' turn, but this one holds an image")
    return turns[1:]


def normalize_image_tokens(turns: list[Turn], template: Conversation, label_masking: LabelMasking) -> list[Turn]:
    """The turns with every `<image>` in the place and form that the template needs.

    `assistant` leaves any number of images in any place. `upstream` follows LLaVA-NeXT: the only image of a turn moves
    to its front, on a separate line. Both add the tags of `mmtag` templates.
    """
    if label_masking == "upstream":
        turns = [(speaker, image_first(text)) for speaker, text in turns]
    if "mmtag" in template.version:
        turns = [(speaker, text.replace(DEFAULT_IMAGE_TOKEN, MMTAG)) for speaker, text in turns]
    return turns


def moves_pictures(config: object) -> bool:
    """Whether training moved a turn's only picture to its front; LLaVA's own checkpoints, which do not say so, did."""
    masking = "assistant" if getattr(config, "mm_conv_version", None) else "upstream"
    return getattr(config, "mm_label_masking", masking) == "upstream"


def image_first(text: str) -> str:
    """A turn's text with its only `<image>` at the front, on a line of its own, where LLaVA trains it."""
    text = text.replace("QA_GT_caption_based_noisy", "")  # a tag in LLaVA-NeXT's data, which its code removes
    if text.count(DEFAULT_IMAGE_TOKEN) != 1 or text.startswith(DEFAULT_IMAGE_TOKEN):
        return text
    rest = text.replace(DEFAULT_IMAGE_TOKEN, "").strip()
    return f"{DEFAULT_IMAGE_TOKEN}\n{rest}".strip()
