"""Conversations about a picture: what the terminal and the page share, and the chat of `python -m llava.serve.cli`."""

import argparse
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from PIL import Image
from transformers import TextIteratorStreamer

from llava.asking import Assistant, chosen_assistant, is_captioner, load_picture
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.model.decoding import sampling_options, unused

Turns = list[dict[str, str]]  # LLaVA's; the first one has the picture's placeholder
COMMANDS = "/image PATH another picture, /reset clear the conversation, /quit end, /help this line"


def load_chat_assistant(args: argparse.Namespace, path: str) -> Assistant:
    """The checkpoint at `path` with the other flags; prints what of its generation_config.json is not used.

    Raises:
        ValueError: its template has no turns.
    """
    assistant = chosen_assistant(argparse.Namespace(**vars(args) | {"model_path": path}))
    if is_captioner(assistant.template):
        raise ValueError(
            f"--model-path {path} has the template 'plain' (stage 1), which has no turns: get its caption "
            "with python -m llava.eval.run_llava, or name another template by --conv-mode"
        )
    if note := unused(path, assistant.model.file_decoding):
        say(note)
    return assistant


def say(text: str) -> None:
    """Prints a message on stderr."""
    print(text, file=sys.stderr, flush=True)


def with_question(turns: Turns, question: str | None) -> Turns:
    """The turns with one more question; the first question comes with the picture.

    Raises:
        ValueError: the question is empty, or has a placeholder in it.
    """
    question = (question or "").strip()
    if not question:
        raise ValueError("Please type a question.")
    if DEFAULT_IMAGE_TOKEN in question:
        raise ValueError(f"The picture is already in the conversation; please ask without {DEFAULT_IMAGE_TOKEN}.")
    return [*turns, {"from": "human", "value": question if turns else f"{DEFAULT_IMAGE_TOKEN}\n{question}"}]


def growing_answer(
    assistant: Assistant, turns: Turns, picture: Image.Image, stop: threading.Event, args: argparse.Namespace
) -> Iterator[str]:
    """Yields the answer so far each time it has grown, and finally all of it.

    Args:
        stop: ends the generation at its next token; closing the iterator sets it.

    Raises:
        ValueError: see `Assistant.answer`.
    """
    text, options = "", sampling_options(args.temperature) | {"max_new_tokens": args.max_new_tokens}
    streamer = TextIteratorStreamer(assistant.tokenizer, skip_prompt=True, skip_special_tokens=True)
    options |= {"streamer": streamer, "stopping_criteria": [lambda *_, **__: stop.is_set()]}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(assistant.answer, [turns], [picture], **options)
        answer.add_done_callback(lambda _: streamer.end())  # `generate` does not, where it fails
        try:
            for piece in filter(None, streamer):
                text += piece
                yield text.split(assistant.end)[0].lstrip()
        except BaseException:  # closed, or Ctrl-C
            stop.set()
            raise
        yield answer.result()[0]


def chat(args: argparse.Namespace) -> None:
    """Loads picture and checkpoint, and chats until the input ends; errors are printed, and the chat continues."""
    picture, turns = load_picture(args.image_file), []
    assistant = load_chat_assistant(args, args.model_path)
    say(f"{COMMANDS}; Ctrl-C stops an answer")
    while (line := typed()) not in ("", "/quit"):
        try:
            if line.startswith("/image "):
                picture, turns = load_picture(line.removeprefix("/image ").strip(), "/image"), []
            elif line == "/reset":
                turns = []
            elif line.startswith("/"):
                say(COMMANDS)
            else:
                turns = answered(assistant, picture, with_question(turns, line), args)
        except ValueError as error:
            say(f"error: {error}")
    print("exit...")


def typed() -> str:
    """The user's next line; empty at the end of the input, and on Ctrl-C."""
    try:
        return input("USER: ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def answered(assistant: Assistant, picture: Image.Image, turns: Turns, args: argparse.Namespace) -> Turns:
    """Prints the answer; returns the turns with it, or without the question where Ctrl-C came before the answer.

    Raises:
        ValueError: the conversation is too long.
    """
    assistant.prompt_ids(turns, [picture])  # raises before anything is printed
    text = ""
    print("ASSISTANT: ", end="", flush=True)
    try:
        for longer in growing_answer(assistant, turns, picture, threading.Event(), args):
            print(longer[len(text) :], end="", flush=True)
            text = longer
    except KeyboardInterrupt:
        say("answer stopped" if text else "no answer; question dropped")
    print(flush=True)
    if args.debug:
        print({"prompt": assistant.prompt_text(turns), "outputs": text.strip()})
    return [*turns, {"from": "gpt", "value": text.strip()}] if text else turns[:-1]
