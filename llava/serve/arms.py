"""Checkpoints that answer streaming about the same picture, and what each looked at; everything but the page."""

import html
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from llava.analysis.attention import overlaid
from llava.analysis.seen_area import WHOLE, Area
from llava.asking import Assistant, read_picture
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.serve.conversation import AnswerStreamer, with_question
from llava.serve.look import Look, look_of, probe_of
from llava.serve.uploads import uploaded_file
from llava.utils.pixels import to_rgb
from llava.utils.presentation import TEXT_COLOUR, VISUAL_COLOUR

LONGEST_QUESTION = 10_000  # characters; more than any context holds would only keep the tokenizer busy
SMALL, LARGE = 384, 768  # limits of a heatmap's longer side in pixels; between them it has the picture's size
LEAST_NORM, MOST_NORM = 0.1, 10_000.0  # bounds of the bars' logarithmic scale


class Arm:
    """A checkpoint on the page."""

    def __init__(self, name: str, assistant: Assistant):
        self.name, self.assistant, self.probe = name, assistant, probe_of(assistant)


@dataclass(frozen=True)
class Talk:
    """One arm's conversation about a picture, and what is shown of it.

    Attributes:
        turns: LLaVA's.
        heatmap, norms: of the last answer; a picture, and HTML.
        before: the conversation without the last question, until all arms have answered it.
    """

    turns: list[dict[str, str]] = field(default_factory=list)
    heatmap: Image.Image | None = None
    norms: str = ""
    before: "Talk | None" = None

    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages, without the placeholder."""
        texts = [(turn["from"], turn["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()) for turn in self.turns]
        roles = {"human": "user", "gpt": "assistant"}
        return [{"role": roles[speaker], "content": text or "(no words)"} for speaker, text in texts]


def checked_question(question: str | None) -> str:
    """What was typed.

    Raises:
        ValueError: it is empty, too long, or has a placeholder in it.
    """
    question = (question or "").strip()
    if not question:
        raise ValueError("Please type a question.")
    if len(question) > LONGEST_QUESTION:
        raise ValueError(f"The question has {len(question):,} characters; the limit is {LONGEST_QUESTION:,}.")
    if DEFAULT_IMAGE_TOKEN in question:
        raise ValueError(f"The picture is already in the conversation; please ask without {DEFAULT_IMAGE_TOKEN}.")
    return question


def checked_picture(path: str | None, folder: str | Path, most_bytes: int) -> Image.Image:
    """The picture of a file uploaded to `folder`, in RGB, checked as those of training are; of animated ones the first
    frame.

    Raises:
        ValueError: there is no such file, or it is too large or not a picture; the message names no folder.
    """
    if not path:
        raise ValueError("Please choose a picture first.")
    file = uploaded_file(path, folder)
    if file.stat().st_size > most_bytes:
        raise ValueError(f"{file.name} has {file.stat().st_size:,} bytes; the limit is {most_bytes:,}.")
    try:
        return to_rgb(read_picture(file, file.name))
    except ValueError as error:
        raise ValueError(f"{str(error).replace(f'{file.parent}/', '')}.") from error


def ask_all(
    arms: Sequence[Arm], talks: Sequence[Talk], picture: Image.Image, question: str, **options: Any
) -> Iterator[list[Talk]]:
    """Yields all arms' conversations at each change; the arms answer one after the other.

    Only the last step has them without `before`: the arms never remember different questions.

    Args:
        talks: the conversations so far, which the first question starts.
        options: of `generate`.

    Raises:
        ValueError: see `Assistant.answer`.
    """
    talks = [Talk(with_question(talk.turns, question), before=talk) for talk in without_open_question(talks)]
    yield list(talks)
    for number, arm in enumerate(arms):
        asked = talks[number].turns
        for text in growing_answer(arm.assistant, asked, picture, **options):
            talks[number] = replace(talks[number], turns=[*asked, {"from": "gpt", "value": text + " ..."}])
            yield list(talks)
        talks[number] = replace(talks[number], turns=[*asked, {"from": "gpt", "value": text}])
        yield list(talks)
        look = look_of(arm.assistant, arm.probe, asked, picture, text)
        seen = arm.assistant.upright(picture)
        heatmap = None if look.heatmap is None else shown_heatmap(seen, look.heatmap, look.area)
        talks[number] = replace(talks[number], heatmap=heatmap, norms=measured(look))
        yield list(talks)
    yield [replace(talk, before=None) for talk in talks]


def without_open_question(talks: Sequence[Talk]) -> list[Talk]:
    """The conversations without a question that not all arms have answered."""
    return [talk.before or talk for talk in talks]


class Stopped(Exception):
    """The answer is no longer wanted."""


class _Streamer(AnswerStreamer):
    # Hands the answer so far to another thread, and ends the generation when that one is gone.
    def __init__(self, assistant: Assistant):
        super().__init__(assistant)
        self.pieces: queue.Queue[str | None] = queue.Queue()
        self.stopped = threading.Event()

    def put(self, value: torch.Tensor) -> None:
        if self.stopped.is_set():
            raise Stopped
        super().put(value)

    def show(self, text: str, is_last: bool) -> None:
        self.pieces.put(self.shown)


def growing_answer(
    assistant: Assistant, turns: list[dict[str, str]], picture: Image.Image, **options: Any
) -> Iterator[str]:
    """Yields the answer so far each time it has grown, and finally all of it; closing the iterator ends the generation.

    Raises:
        ValueError: see `Assistant.answer`.
    """
    streamer = _Streamer(assistant)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(assistant.answer, [turns], [picture], streamer=streamer, **options)
        answer.add_done_callback(lambda _: streamer.pieces.put(None))
        try:
            while (text := streamer.pieces.get()) is not None:
                yield text
        finally:
            streamer.stopped.set()
        yield answer.result()[0]


def shown_heatmap(picture: Image.Image, heatmap: np.ndarray, area: Area = WHOLE) -> Image.Image:
    """A heatmap [rows, columns] over its area of the picture, as large as a page shows it; bright is much attention."""
    side = max(picture.size)
    factor = min(max(side, SMALL), LARGE) / side
    size = [max(1, round(length * factor)) for length in picture.size]
    return overlaid(picture.resize(size), heatmap, heatmap.max(), area)


def measured(look: Look) -> str:
    """What is below a heatmap, in HTML: the scale of its colours, and the norms."""
    return ("" if look.heatmap is None else colour_scale(look.heatmap.max())) + norm_bars(look)


def colour_scale(most: float) -> str:
    """The heatmap's colours, over grey, from 0 to the share of the attention that has the brightest colour, in HTML."""
    steps = 9
    drawn = overlaid(Image.new("L", (steps, 1), 128), np.linspace(0, 1, steps)[None], 1)
    colours = ", ".join(f"rgb{drawn.getpixel((at, 0))}" for at in range(steps))
    return (
        f'<div class="scale"><span>0</span><div style="background:linear-gradient(90deg, {colours})"></div>'
        f"<b>{most:.1%}</b></div><p><small>Each place's share of the attention to the picture.</small></p>"
    )


def norm_bars(look: Look) -> str:
    """The two norms as bars on one logarithmic scale, in HTML, with a sentence that says their ratio."""
    rows = [("visual tokens", look.visual_norm, VISUAL_COLOUR), ("text tokens", look.text_norm, TEXT_COLOUR)]
    bars = "".join(
        f'<div class="norm"><span>{what}</span><div class="track"><div style="width:{bar_width(norm):.1f}%;'
        f'background:{colour}"></div></div><b>{norm:.3g}</b></div>'
        for what, norm, colour in rows
    )
    ratio = look.visual_norm / look.text_norm if look.text_norm else math.nan
    sentence = f"Visual tokens enter the language model with {ratio:.3g} times the norm of text tokens."
    note = "Median L2 norms, bars on a logarithmic scale."
    note += f" No heatmap: {look.no_map}." if look.no_map else ""
    return f'<div class="norms">{bars}<p>{html.escape(sentence)} <small>{html.escape(note)}</small></p></div>'


def bar_width(norm: float) -> float:
    """Length of the bar in percent of the scale from `LEAST_NORM` to `MOST_NORM`; norms outside it get 0 or 100."""
    if not math.isfinite(norm) or norm <= LEAST_NORM:
        return 0.0
    return min(100.0, 100 * math.log(norm / LEAST_NORM) / math.log(MOST_NORM / LEAST_NORM))
