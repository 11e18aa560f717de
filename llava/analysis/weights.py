"""Reads single tensors from a checkpoint's files, without building a model or loading the other tensors."""

import contextlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from llava.model.lora import NON_LORA_FILE
from llava.model.multimodal_projector.adapter import ADAPTER_FILE

# A whole model is in the first of MODEL_FILES that exists; stage 1 and LoRA write the projector to PROJECTOR_FILES.
MODEL_FILES = ("model.safetensors", "pytorch_model.bin")
PROJECTOR_FILES = (ADAPTER_FILE, NON_LORA_FILE)
EMBEDDING_NAMES = (
    "embed_tokens.weight",  # Llama, Qwen, Gemma, ... alone or under language_model, llm, text_model
    "tok_embeddings.weight",  # InternLM 2
    "wte.weight",  # GPT-2, Qwen 1
    "word_embeddings.weight",  # GLM, BLOOM
    "embed_in.weight",  # GPT-NeoX
    "wte.embedding",  # Molmo 2; new tokens are in a second tensor
)
CONTINUED = "wte.embedding", "wte.new_embedding"
"""The endings of the names of an embedding in two tensors."""
_VISION = ("vis", "vte", "audio", "image", "talker", "decoder_input")


class WeightFiles:
    """The tensors of a checkpoint folder or hub model, by name.

    Args:
        path: folder or hub id; of a hub model only the shards that are read are downloaded.

    Attributes:
        names: of the tensors, each with its file.

    Raises:
        FileNotFoundError: no weights there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.names: dict[str, str] = {}
        self._pickled: dict[str, dict[str, torch.Tensor]] = {}
        for file_name in MODEL_FILES:
            if self._add(file_name):
                break
        for file_name in PROJECTOR_FILES:
            self._add(file_name)
        if not self.names:
            folder, files = Path(path), ", ".join((*MODEL_FILES, *PROJECTOR_FILES))
            remedy = "" if folder.is_dir() else "; no such folder, and no hub model that could be reached"
            if any(folder.glob("global_step*")):
                gathered = f"python {folder / 'zero_to_fp32.py'} {folder} {folder}"
                remedy = f"; it holds only DeepSpeed's partitioned state. Gather it first: {gathered}"
            raise FileNotFoundError(f"{path}: no weights, expected {files} (or shards with an index){remedy}")

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype."""
        with self._open(name) as tensor:
            return tensor[:]

    def shape(self, name: str) -> list[int]:
        """The tensor's shape, of a safetensors file by its header."""
        with self._open(name) as tensor:
            return list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())

    def row_norms(self, name: str) -> torch.Tensor:
        """L2 norms of a matrix's rows [rows] in fp64, each computed in fp32; of an embedding in two tensors, of both.

        Raises ValueError: not a matrix of floats, or it has NaN or infinite values.
        """
        second = name.removesuffix(CONTINUED[0]) + CONTINUED[1]
        norms = []
        for part in [name, second] if name.endswith(CONTINUED[0]) and second in self.names else [name]:
            matrix = self.read(part)
            if not matrix.is_floating_point() or matrix.ndim != 2:
                fault = f"{part} is {matrix.dtype} with {matrix.ndim} dimensions, expected a matrix of floats"
                raise ValueError(f"{self.path}: {fault}")
            norms += [torch.linalg.vector_norm(rows.float(), dim=-1).double() for rows in matrix.split(16384)]
        if bad := int((~(every := torch.cat(norms)).isfinite()).sum()):
            raise ValueError(f"{self.path}: {bad} rows of {name} are NaN or infinite")
        return every

    def embedding_name(self, requested: str | None = None) -> str:
        """The name of the text embedding matrix.

        Args:
            requested: `--embedding-name`, which is taken as it is.

        Raises:
            ValueError: none or several candidates, or `requested` is not there; the message says how to name it.
        """
        names = [name for name in self.names if f".{name}".endswith(tuple(f".{end}" for end in EMBEDDING_NAMES))]
        names = [name for name in names if not any(word.startswith(_VISION) for word in name.split("."))]
        if requested is not None:
            names = [name for name in self.names if name == requested]
        if len(names) != 1:
            raise ValueError(
                f"{self.path}: expected one text embedding matrix{f' {requested}' if requested else ''}, found "
                f"{', '.join(names) or 'none'}; name it by --embedding-name. The tensors begin with "
                f"{', '.join(list(self.names)[:6])}"
            )
        return names[0]

    def _add(self, file_name: str) -> bool:
        """Whether there are weights of this name; adds their tensors."""
        index_file, file = self._locate(f"{file_name}.index.json"), self._locate(file_name)
        if file and file_name.endswith(".bin"):  # before an index, as transformers reads them
            found = dict.fromkeys(self._pickle(file_name), file_name)
        elif file:
            with safe_open(file, framework="pt") as opened:
                found = dict.fromkeys(opened.keys(), file_name)
        elif index_file:
            found = json.loads(Path(index_file).read_text())["weight_map"]
        else:
            return False
        self.names |= {name: file for name, file in found.items() if name not in self.names}
        return True

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """A tensor, or what reads parts of it from a safetensors file."""
        if self.names[name].endswith(".bin"):
            yield self._pickle(self.names[name])[name]
        else:
            with safe_open(self._locate(self.names[name]), framework="pt") as opened:
                yield opened.get_slice(name)

    def _locate(self, file_name: str) -> str | None:
        silent = ("missing_entries", "gated_repo", "connection_errors")
        return cached_file(self.path, file_name, **{f"_raise_exceptions_for_{case}": False for case in silent})

    def _pickle(self, file_name: str) -> dict[str, torch.Tensor]:
        if file_name not in self._pickled:
            file = self._locate(file_name)
            mapped = zipfile.is_zipfile(file)  # files of torch before 1.6 cannot be mapped
            self._pickled[file_name] = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        return self._pickled[file_name]
