"""A GGUF file: fields, then tensors one after another, so that none but the one being written is in memory twice."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from llava.utils.progress import progress

if TYPE_CHECKING:
    from gguf import GGUFWriter

DTYPES = ("f32", "f16", "bf16")
"""Types of matrices; vectors are always f32."""
_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def library() -> ModuleType:
    """The package gguf.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("llama.cpp's files are written by the package gguf: pip install gguf") from error
    logging.getLogger("gguf").setLevel(logging.WARNING)  # it logs endianness and temporary files
    return gguf


def write(
    path: Path,
    architecture: str,
    name: str,
    dtype: str,
    add_fields: Callable[["GGUFWriter"], None],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Writes a GGUF file.

    Args:
        name: of the model.
        dtype: of the matrices, one of `DTYPES`.
        add_fields: adds the fields to the `GGUFWriter`.
        tensors: by llama.cpp's names.

    Raises:
        ValueError: a value is too large for `dtype`, or not finite.
    """
    gguf = library()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    add_fields(writer)
    try:
        for key, tensor in tensors.items():
            kind = _kind(tensor, dtype)
            size, written = tensor.numel() * _TORCH[kind].itemsize, gguf.GGMLQuantizationType[kind.upper()]
            writer.add_tensor_info(key, tensor.shape, np.dtype(np.float32), size, written)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for key, tensor in progress(tensors.items(), f"writing {name}, {architecture}", "tensors"):
            writer.write_tensor_data(_array(key, tensor, _kind(tensor, dtype)))
    finally:
        writer.close()


def _kind(tensor: torch.Tensor, dtype: str) -> str:
    return dtype if tensor.ndim > 1 else "f32"


def _array(name: str, tensor: torch.Tensor, kind: str) -> np.ndarray:
    converted = tensor.detach().to(_TORCH[kind]).contiguous()
    if not converted.isfinite().all():
        largest = tensor.detach().float().abs().max().item()
        raise ValueError(f"{name}: its largest value, {largest:.4g}, does not fit {kind}; pass --dtype f32 or bf16")
    return (converted.view(torch.int16) if kind == "bf16" else converted).numpy()
