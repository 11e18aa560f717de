"""One question about pictures: `python -m llava.eval.run_llava --model-path CKPT --image-file FILE --query "..."`.

Prints the answer. The pictures come before the question, or where it says `<image-placeholder>`.
"""

import argparse
import sys
from typing import Any

from llava.asking_flags import add_model_arguments
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_PLACEHOLDER
from llava.eval.answer import add_decoding_arguments
from llava.utils.commands import Parser, exit_status


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = parser().parse_args(argv)
    return exit_status(lambda: eval_model(args))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.eval.run_llava", description=__doc__.splitlines()[0])
    add_model_arguments(top)
    add_decoding_arguments(top, temperature=0.2)
    top.add_argument("--image-file", required=True, help="path or http(s) address; several joined by --sep")
    top.add_argument("--query", required=True, help="the question")
    top.add_argument("--sep", default=",", help="what separates several pictures (default: a comma)")
    return top


def eval_model(args: Any) -> str:
    """Prints and returns the answer; `args` has the command's fields, as LLaVA's function of this name takes them.

    Raises ValueError: a picture cannot be read, the checkpoint cannot answer, or `<image-placeholder>` is not there
    once for every picture.
    """
    from llava.asking import is_captioner, load_assistant, load_picture  # these take seconds
    from llava.model.decoding import evaluation_options, unused

    pictures = [load_picture(source.strip()) for source in args.image_file.split(args.sep)]
    placed = args.query.count(IMAGE_PLACEHOLDER)
    if placed not in (0, len(pictures)):
        raise ValueError(
            f"--query says {IMAGE_PLACEHOLDER} {placed} times, --image-file names {len(pictures)} pictures"
        )
    text = args.query.replace(IMAGE_PLACEHOLDER, DEFAULT_IMAGE_TOKEN)
    question = text if placed else f"{DEFAULT_IMAGE_TOKEN}\n" * len(pictures) + text
    assistant = load_assistant(args.model_path, args.model_base, args.conv_mode, device=getattr(args, "device", None))
    captions = f"{args.model_path} has the template 'plain' (stage 1): it writes a caption and ignores --query"
    for note in (captions * is_captioner(assistant.template), unused(args.model_path, assistant.model.file_decoding)):
        if note:
            print(f"note: {note}", file=sys.stderr)
    options = evaluation_options(args.max_new_tokens, args.temperature, args.top_p, args.num_beams)
    (answer,) = assistant.answer([[{"from": "human", "value": question}]], pictures, **options)
    print(answer)
    return answer


if __name__ == "__main__":
    sys.exit(main())
