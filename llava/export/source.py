"""The checkpoint that an export starts from: its conversation template, and what no format has a place for."""

import argparse

from transformers import PretrainedConfig

from llava.anyres import has_newline, is_anyres
from llava.asking import choose_template, is_captioner
from llava.conversation import Conversation, conv_templates
from llava.utils.commands import add_plugin_argument
from llava.utils.plugins import registered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plugin_argument(parser)
    parser.add_argument("--model-path", required=True, help="checkpoint folder or hub id")
    parser.add_argument(
        "--conv-mode",
        choices=list(conv_templates),
        metavar="TEMPLATE",
        help="conversation template (default: the one that the checkpoint was trained with)",
    )


def answering_template(config: PretrainedConfig, model_path: str, conv_mode: str | None) -> Conversation:
    """The template of `--conv-mode`, or else the checkpoint's.

    Raises:
        ValueError: the checkpoint is of stage 1 and answers no questions, whatever `--conv-mode` says.
    """
    template = choose_template(config, model_path, conv_mode)
    recorded = getattr(config, "mm_conv_version", None) or conv_mode
    if is_captioner(template) or is_captioner(choose_template(config, model_path, recorded)):
        raise ValueError(
            f"--model-path {model_path}: of stage 1 (template plain), which answers no questions; export stage 2"
        )
    return template


def refuse_plugins(config: PretrainedConfig, model_path: str) -> None:
    """Raises ValueError where a part of the model is a plug-in's, which no format has a place for."""
    tower = (getattr(config, "mm_vision_config", None) or {}).get("model_type")
    norm = getattr(config, "mm_projector_norm", None)
    if own := {f"norm {norm}", f"tower {tower}", f"decoder {config.model_type}"} & registered:
        raise ValueError(
            f"--model-path {model_path}: its {', '.join(sorted(own))} is code of your own, which this format cannot "
            "carry; share the checkpoint as it is, with the file for --plugin"
        )


def refuse_crops(config: PretrainedConfig, model_path: str) -> None:
    """Raises ValueError where a picture becomes several crops, or `image_newline` follows its tokens."""
    if is_anyres(aspect := getattr(config, "image_aspect_ratio", None)):
        raise ValueError(
            f"--model-path {model_path}: image_aspect_ratio={aspect} (several crops for a picture) cannot be written "
            "in this format; use `python -m llava.export hf`, or train one with --image_aspect_ratio pad"
        )
    if has_newline(merge := getattr(config, "mm_patch_merge_type", None)):
        raise ValueError(
            f"--model-path {model_path}: mm_patch_merge_type={merge} (image_newline after every picture) cannot be "
            "written in this format; use `python -m llava.export hf`, or train one with --mm_patch_merge_type flat"
        )
