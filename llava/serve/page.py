"""The page of `llava.serve.web`: what its buttons do, its blocks in Gradio, and its server."""

import argparse
import html
import json
import os
import socket
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from llava.analysis.samples import PLAYGROUND
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.model.decoding import sampling_options
from llava.serve.arms import Arm, Talk, ask_all, checked_picture, checked_question, without_open_question
from llava.serve.conversation import load_chat_assistant
from llava.serve.uploads import may_be_served, refuse_other_files
from llava.utils.commands import REFUSALS
from llava.utils.paths import checkpoint_name
from llava.utils.presentation import import_pyplot

MOST_ARMS, EXAMPLES = 2, 6
WAITING = 20  # questions in the queue; further ones are refused
MEGABYTE = 10**6
HEIGHT, SOURCES_HEIGHT = 260, 40  # of a picture, a map or a chat, and of the bar below the picture, in pixels
# A browser may load only from this server. Gradio's own scripts and styles are in the page.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; media-src 'self' data: blob:; worker-src 'self' blob:"
)
STYLE = """
.norms { padding: 0 4px; } .norms p { margin: 6px 0 0; }
.norm { display: grid; grid-template-columns: 7em 1fr 4em; gap: 8px; align-items: center; }
.norm .track { background: var(--border-color-primary); height: 14px; border-radius: 3px; }
.norm .track div { height: 14px; border-radius: 3px; min-width: 2px; }
.norm b { text-align: right; font-variant-numeric: tabular-nums; }
.scale { display: grid; grid-template-columns: auto 1fr auto; gap: 8px; align-items: center; padding: 0 4px; }
.scale div { height: 14px; border-radius: 3px; } .scale + p { margin: 0 4px 8px; }
.seen img { width: 100%; height: 100%; object-fit: contain; }
@media (min-width: 768px) { /* one arm's map is below the picture, and as wide */
  .alone { display: grid !important; grid-template-columns: 1fr 1fr; align-items: start; }
  .alone > :nth-child(1) { grid-column: 1 / 3; } .alone > :nth-child(2) { grid-column: 2; grid-row: 2 / 4; }
  .alone > :nth-child(n + 3) { grid-column: 1; }
}
.refusal { color: var(--error-text-color, #b91c1c); font-weight: 600; margin: 4px 0; }
"""
STOPPED = "The answer was stopped, the question is dropped."
# A question or an answer that is new in the first arm's chat comes into view.
SHOW_ANSWER = """(messages) => {
  const chat = document.getElementById("first-chat"), before = Number(chat.dataset.messages || 0);
  chat.dataset.messages = messages.length;
  if (messages.length > before && chat.getBoundingClientRect().bottom > innerHeight)
    chat.closest(".column").scrollIntoView({behavior: "smooth"});
}"""


def run(args: argparse.Namespace) -> None:
    """Loads the checkpoints and serves the page until Ctrl-C.

    Raises:
        ValueError, OSError, ImportError: refused flags or checkpoints; Gradio is not installed; the port is taken.
    """
    if len(args.model_path) > MOST_ARMS:
        raise ValueError(f"--model-path: expected one or two checkpoints, found {len(args.model_path)}")
    if not args.max_upload > 0:
        raise ValueError(f"--max-upload {args.max_upload:g}: expected a positive number")
    check_free(args.host, args.port)
    import_pyplot()
    with tempfile.TemporaryDirectory(prefix="llava-web-") as folder:
        gradio = import_gradio(folder)
        arms = load_arms(args)
        page = build_page(gradio, arms, folder, args)
        theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
        try:
            page.launch(
                server_name=args.host,
                server_port=args.port,
                share=args.share,
                max_file_size=int(args.max_upload * MEGABYTE),
                prevent_thread_lock=True,
                state_session_capacity=100,
                app_kwargs={"middleware": guarding_middleware(folder)},
                ssr_mode=False,
                footer_links=[],
                quiet=True,
                theme=theme.set(block_info_text_color="*body_text_color"),  # Gradio's is too light to read
                css=STYLE,
            )
            print(f"the page: {page.local_url}" + (f" and {page.share_url}" if page.share_url else ""), flush=True)
            threading.Event().wait()
        finally:
            page.close()


def check_free(host: str, port: int) -> None:
    """Raises ValueError, before any model is loaded, where nothing can listen at `host` and `port`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there ({error}); name another --port") from None


def import_gradio(folder: str) -> ModuleType:
    """Gradio, with its files in `folder` and without analytics.

    Raises:
        ImportError: Gradio is not installed; the message says which extra brings it.
    """
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder}
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the page needs Gradio: pip install 'llava[web]', see docs/chat.md") from error
    return gradio


def load_arms(args: argparse.Namespace) -> list[Arm]:
    """The checkpoints, named as in tables; if two have the same name, their names get numbers."""
    names = [checkpoint_name(path) for path in args.model_path]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    loaded = [load_chat_assistant(argparse.Namespace(**vars(args) | {"model_path": path})) for path in args.model_path]
    return [Arm(name, assistant) for name, assistant in zip(names, loaded, strict=True)]


def guarding_middleware(folder: str) -> list[Any]:
    """Sends `POLICY` with every response, and serves no file but those in `folder`."""
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse

    class Guard:
        def __init__(self, app: Any):
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def send_with(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
                await send(message)

            refused = scope["type"] == "http" and not may_be_served(scope["path"], folder)
            app = PlainTextResponse("No such file.", 403) if refused else self.app
            await app(scope, receive, send_with if scope["type"] == "http" else send)

    return [Middleware(Guard)]


def examples() -> list[list[str]]:
    """Pictures of the playground with a question each, from whichever set is prepared here; no picture twice."""
    question_of: dict[str, str] = {}
    for file in filter(Path.is_file, map(Path, PLAYGROUND)):
        for record in json.loads(file.read_text(encoding="utf-8")):
            picture = file.parent / "images" / record["image"]
            if len(question_of) < EXAMPLES and picture.is_file():
                question = record["conversations"][0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()
                question_of.setdefault(str(picture), question)
    return [list(pair) for pair in question_of.items()]


def refusal(text: str) -> str:
    """A message on the page that says what cannot be done."""
    return f'<p class="refusal" role="alert">{html.escape(text)}</p>' if text else ""


class Page:
    """What the page's buttons do; every function returns values for `outputs`.

    Args:
        folder: where uploaded pictures are; others are not opened.
        most_bytes: largest size of an uploaded picture.
        same: the value that leaves an output unchanged.
    """

    def __init__(self, arms: Sequence[Arm], folder: str | Path, most_bytes: int, same: object = None):
        self.arms, self.folder, self.most_bytes, self.same = arms, folder, most_bytes, same

    def shown(self, talks: Sequence[Talk], message: str = "") -> list[object]:
        """Values of state, message, and each arm's chat, heatmap and norms."""
        parts = [value for talk in talks for value in (talk.messages(), talk.heatmap, talk.norms)]
        return [talks, refusal(message), *parts]

    def start(self) -> list[Talk]:
        """Conversations that have not begun."""
        return [Talk() for _ in self.arms]

    def new_picture(self, path: str | None) -> list[object]:
        """A picture was chosen or removed: conversations are reset, and non-images are rejected.

        The first value is the picture. The message on the page stays, unless the picture is refused: this may run long
        after the choice, and what was said since then holds.
        """
        state, _, *parts = self.shown(self.start())
        try:
            if path:
                checked_picture(path, self.folder, self.most_bytes)
        except REFUSALS as error:
            return [None, state, refusal(str(error)), *parts]
        return [self.same, state, self.same, *parts]

    def forget_message(self, path: str | None) -> list[object]:
        """A picture was chosen: no message and no open question. When one is removed, perhaps as refused, it stays."""
        return ["" if path else self.same, False]

    def reset(self) -> list[object]:
        """Resets the conversations."""
        return self.shown(self.start())

    def say_stopped(self, asked: bool) -> list[object]:
        """The message of Stop, if a question was asked and is not answered, and that none is any more."""
        return [refusal(STOPPED) if asked else self.same, False]

    def stop(self, talks: Sequence[Talk]) -> list[object]:
        """Drops the question that was being answered, for all arms; without one the message on the page stays."""
        kept = without_open_question(talks)
        state, message, *parts = self.shown(kept, STOPPED)
        return [state, self.same if kept == talks else message, *parts]

    def ask(
        self, path: str | None, question: str | None, talks: Sequence[Talk], temperature: float, max_new_tokens: int
    ) -> Iterator[list[object]]:
        """Asks all arms, and yields the outputs while their answers are generated."""
        kept = without_open_question(talks)
        state, _, *parts = self.shown(talks)
        shown = [state, None, *parts]  # what the page has; its message may be any

        def changed(now: Sequence[Talk], message: str = "") -> list[object]:
            # A picture that is sent again is written again, perhaps while the browser reads it.
            nonlocal shown
            before, shown = shown, self.shown(now, message)
            return [self.same if new == old else new for new, old in zip(shown, before, strict=True)]

        try:
            picture = checked_picture(path, self.folder, self.most_bytes)
            question = checked_question(question)
            options = sampling_options(temperature) | {"max_new_tokens": int(max_new_tokens)}
            for now in ask_all(self.arms, kept, picture, question, **options):
                yield changed(now)
        except REFUSALS as error:
            yield changed(kept, str(error))
        except Exception:
            traceback.print_exc()
            yield changed(kept, "This failed; the terminal says why.")


def build_page(gradio: ModuleType, arms: Sequence[Arm], folder: str, args: argparse.Namespace) -> Any:
    """The page as Gradio's blocks, with its events; uploads are in `folder`."""
    does = Page(arms, folder, int(args.max_upload * MEGABYTE), gradio.skip())
    title = " and ".join(arm.name for arm in arms)
    with gradio.Blocks(title=f"LLaVA: {title}", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.Markdown("# Ask about a picture")
        state = gradio.State(does.start())
        with gradio.Row():
            with gradio.Column(min_width=280):
                picture = gradio.Image(
                    label="Picture",
                    type="filepath",
                    sources=["upload", "clipboard"],
                    height=HEIGHT + SOURCES_HEIGHT,
                    elem_classes="seen",
                )
                # The file as it was uploaded: nothing decodes it before `checked_picture`. (A subclass would say this
                # as well, and Gradio would write a .pyi file beside this one.)
                picture.preprocess = lambda payload: payload and payload.path
            with gradio.Column(min_width=280):
                question = gradio.Textbox(
                    label="Question",
                    lines=1,
                    max_lines=6,
                    placeholder="What is in the picture?",
                    info="Enter asks, Shift+Enter starts a line.",
                )
                with gradio.Row():
                    ask = gradio.Button("Ask", variant="primary", min_width=80)
                    stop = gradio.Button("Stop", min_width=80)
                    reset = gradio.Button("Reset", min_width=80)
                message = gradio.HTML()
                with gradio.Accordion("Settings", open=False):
                    temperature = gradio.Slider(0, 2, 0, step=0.1, label="Temperature (0: the likeliest token)")
                    longest = gradio.Slider(1, 1024, args.max_new_tokens, step=1, label="Maximum tokens of an answer")
        outputs, chats = [state, message], []
        with gradio.Row():
            for number, arm in enumerate(arms):
                with gradio.Column(min_width=300, elem_classes=None if len(arms) > 1 else "alone"):
                    gradio.Markdown(f"### {arm.name}")
                    chat = gradio.Chatbot(
                        show_label=False,
                        height=HEIGHT,
                        render_markdown=False,
                        buttons=["copy"],
                        elem_id=None if number else "first-chat",
                    )
                    heatmap = gradio.Image(
                        label="Where it looked",
                        interactive=False,
                        height=HEIGHT,
                        format="png",
                        buttons=["download", "fullscreen"],
                        alt_text=f"Where {arm.name} looked in the picture",
                        elem_classes="seen",
                    )
                    outputs += [chat, heatmap, gradio.HTML()]
                    chats.append(chat)
        if shown_examples := examples():
            gradio.Examples(shown_examples, [picture, question], cache_examples=False)
        inputs, asked = [picture, question, state, temperature, longest], gradio.State(False)
        # Only one event at a time writes the state: those that cancel a question wait until it has ended.
        alone = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
        at_once = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        gradio.on([ask.click, question.submit], lambda: True, None, asked, **at_once)
        # Stop waits until other visitors' answers have ended, its message does not.
        stop.click(does.say_stopped, asked, [message, asked], **at_once)
        clears = [chat.clear for chat in chats]
        picture.change(does.forget_message, picture, [message, asked], **at_once)
        gradio.on([reset.click, *clears], lambda: False, None, asked, **at_once)
        asking = gradio.on([ask.click, question.submit], does.ask, inputs, outputs, trigger_mode="once", **alone)
        asking.then(lambda: False, None, asked, **at_once)
        for on, function, takes, gives in (
            (stop.click, does.stop, [state], outputs),
            (picture.change, does.new_picture, [picture], [picture, *outputs]),
            *((on, does.reset, None, outputs) for on in (reset.click, *clears)),
        ):
            on(None, cancels=asking)  # sent first; as an argument of the next line it would be sent when that has ended
            on(function, takes, gives, **alone)
        chats[0].change(None, [chats[0]], js=SHOW_ANSWER)
    refuse_other_files(gradio, page, folder)
    return page.queue(max_size=WAITING)
