"""`python -m llava.export gguf`: a checkpoint as the two files of llama.cpp, language model and mmproj.

What its graph would compute otherwise than the model was trained is refused by name: docs/gguf.md.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from llava.asking import choose_template, is_captioner
from llava.export import gguf_file, gguf_language, gguf_vision
from llava.model.builder import load_pretrained_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="checkpoint folder or hub id")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--dtype", choices=gguf_file.DTYPES, default="f16", help="of the matrices")
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier export")


def run(args: argparse.Namespace) -> None:
    """Writes both files and says how to use them.

    Raises:
        ValueError: llama.cpp would compute something else, or the files are there already.
        ImportError: the package gguf is missing.
    """
    gguf_file.library()
    model_file, projector_file = (args.output_dir / f"{name}-{args.dtype}.gguf" for name in ("model", "mmproj"))
    for file in (model_file, projector_file):
        if file.exists() and not args.overwrite:
            raise ValueError(f"{file} is there already; pass --overwrite to replace it, or another --output-dir")
    tokenizer, model, image_processor, _ = load_pretrained_model(
        args.model_path, None, "llava", device="cpu", torch_dtype="auto"
    )
    template = choose_template(model.config, args.model_path)
    if is_captioner(template):
        raise ValueError(
            f"{args.model_path} is of stage 1 (template plain), which answers no questions; export stage 2"
        )
    gguf_vision.check(model)
    gguf_language.check(model, tokenizer)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    name = Path(args.model_path).resolve().name
    with torch.no_grad():
        gguf_file.write(
            projector_file,
            "clip",
            args.dtype,
            named(name, gguf_vision.fields(model, image_processor)),
            gguf_vision.tensors(model),
        )
        architecture = gguf_language.DECODERS[gguf_language.family_of(model.config).name].architecture
        language = named(name, gguf_language.fields(model, tokenizer, template))
        gguf_file.write(model_file, architecture, args.dtype, language, gguf_language.tensors(model))
    print(f"{model_file}\n{projector_file}")
    print(f"llama-mtmd-cli -m {model_file} --mmproj {projector_file} --image photo.jpg -p ...   (docs/gguf.md)")


def named(name: str, add_fields: Any) -> Any:
    """`add_fields` with the model's name."""

    def add(writer: Any) -> None:
        writer.add_name(name)
        add_fields(writer)

    return add
