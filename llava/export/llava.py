"""Writes a folder of Hugging Face's LLaVA classes as a checkpoint in LLaVA's layout, as training writes it.

It takes what `python -m llava.export hf` has written, and published folders of LLaVA 1.5 and LLaVA-NeXT. Training,
asking, evaluation and analysis read such folders as they are, without this.
"""

import argparse
import logging
from pathlib import Path

from transformers import PretrainedConfig

from llava.export.hf import new_folder
from llava.mm_utils import load_tokenizer, save_tokenizer
from llava.model.builder import load_as_stored, read_config
from llava.model.decoding import unused
from llava.model.hf_folder import is_hf_folder
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.utils.commands import DTYPES

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--model-path", required=True, help="folder or hub id of Hugging Face's LLaVA classes")
    parser.add_argument("--output-dir", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the written weights (default: the folder's)")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    write_checkpoint(args.model_path, args.output_dir, args.dtype)


def write_checkpoint(model_path: str, output_dir: Path, dtype: str | None = None) -> None:
    """Writes the checkpoint, which appears only when it is complete.

    Raises:
        ValueError: `model_path` is no such folder, or `output_dir` holds something else.
    """
    config = read_config(model_path)
    if not is_hf_folder(PretrainedConfig.get_config_dict(model_path)[0]):
        raise ValueError(
            f"--model-path {model_path}: not a folder of Hugging Face's LLaVA classes (its config.json has no "
            "text_config); a checkpoint of this tree has LLaVA's layout already"
        )
    with new_folder(output_dir) as folder:
        model = load_as_stored(model_path, config, dtype)
        model.save_pretrained(folder, max_shard_size="5GB")
        if note := unused(model_path, model.file_decoding):
            logger.warning("%s", note)
        save_tokenizer(load_tokenizer(model_path, padding_side="right"), folder)
        load_image_processor(model_path, model.get_vision_tower()).save_pretrained(folder)
    logger.info("%s written: %s in %s", output_dir.absolute(), type(model).__name__, model.dtype)
