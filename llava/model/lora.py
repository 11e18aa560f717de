"""LoRA on the linear layers of the decoder: PEFT's adapters in place, and the files of a LoRA folder.

A LoRA folder holds PEFT's `adapter_config.json` and `adapter_model.safetensors`, LLaVA's `non_lora_trainables.bin` (the
projector with its norm, and the vision tower if it was trained in full), `config.json`, tokenizer and image processor.
It needs the model that it was trained on; `llava.model.merge_lora` makes it self-contained.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from llava.mm_utils import from_anywhere
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.adapter import adapter_state_dict, read_tensors
from llava.model.zero3 import full_state_dict, gathered

NON_LORA_FILE = "non_lora_trainables.bin"
_PREFIX = "base_model.model."  # PEFT's, in front of the causal LM's own parameter names
# Tower layers have the names of decoder layers (q_proj, ...), and PEFT must adapt none, here or where others load.
_VISUAL_MODULES = r"(.*\.)?(vision_tower|mm_projector|image_newline)(\..*)?"


def recorded_base(folder_or_id: str) -> str:
    """The model that a LoRA was trained on, by its `adapter_config.json`; ValueError if it names none that is here."""
    file = find_adapter_config_file(folder_or_id)
    base = json.loads(Path(file).read_text()).get("base_model_name_or_path") if file else None
    if not base or (os.path.isabs(base) and not os.path.exists(base)):
        raise ValueError(
            f"{folder_or_id}/adapter_config.json: base_model_name_or_path is {base}, which is not here; pass the model "
            "that the LoRA was trained on as --model-base"
        )
    return base


def adapter_dtype(folder_or_id: str) -> torch.dtype:
    """The type of a LoRA folder's adapters."""
    from peft import load_peft_weights  # takes seconds, as wherever peft is imported below

    tensors = load_peft_weights(folder_or_id, device="cpu")
    return next(tensor.dtype for name, tensor in tensors.items() if is_adapter(name))


def add_lora(model: LlavaMetaForCausalLM, r: int, alpha: int, dropout: float, dtype: torch.dtype) -> None:
    """Puts new adapters next to every linear layer of the decoder, in place; only they stay trainable.

    As in LLaVA, LM head, projector and vision tower get no adapters.

    Args:
        r, alpha, dropout: rank; the adapters' factor times `r`; dropout before the adapters.
        dtype: type of the trained parameters.
    """
    from peft import LoraConfig

    linear = [name for name, part in model.get_model().layers.named_modules() if isinstance(part, nn.Linear)]
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=sorted({name.rsplit(".", 1)[-1] for name in linear}),  # written as LLaVA writes it
        exclude_modules=_VISUAL_MODULES,
        task_type="CAUSAL_LM",
    )
    model.add_adapter(config)
    for adapter in model.peft_config.values():
        adapter.base_model_name_or_path = from_anywhere(model.name_or_path or "")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def has_lora(model: nn.Module) -> bool:
    """Whether the model holds adapters that are not merged."""
    return bool(getattr(model, "peft_config", None))


def is_adapter(parameter_name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return ".lora_" in parameter_name


def lora_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full CPU tensors of the adapters, by parameter name. Every rank must call."""
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    with gathered(list(adapters.values())):
        return {name: parameter.detach().cpu().clone() for name, parameter in adapters.items()}


def save_non_lora(model: LlavaMetaForCausalLM, output_dir: str | Path, is_main_process: bool) -> None:
    """Writes `non_lora_trainables.bin` (projector, newline, and the tower if it is trained in full) and the config.

    Keys are LLaVA's (`base_model.model.model.mm_projector.0.weight`). Every rank must call.
    """
    decoder = model.get_model()
    state_dict = adapter_state_dict(decoder.mm_projector, decoder.image_newline)
    if any(p.requires_grad for p in decoder.vision_tower.parameters()):
        tower = full_state_dict(decoder.vision_tower)
        state_dict |= {f"model.vision_tower.{name}": tensor for name, tensor in tower.items()}
    state_dict = {_PREFIX + name: tensor for name, tensor in state_dict.items()}
    if is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(state_dict, Path(output_dir, NON_LORA_FILE))
        model.config.save_pretrained(output_dir)


def read_non_lora(folder_or_id: str) -> dict[str, torch.Tensor]:
    """The tensors of `non_lora_trainables.bin`, by the parameter names of the causal LM without adapters."""
    path = cached_file(folder_or_id, NON_LORA_FILE, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise FileNotFoundError(
            f"{folder_or_id}: has adapter_config.json but no {NON_LORA_FILE}, which holds the projector; expected a "
            "folder that LoRA training of LLaVA wrote"
        )
    tensors = read_tensors(path)
    return {name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}


def load_non_lora(model: nn.Module, tensors: dict[str, torch.Tensor], source: str) -> None:
    """Copies what `read_non_lora` returned into a model; raises ValueError where the names do not fit."""
    if unknown := tensors.keys() - model.state_dict().keys():
        raise ValueError(
            f"{source}/{NON_LORA_FILE} does not fit the model: it has no {', '.join(sorted(unknown))}. Check that the "
            "base is the model that the LoRA was trained on."
        )
    model.load_state_dict(tensors, strict=False)


def load_adapters(model: LlavaMetaForCausalLM, folder_or_id: str) -> None:
    """Copies a LoRA folder's adapters into those of `model`; raises ValueError if their names differ."""
    import peft

    tensors = peft.load_peft_weights(folder_or_id, device="cpu")
    stored = {name.removeprefix(_PREFIX) for name in tensors if is_adapter(name)}
    expected = {name for name in model.get_adapter_state_dict() if is_adapter(name)}
    if stored != expected:
        raise ValueError(
            f"{folder_or_id}: its adapters do not match this model: {len(stored - expected)} have no layer "
            f"(first: {min(stored - expected, default=None)}), {len(expected - stored)} layers have none "
            f"(first: {min(expected - stored, default=None)}). Check that the base is the model that the LoRA was "
            "trained on."
        )
    peft.set_peft_model_state_dict(model, {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()})


def apply_lora(model: LlavaMetaForCausalLM, folder_or_id: str, merge: bool) -> LlavaMetaForCausalLM:
    """`model` with a LoRA folder's adapters, merged into the weights or, where those are quantised, beside them."""
    import peft

    config: Any = peft.PeftConfig.from_pretrained(folder_or_id)
    config.inference_mode = True
    if isinstance(config.target_modules, str) or config.use_dora:
        raise ValueError(f"{folder_or_id}: adapters of the vision tower, or DoRA's; only commit 382b45f can load them")
    config.exclude_modules = _VISUAL_MODULES  # upstream adapts before it builds the tower, so its files lack this
    adapted: Any = peft.get_peft_model(model, config)
    load_adapters(model, folder_or_id)
    return adapted.merge_and_unload(safe_merge=True) if merge else adapted.get_base_model()
