"""The conversation of `python -m llava.serve.cli`: questions, commands, streamed answers."""

import argparse
import sys

from PIL import Image
from transformers import TextStreamer

from llava.asking import Assistant, chosen_assistant, is_captioner, load_picture
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.model.decoding import sampling_options, unused

COMMANDS = "/image PATH another picture, /reset clear the conversation, /quit end, /help this line"


def run(args: argparse.Namespace) -> None:
    """Loads picture and checkpoint, then chats."""
    picture = load_picture(args.image_file)
    chat(load_chat_assistant(args), picture, args)


def load_chat_assistant(args: argparse.Namespace) -> Assistant:
    """The checkpoint that the flags choose.

    Raises:
        ValueError: it has no vision tower, or a template without turns.
    """
    assistant = chosen_assistant(args)
    if assistant.image_processor is None:
        raise ValueError(f"--model-path {args.model_path} has no vision tower: it cannot see pictures")
    if is_captioner(assistant.template):
        raise ValueError(
            f"--model-path {args.model_path} has the template 'plain' (stage 1), which has no turns: get its caption "
            "with python -m llava.eval.run_llava, or name another template by --conv-mode"
        )
    if note := unused(assistant.name, assistant.model.file_decoding):
        say(note)
    return assistant


def chat(assistant: Assistant, picture: Image.Image, args: argparse.Namespace) -> None:
    """Runs the chat until the input ends; errors are printed, and the chat continues."""
    say(f"{COMMANDS}; Ctrl-C stops an answer")
    turns: list[dict[str, str]] = []
    while question := read_question():
        command, _, argument = question.partition(" ")
        if command == "/quit":
            break
        if command == "/image":
            new = open_picture(argument.strip())
            picture, turns = (picture, turns) if new is None else (new, [])
        elif command == "/reset":
            turns = []
            say("conversation reset, same picture")
        elif command.startswith("/"):
            say(COMMANDS if command == "/help" else f"error: no command {command}; {COMMANDS}")
        else:
            turns = answer(assistant, picture, turns, question, args)
    print("exit...")


def say(text: str) -> None:
    """Prints a message on stderr."""
    print(text, file=sys.stderr, flush=True)


def open_picture(path: str) -> Image.Image | None:
    """The picture that `/image` names; None, and a line that says why, if it cannot be opened."""
    try:
        picture = load_picture(path)
    except ValueError as error:
        say(f"error: /image {str(error).removeprefix('--image-file ')}; the picture is unchanged")
        return None
    say(f"{path}: {picture.width} x {picture.height} pixels; conversation reset")
    return picture


def answer(
    assistant: Assistant, picture: Image.Image, turns: list[dict[str, str]], question: str, args: argparse.Namespace
) -> list[dict[str, str]]:
    """Prints the answer; returns the turns with question and answer, or unchanged if no answer could be given."""
    asked = with_question(turns, question)
    streamer = AnswerStreamer(assistant)
    try:
        assistant.prompt_ids(asked, [picture])
    except ValueError as error:
        say(f"error: {error} (/reset)")
        return turns
    print("ASSISTANT: ", end="", flush=True)
    try:
        (text,) = assistant.answer(
            [asked],
            [picture],
            max_new_tokens=args.max_new_tokens,
            streamer=streamer,
            **sampling_options(args.temperature),
        )
    except KeyboardInterrupt:
        print(flush=True)
        text = streamer.shown.strip()
        say("answer stopped" if text else "no answer; question dropped")
        if not text:
            return turns
    if args.debug:
        print({"prompt": assistant.prompt_text(asked), "outputs": text})
    return [*asked, {"from": "gpt", "value": text}]


def with_question(turns: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    """The turns with one more question; the first question comes with the picture."""
    return [*turns, {"from": "human", "value": question if turns else f"{DEFAULT_IMAGE_TOKEN}\n{question}"}]


def read_question() -> str:
    """The user's next line, without `<image>`; empty at the end of the input.

    Ctrl-C says how to quit; a second one right after it quits.
    """
    interrupted = False
    while True:
        try:
            question = input("USER: ").strip()
        except EOFError:
            return ""
        except KeyboardInterrupt:
            print(flush=True)
            if interrupted:
                return ""
            interrupted = True
            say("Ctrl-C again or /quit ends the chat")
            continue
        if DEFAULT_IMAGE_TOKEN not in question:
            return question
        print(f"The picture is already in the conversation; please ask without {DEFAULT_IMAGE_TOKEN}.")


class AnswerStreamer(TextStreamer):
    """Prints an answer as it grows, without the text that closes it."""

    def __init__(self, assistant: Assistant):
        super().__init__(assistant.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.end_of_answer = assistant.end
        self.shown = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        # Text arrives up to its last space, and no template's end has a space inside: it never arrives in two pieces.
        text = text.split(self.end_of_answer)[0]
        self.shown += text
        self.show(text, stream_end)

    def show(self, text: str, is_last: bool) -> None:
        """Called with each piece of the answer."""
        super().on_finalized_text(text, is_last)
