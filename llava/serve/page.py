"""The page of `llava.serve.web`: one or two checkpoints answer about the same picture, side by side."""

import argparse
import html
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image, ImageOps

from llava.asking import Assistant, read_picture
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.serve.conversation import Turns, growing_answer, load_chat_assistant, with_question
from llava.serve.look import heat_map, look_of
from llava.utils.commands import REFUSALS
from llava.utils.pixels import to_rgb

HEIGHT = 300  # of a picture, a map or a chat, in pixels
EXAMPLE = "What color is the square?"
REFUSAL = "The picture is not a file that was uploaded to this page, or it is gone; please choose it again."


def serve(args: argparse.Namespace) -> None:
    """Loads the checkpoints and serves the page until Ctrl-C.

    Raises:
        ValueError, OSError, ImportError: refused flags or checkpoints; Gradio is not installed; the port is taken.
    """
    if len(args.model_path) > 2:
        raise ValueError(f"--model-path: expected one or two checkpoints, found {len(args.model_path)}")
    with tempfile.TemporaryDirectory(prefix="llava-web-") as folder:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder}
        try:
            import gradio
        except ImportError as error:
            raise ImportError("the page needs Gradio: pip install 'llava[web]', see docs/chat.md") from error
        refuse_addresses(gradio)
        page = build_page(gradio, [load_chat_assistant(args, path) for path in args.model_path], folder, args)
        theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # no font of the web
        page.launch(server_name=args.host, server_port=args.port, max_file_size="10mb", theme=theme, footer_links=[])


def refuse_addresses(gradio: ModuleType) -> None:
    """Makes Gradio open no address that a request names; by itself it opens public ones."""

    async def refused(hostname: str) -> str:
        raise gradio.Error(f"{hostname}: {REFUSAL}", print_exception=False)

    gradio.processing_utils.sh.async_validate_url = refused  # safehttpx, which looks at a host before it is reached
    gradio.processing_utils.PUBLIC_HOSTNAME_WHITELIST.clear()  # which it would not look at


def uploaded_picture(path: str | None, folder: str | Path) -> Image.Image:
    """The picture of a file uploaded to `folder`, in RGB, checked as those of training are.

    A visitor writes every request's body, so the path may be an address, a device or any file of this machine.

    Raises:
        ValueError: it is not a picture in a regular file below `folder`; the message does not say what else it is.
    """
    if not path:
        raise ValueError("Please choose a picture first.")
    try:
        file = Path(os.path.realpath(path))
        if not (file.is_relative_to(os.path.realpath(folder)) and file.is_file()):
            raise ValueError(path)
    except (OSError, ValueError, TypeError):  # also what no file can be called
        raise ValueError(REFUSAL) from None
    return to_rgb(read_picture(file, file.name))


def messages(turns: Turns) -> list[dict[str, str]]:
    """A conversation as Gradio's messages, without the placeholder."""
    texts = [(turn["from"], turn["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()) for turn in turns]
    return [{"role": "user" if who == "human" else "assistant", "content": text or "..."} for who, text in texts]


def build_page(gradio: ModuleType, arms: list[Assistant], folder: str, args: argparse.Namespace) -> Any:
    """The page as Gradio's blocks, with its events; uploads are in `folder`."""
    ImageOps.expand(Image.new("RGB", (96, 96), "red"), 64, "white").save(example := f"{folder}/square.png")
    empty = (None, [[] for _ in arms])  # the path of the picture, and each arm's conversation about it
    stops = defaultdict(threading.Event)  # of the last question of each visitor's session

    def shown(conversations: list[Turns]) -> dict[Any, Any]:
        return {chat: messages(turns) for chat, turns in zip(chats, conversations, strict=True)}

    def ask(path: Any, question: Any, remembered: Any, request: gradio.Request) -> Iterator[dict[Any, Any]]:
        # All arms remember the same questions: what is said is remembered when all have answered.
        stop = stops[request.session_hash] = threading.Event()
        try:
            image = uploaded_picture(path, folder)
            talks = [with_question(turns, question) for turns in (remembered if remembered[0] == path else empty)[1]]
            yield shown(talks)
            looks = []
            for number, (arm, asked) in enumerate(zip(arms, talks, strict=True)):
                for text in growing_answer(arm, asked, image, stop, args):
                    talks[number] = [*asked, {"from": "gpt", "value": text}]
                    yield {chats[number]: messages(talks[number])}
                if stop.is_set():
                    raise ValueError("The answer was stopped, the question is dropped.")
                looks.append(look_of(arm, asked, image, text))
                if not looks[-1]["map"].size:
                    gradio.Info(html.escape(f"{arm.name}: no heat map, its visual tokens have no known places"))
            most = max([look["map"].max(initial=0) for look in looks])  # one scale for all
            for arm, place, look in zip(arms, heat_maps, looks, strict=True):
                seen = f": up to {look['map'].max():.1%} in one place" if look["map"].size else ""
                yield {place: gradio.Image(heat_map(look, most), label=f"Where {arm.name} looked{seen}")}
            yield {state: (path, talks), question_box: ""}
        except REFUSALS as error:
            gradio.Warning(html.escape(str(error)))
            yield shown(remembered[1])

    def end_answer(request: gradio.Request) -> None:
        stops[request.session_hash].set()

    with gradio.Blocks(title="LLaVA", analytics_enabled=False) as page:
        state = gradio.State(empty)
        with gradio.Row():
            picture = gradio.Image(label="Picture", sources=["upload", "clipboard"], height=HEIGHT)
            picture.preprocess = lambda payload: payload and payload.path  # nothing opens it before `uploaded_picture`
            with gradio.Column():
                question_box = gradio.Textbox(label="Question", max_lines=6, max_length=10_000)
                with gradio.Row():
                    asking, stopping = gradio.Button("Ask", variant="primary"), gradio.Button("Stop")
                    filling = gradio.Button("Example")
        chats, heat_maps = [], []
        with gradio.Row():
            for arm in arms:
                with gradio.Column(min_width=300):
                    chats.append(gradio.Chatbot(label=arm.name, height=HEIGHT, render_markdown=False, buttons=["copy"]))
                    label = f"Where {arm.name} looked"
                    heat_maps.append(gradio.Image(label=label, alt_text=label, interactive=False, buttons=[]))
        outputs = [state, question_box, *chats, *heat_maps]
        alone = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
        at_once = {"queue": False, "api_visibility": "private"}
        gradio.on([asking.click, question_box.submit], ask, [picture, question_box, state], outputs, **alone)
        stopping.click(end_answer, **at_once)
        filling.click(lambda: (example, EXAMPLE), None, [picture, question_box], **at_once)
        cleared = gradio.on([chat.clear for chat in chats], end_answer, **at_once)
        cleared.then(lambda: shown(empty[1]) | dict.fromkeys(heat_maps) | {state: empty}, None, outputs, **alone)
    return page
