"""`python -m llava.export gguf`: a checkpoint as the two files of llama.cpp, language model and mmproj.

A part that its graph would compute in another way than training did is refused by name, see docs/gguf.md.
"""

import argparse
from pathlib import Path

import torch

from llava.export import gguf_file, gguf_language, gguf_vision, source
from llava.model.builder import load_pretrained_model
from llava.utils.files import replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source.add_arguments(parser)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--dtype", choices=gguf_file.DTYPES, default="f16", help="precision of the matrices")
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier export")


def run(args: argparse.Namespace) -> None:
    """Writes both files and says how to use them.

    Raises:
        ValueError: llama.cpp would compute something else, or the files are there already.
        ImportError: the package gguf is missing.
    """
    gguf_file.library()
    files = {part: args.output_dir / f"{part}-{args.dtype}.gguf" for part in ("model", "mmproj")}
    for file in files.values():
        if file.exists() and not args.overwrite:
            raise ValueError(f"{file} is there already; pass --overwrite to replace it, or another --output-dir")
    options = {"device": "cpu", "torch_dtype": "auto"}
    tokenizer, model, image_processor, _ = load_pretrained_model(args.model_path, None, "llava", **options)
    template = source.answering_template(model.config, args.model_path, args.conv_mode)
    source.refuse_crops(model.config, args.model_path)
    source.refuse_plugins(model.config, args.model_path)
    gguf_vision.check(model, image_processor)
    gguf_language.check(model, tokenizer)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    name = Path(args.model_path).resolve().name
    with torch.no_grad():
        vision = gguf_vision.fields(model, image_processor), gguf_vision.tensors(model)
        language = gguf_language.fields(model, tokenizer, template), gguf_language.tensors(model)
        # Beside their places until both are complete: one file without the other is of no use.
        with replacing(files["mmproj"]) as mmproj, replacing(files["model"]) as decoder:
            gguf_file.write(mmproj, "clip", name, args.dtype, *vision)
            architecture = gguf_language.decoder_of(model).architecture
            gguf_file.write(decoder, architecture, name, args.dtype, *language)
    print(f"{files['model']}\n{files['mmproj']}\nhow to run it: docs/gguf.md")
    for note in gguf_vision.notes(model, image_processor):
        print(f"note: {note}")
