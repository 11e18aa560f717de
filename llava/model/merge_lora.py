"""Merges a LoRA folder into its base: one self-contained checkpoint, as LLaVA's scripts/merge_lora_weights.py.

python -m llava.model.merge_lora --model-path LORA_FOLDER --model-base BASE --save-model-path OUTPUT
"""

import argparse
import logging

from llava.mm_utils import get_model_name_from_path, save_tokenizer
from llava.model.builder import load_pretrained_model
from llava.model.lora import lora_config_file

logger = logging.getLogger(__name__)


def merge_lora(model_path: str, model_base: str | None, save_model_path: str) -> None:
    """Writes language model with the adapters added, projector, norm, vision tower, tokenizer and image processor.

    Args:
        model_path: LoRA folder or hub id.
        model_base: the model that the LoRA was trained on; None takes the one recorded in `adapter_config.json`.
        save_model_path: folder to write; weights have the base's dtype.

    Raises:
        ValueError: `model_path` is not a LoRA folder.
    """
    if lora_config_file(model_path) is None:
        raise ValueError(f"--model-path {model_path}: no adapter_config.json there; expected a LoRA folder or hub id")
    name = get_model_name_from_path(model_path)
    tokenizer, model, image_processor, _ = load_pretrained_model(
        model_path, model_base, name, device="cpu", torch_dtype="auto"
    )
    model.save_pretrained(save_model_path)
    save_tokenizer(tokenizer, save_model_path)
    image_processor.save_pretrained(save_model_path)
    logger.info("merged checkpoint written to %s", save_model_path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True, help="LoRA folder or hub id")
    parser.add_argument("--model-base", help="model it was trained on; default: the one it records")
    parser.add_argument("--save-model-path", required=True, help="folder to write the merged checkpoint to")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    merge_lora(args.model_path, args.model_base, args.save_model_path)


if __name__ == "__main__":
    main()
