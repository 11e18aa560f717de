"""LLaVA's `mm_projector.bin`: writing it, and loading it only into a projector that matches it.

`patches/apply.py` copies this file into upstream trees, with norm.py and zero3.py.
"""

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from llava.model.multimodal_projector.norm import norm_differences
from llava.model.zero3 import full_shape, full_state_dict, gathered, load_full_state_dict

logger = logging.getLogger(__name__)

ADAPTER_FILE = "mm_projector.bin"
_KEY_PREFIX = "model.mm_projector."
_NEWLINE = "image_newline"


def adapter_state_dict(projector: nn.Module, newline: nn.Parameter | None = None) -> dict[str, torch.Tensor]:
    """Full tensors under LLaVA's keys (`model.mm_projector.0.weight`, `model.image_newline`). Every rank must call."""
    state_dict = {_KEY_PREFIX + name: tensor for name, tensor in full_state_dict(projector).items()}
    if newline is not None:
        with gathered(newline):
            state_dict[f"model.{_NEWLINE}"] = newline.detach().cpu().clone()
    return state_dict


def load_adapter(
    projector: nn.Module, path: str | Path, config: PretrainedConfig, newline: nn.Parameter | None = None
) -> None:
    """Loads a stage-1 adapter into `projector`, norm included, bit for bit. Every rank must call.

    Args:
        path: `mm_projector.bin`, or the folder that holds it. A `config.json` next to it names its types.
        config: the model's, from which `projector` was built.
        newline: the model's `image_newline`, which the adapter may lack: LLaVA-NeXT's stage 1 does not save it.

    Raises:
        ValueError: adapter and flags differ in projector, norm or newline; the message gives both values.
    """
    path = Path(path)
    if path.is_dir():
        path = path / ADAPTER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"--pretrain_mm_mlp_adapter {path}: no such file; expected the {ADAPTER_FILE} that stage 1 writes"
        )
    tensors = read_tensors(path)
    state_dict = {k.rsplit("mm_projector.", 1)[1]: v for k, v in tensors.items() if "mm_projector." in k}
    _check_match(projector, state_dict, path, config)
    load_full_state_dict(projector, state_dict)
    _load_newline(newline, {k: v for k, v in tensors.items() if k.split(".")[-1] == _NEWLINE}, path)


@torch.no_grad()
def _load_newline(newline: nn.Parameter | None, stored: dict[str, torch.Tensor], path: Path) -> None:
    if newline is not None and not stored:
        logger.warning("%s has no %s: it keeps the value that it has now", path, _NEWLINE)
    for tensor in stored.values():
        if newline is None or tensor.shape != full_shape(newline):
            ours = "do not have" if newline is None else f"have with shape {tuple(full_shape(newline))}"
            raise ValueError(
                f"--pretrain_mm_mlp_adapter {path} was trained with {_NEWLINE}, which these flags {ours}; pass the "
                "--mm_patch_merge_type that it was trained with (spatial_unpad), and its language model"
            )
        with gathered(newline, modifier_rank=0):
            newline.copy_(tensor)


def read_tensors(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a `.bin` file, by name, without executing code; ValueError if it is damaged or holds more."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path}: corrupt, truncated or not a file of tensors; nothing in it was executed "
            f"({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: expected tensors by name, found {type(tensors).__name__}")
    check_finite(tensors, path)
    return tensors


def check_finite(tensors: Mapping[str, torch.Tensor], source: object) -> None:
    """Raises ValueError, with their names, where tensors of `source` hold NaN or infinity."""
    if bad := [name for name, tensor in tensors.items() if not (tensor.is_meta or tensor.isfinite().all())]:
        raise ValueError(f"{source}: NaN or infinity in {', '.join(bad)}: the file is damaged, or its run diverged")


def _check_match(projector: nn.Module, adapter: dict, path: Path, config: PretrainedConfig) -> None:
    expected = {name: tuple(full_shape(tensor)) for name, tensor in projector.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.items()}
    differences = [
        f"{name}: adapter {shapes.get(name, 'has none')}, flags {expected.get(name, 'have none')}"
        for name in sorted(expected.keys() | shapes.keys())
        if expected.get(name) != shapes.get(name)
    ]
    config_file = path.parent / "config.json"
    recorded = json.loads(config_file.read_text()) if config_file.is_file() else {}
    for field in ("mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature"):
        theirs, ours = recorded.get(field), getattr(config, field, None)
        if None not in (theirs, ours) and theirs != ours:  # their parameters may have the same names and shapes
            differences.append(f"{field}: adapter {theirs!r} (its config.json), flags {ours!r}")
    if "mm_projector_norm" in recorded:  # LLaVA's own folders lack it; there the parameters tell enough
        differences += [
            f"{field}: adapter {theirs!r} (its config.json), flags {ours!r}"
            for field, theirs, ours in norm_differences(recorded, config)
        ]
    if differences:
        raise ValueError(
            f"--pretrain_mm_mlp_adapter {path} does not fit the flags (--mm_projector_type "
            f"{getattr(config, 'mm_projector_type', None)}, --mm_projector_norm "
            f"{getattr(config, 'mm_projector_norm', 'none')}):\n  "
            + "\n  ".join(differences)
            + "\nPass the flags and the language model that the adapter was trained with, or train one with these."
        )
