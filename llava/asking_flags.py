"""The flags of commands that ask a checkpoint. Imports nothing slow, so that `--help` is quick."""

import argparse

from llava.conversation import conv_templates
from llava.utils.commands import DTYPES, add_device_argument, add_plugin_argument


def add_model_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """The flags that choose a checkpoint, or `several`, with template and device."""
    many = {"action": "append", "help": "checkpoint folder or hub id; repeat it to ask several side by side"}
    single = {"help": "checkpoint folder or hub id"}
    parser.add_argument("--model-path", required=True, **(many if several else single))
    parser.add_argument(
        "--model-base", help="language model, where --model-path holds only a projector or LoRA weights"
    )
    parser.add_argument(
        "--conv-mode",
        choices=list(conv_templates),
        metavar="TEMPLATE",
        help="conversation template (default: the one that the checkpoint was trained with)",
    )
    add_device_argument(parser)
    add_plugin_argument(parser)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the checkpoint's precision and of its crops."""
    parser.add_argument("--dtype", choices=DTYPES, help="precision (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--load-8bit", action="store_true", help="quantise with bitsandbytes")
    parser.add_argument("--load-4bit", action="store_true", help="quantise with bitsandbytes")
    parser.add_argument(
        "--image-aspect-ratio",
        metavar="MODE",
        help="square, pad, anyres or anyres_max_N, with the checkpoint's grids (default: the checkpoint's)",
    )
