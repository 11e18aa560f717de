"""Prompt templates as pure strings: how system prompt, turns and end tokens are written for each language model family.

One function, `Conversation.parts`, writes a conversation as a list of labelled pieces. `get_prompt` joins them for
inference, and `llava.data.preprocess` reads the labels from the same pieces: training and inference cannot diverge.
"""

import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple


class SeparatorStyle(Enum):
    """How a template marks turns."""

    SINGLE = auto()
    TWO = auto()
    MPT = auto()
    PLAIN = auto()
    CHATML = auto()
    LLAMA_2 = auto()
    LLAMA_3 = auto()
    QWEN = auto()
    GEMMA = auto()
    QWEN_3 = auto()


class Part(NamedTuple):
    """One piece of a written conversation.

    `speaker` is "system", "user" or "assistant". `kind` is "header" (the speaker), "body" (the text, with the space
    that the model has to generate before it), "end" (which closes the turn) or "tail" (what follows the end).
    """

    text: str
    speaker: str
    kind: str


PART_KINDS = ("header", "body", "end", "tail")


class Frame(NamedTuple):
    """The strings around one turn's text: `header gap text end tail`."""

    header: str
    gap: str
    end: str
    tail: str = ""


_SKIPS_EMPTY = (SeparatorStyle.LLAMA_2, SeparatorStyle.LLAMA_3)
"""Styles that write nothing for an empty turn between others; the rest write its header."""


@dataclass
class Conversation:
    """A template and the messages so far.

    `messages` is a mutable list of `[role, text]`. A text of None (or "") is a turn that is still to be
    generated; only its header is written. `stop_str` and `stop_token_ids` are hints for generation.
    """

    system: str
    roles: tuple[str, str]
    sep_style: SeparatorStyle
    sep: str
    sep2: str | None = None
    version: str = "Unknown"
    messages: list[list[Any]] = field(default_factory=list)
    offset: int = 0
    stop_str: str | list[str] | None = None
    stop_token_ids: list[int] | None = None

    def append_message(self, role: str, message: Any) -> None:
        """Add one turn; `message` None opens the turn that is to be generated."""
        self.messages.append([role, message])

    def copy(self) -> "Conversation":
        """A conversation whose messages can be changed without touching this one."""
        return copy.deepcopy(self)

    def get_prompt(self) -> str:
        """The conversation as one string; it ends with an open header if the last message is None."""
        return "".join(part.text for part in self.parts())

    def with_system(self, text: str) -> "Conversation":
        """A copy with `text` as its system prompt; ValueError where the template has no place for one."""
        if self.sep_style in (SeparatorStyle.PLAIN, SeparatorStyle.GEMMA):
            raise ValueError(f"a template of style {self.sep_style.name} has no place for a system turn")
        other = self.copy()
        if self.sep_style in (SeparatorStyle.MPT, SeparatorStyle.CHATML, SeparatorStyle.QWEN):
            text = self.system[: self.system.find("\n") + 1] + text
        elif self.sep_style is SeparatorStyle.QWEN_3 and text:
            text = _IM_SYSTEM + text
        other.system = text
        return other

    def parts(self, keep_empty: bool = False) -> list[Part]:
        """The conversation as labelled pieces whose texts, joined, are the prompt.

        Args:
            keep_empty: write "" as a complete turn without words; otherwise "" is an open turn like None, as in LLaVA.
        """
        parts = [Part(self._preamble(), "system", "header")]
        speakers = [self._speaker(index, role) for index, (role, _) in enumerate(self.messages)]
        for index, (role, text) in enumerate(self.messages):
            speaker, last = speakers[index], index == len(self.messages) - 1
            frame = self._frame(role, speaker, first=speaker not in speakers[:index], last=last)
            if text or (keep_empty and text is not None):
                text = text.strip() if self.sep_style is SeparatorStyle.LLAMA_3 else text
                pieces = (frame.header, frame.gap + text, frame.end, frame.tail)
                parts += [Part(piece, speaker, kind) for piece, kind in zip(pieces, PART_KINDS, strict=True)]
            elif self.sep_style not in _SKIPS_EMPTY or last:
                parts.append(Part(frame.header, speaker, "header"))
        return [part for part in parts if part.text]

    def _speaker(self, index: int, role: str) -> str:
        is_assistant = role == self.roles[1] if self.roles[0] != self.roles[1] else index % 2 == 1
        return "assistant" if is_assistant else "user"

    def _preamble(self) -> str:
        style = self.sep_style
        if style is SeparatorStyle.LLAMA_3:
            header = self._frame("system", "system", first=True, last=False).header
            return "<|begin_of_text|>" + header + self.system + self.sep
        if style in (SeparatorStyle.CHATML, SeparatorStyle.QWEN, SeparatorStyle.QWEN_3):
            return self.system + self.sep + "\n" if self.system else ""
        if style in (SeparatorStyle.SINGLE, SeparatorStyle.TWO, SeparatorStyle.MPT):
            return self.system + self.sep
        return self.system if style is SeparatorStyle.PLAIN else ""

    def _frame(self, role: str, speaker: str, first: bool, last: bool) -> Frame:
        match self.sep_style:
            case SeparatorStyle.SINGLE:
                return Frame(role + ":", " ", self.sep)
            case SeparatorStyle.TWO:
                return Frame(role + ":", " ", self._answer_end() if speaker == "assistant" else self.sep)
            case SeparatorStyle.MPT:
                return Frame(role, "", self.sep)
            case SeparatorStyle.CHATML | SeparatorStyle.QWEN:
                return Frame(role + "\n", "", self.sep, "\n")
            case SeparatorStyle.GEMMA:
                return Frame(role, "", self.sep.rstrip("\n"), "\n")
            case SeparatorStyle.LLAMA_3:
                return Frame(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "", self.sep)
            case SeparatorStyle.LLAMA_2:
                return self._llama_2_frame(speaker, first)
            case SeparatorStyle.QWEN_3:
                thought = _NO_THOUGHT if last and speaker == "assistant" else ""
                return Frame(role + "\n" + thought, "", self.sep, "\n")
            case _:
                return Frame("", "", self.sep)

    def _answer_end(self) -> str:
        if self.sep2 is None:
            raise ValueError(f"a template of style {self.sep_style.name} needs sep2, what ends an answer; found None")
        return self.sep2

    def _llama_2_frame(self, speaker: str, first: bool) -> Frame:
        if speaker == "assistant":
            return Frame("", " ", " " + self._answer_end())
        if not first:
            return Frame(self.sep + "[INST] ", "", " [/INST]")
        system = f"<<SYS>>\n{self.system}\n<</SYS>>\n\n" if self.system else ""
        return Frame("[INST] " + system, "", " [/INST]")


_IM_SYSTEM = "<|im_start|>system\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
"""Before the answer that Qwen3 gives without thinking; its chat template removes it from earlier answers."""
_POLITE = "The assistant gives helpful, detailed, and polite answers to the {}'s questions."
_VICUNA_USER = "A chat between a curious user and an artificial intelligence assistant. " + _POLITE.format("user")
_VICUNA_HUMAN = "A chat between a curious human and an artificial intelligence assistant. " + _POLITE.format("human")
_SEES_IMAGES = (
    "You are able to understand the visual content that the user provides, and assist the user with a variety of tasks "
    "using natural language."
)
_LANGUAGE_AND_VISION = "You are a helpful language and vision assistant. " + _SEES_IMAGES
_IMAGE_FORMAT = "The visual content will be provided with the following format: <Image>visual content</Image>."
_TAGGED_CHAT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant is able to understand the "
    "visual content that the user provides, and assist the user with a variety of tasks using natural language."
    + _IMAGE_FORMAT
)
_ANSWER_ABOUT_IMAGES = "Answer the questions about the visual content that the user provides."
_LLAMA_2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe.  "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information."
)
_MPT_SYSTEM = (
    "A conversation between a user and an LLM-based AI assistant. The assistant gives helpful and honest answers."
)
_ORCA_SYSTEM = (
    "You are MistralOrca, a large language model trained by Alignment Lab AI. Write out your reasoning step-by-step to "
    "be sure you get the right answers!"
)
_QWEN_SYSTEM = "You are a helpful assistant."
_QWEN_2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _plain() -> Conversation:
    return Conversation("", ("", ""), SeparatorStyle.PLAIN, "\n")


def _v0(system: str, version: str = "Unknown") -> Conversation:
    return Conversation(system, ("Human", "Assistant"), SeparatorStyle.SINGLE, "###", version=version)


def _v1(system: str, version: str = "v1") -> Conversation:
    return Conversation(system, ("USER", "ASSISTANT"), SeparatorStyle.TWO, " ", "</s>", version)


def _llama_2(system: str, version: str = "llama_v2", sep: str = "<s>") -> Conversation:
    return Conversation(system, ("USER", "ASSISTANT"), SeparatorStyle.LLAMA_2, sep, "</s>", version)


def _llama_3(system: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(
        system, roles, SeparatorStyle.LLAMA_3, "<|eot_id|>", version="llama_v3", stop_token_ids=[128009]
    )


def _mpt(system: str) -> Conversation:
    roles = ("<|im_start|>user\n", "<|im_start|>assistant\n")
    return Conversation(_IM_SYSTEM + system, roles, SeparatorStyle.MPT, "<|im_end|>", version="mpt")


def _zephyr() -> Conversation:
    system, roles = "<|system|>\nYou are a helpful AI assistant.", ("<|user|>\n", "<|assistant|>\n")
    return Conversation(system, roles, SeparatorStyle.MPT, "</s>", version="mpt")


def _chatml(system: str, version: str) -> Conversation:
    roles = ("<|im_start|>user", "<|im_start|>assistant")
    return Conversation(_IM_SYSTEM + system, roles, SeparatorStyle.CHATML, "<|im_end|>", version=version)


def _qwen_3() -> Conversation:
    roles = ("<|im_start|>user", "<|im_start|>assistant")
    return Conversation("", roles, SeparatorStyle.QWEN_3, "<|im_end|>", version="qwen_3")


def _gemma() -> Conversation:
    roles = ("<start_of_turn>user\n", "<start_of_turn>model\n")
    return Conversation("", roles, SeparatorStyle.GEMMA, "<end_of_turn>\n", version="gemma")


conv_templates: dict[str, Conversation] = {
    "plain": _plain(),
    "v0_plain": _plain(),
    "v1": _v1(_VICUNA_USER),
    "vicuna_v1": _v1(_VICUNA_USER),
    "llava_v0": _v0(_VICUNA_HUMAN),
    "v0_mmtag": _v0(_TAGGED_CHAT, "v0_mmtag"),
    "llava_v0_mmtag": _v0(_TAGGED_CHAT, "v0_mmtag"),
    "llava_v1": _v1(_VICUNA_HUMAN),
    "v1_mmtag": _v1(_TAGGED_CHAT, "v1_mmtag"),
    "llava_v1_mmtag": _v1(_TAGGED_CHAT, "v1_mmtag"),
    "llama_2": _llama_2(_LLAMA_2_SYSTEM),
    "llava_llama_2": _llama_2(_LANGUAGE_AND_VISION),
    "llava_llama_2_simple": _llama_2(_ANSWER_ABOUT_IMAGES),
    "llava_llama_2_mmtag": _llama_2(_ANSWER_ABOUT_IMAGES + _IMAGE_FORMAT, "llama_v2_mmtag"),
    "mistral_instruct": _llama_2("", sep=""),
    "llava_mistral_instruct": _llama_2("", sep=""),
    "llava_llama_3": _llama_3(_LANGUAGE_AND_VISION),
    "mpt": _mpt(_MPT_SYSTEM),
    "chatml_direct": _mpt("Answer the questions."),
    "mistral_direct": _mpt("Answer the questions."),
    "mistral_orca": _mpt(_ORCA_SYSTEM),
    "mistral_zephyr": _zephyr(),
    "qwen_1_5": _chatml(_QWEN_SYSTEM, "qwen"),
    "qwen_2": _chatml(_QWEN_SYSTEM, "qwen"),
    "qwen_2_5": _chatml(_QWEN_2_5_SYSTEM, "qwen"),
    "chatml": _chatml(_SMOLLM2_SYSTEM, "chatml"),
    "gemma_instruct": _gemma(),
    "qwen_3": _qwen_3(),  # what the stock tokenizers' chat template writes
}
"""Templates by their `--version`. Shared by all callers: work on a copy."""

default_conversation = conv_templates["vicuna_v1"]


def answer_end(template: Conversation) -> str:
    """The text that closes an answer."""
    sample = template.copy()
    sample.messages = [[sample.roles[0], "question"], [sample.roles[1], "answer"]]
    ends = [part.text for part in sample.parts() if part.kind == "end"]
    return ends[-1].strip(" ")


def get_template(name: str) -> Conversation:
    """A fresh copy of the template called `name`; ValueError with all names where there is none."""
    if name not in conv_templates:
        raise ValueError(
            f"--version {name!r}: no such conversation template; choose one of {', '.join(conv_templates)}"
        )
    return conv_templates[name].copy()
