"""Merges a LoRA folder into its base: one self-contained checkpoint, as LLaVA's scripts/merge_lora_weights.py.

python -m llava.model.merge_lora --model-path LORA_FOLDER --model-base BASE --save-model-path OUTPUT

Base and adapters are added in float32 and rounded once, to `--dtype`.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from llava.utils.commands import DTYPES, Parser, add_plugin_argument, exit_status

logger = logging.getLogger(__name__)


def merge_lora(model_path: str, model_base: str | None, save_model_path: str, dtype: str | None = None) -> None:
    """Writes a whole checkpoint; the arguments are the command's. ValueError for folders that do not fit."""
    import torch  # this and what follows take seconds
    from transformers.utils.peft_utils import find_adapter_config_file

    from llava.mm_utils import save_tokenizer
    from llava.model.builder import load_pretrained_model
    from llava.model.lora import adapter_dtype

    if find_adapter_config_file(model_path) is None:
        raise ValueError(f"--model-path {model_path}: no adapter_config.json; expected a LoRA folder or hub id")
    output = Path(save_model_path)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"--save-model-path {output}: exists and is not an empty folder; name another")
    written: Any = getattr(torch, dtype) if dtype else adapter_dtype(model_path)
    options: dict[str, Any] = {"device": "cpu", "torch_dtype": torch.float32}
    tokenizer, model, image_processor, _ = load_pretrained_model(model_path, model_base, "", **options)
    assert image_processor is not None  # the model has a vision tower
    model.to(written).save_pretrained(output)
    save_tokenizer(tokenizer, output)
    image_processor.save_pretrained(output)
    rounding = "" if written is torch.float32 else "; rounding to it changes logits, --dtype float32 does not"
    logger.info("merged checkpoint written to %s in %s%s", output.absolute(), written, rounding)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser(prog="python -m llava.model.merge_lora", description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True, help="LoRA folder or hub id")
    parser.add_argument("--model-base", help="model it was trained on (default: the one it records)")
    parser.add_argument("--save-model-path", required=True, help="new or empty folder for the merged checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the written weights (default: the adapters')")
    add_plugin_argument(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return exit_status(lambda: merge_lora(args.model_path, args.model_base, args.save_model_path, args.dtype))


if __name__ == "__main__":
    sys.exit(main())
