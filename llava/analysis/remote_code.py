"""Loads models whose code is in their repositories and was written for transformers 4: Kimi-VL, Ovis 2.5, MoonViT.

transformers 5 builds a model without memory and fills it from the files. Buffers that such code computes while it is
built, and that no file holds, are lost by that; classes that never call `post_init`, whose `tie_weights` takes no
arguments, or whose `_supports_sdpa` asks a part of the model end in an error. Here a model is built in memory, and its
tensors are read from the files one by one. Names that transformers 5 removed are put back before the code is imported.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, dynamic_module_utils, processing_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.utils import import_utils

from llava.analysis.weights import WeightFiles

REMOVED = {
    import_utils: {"is_torch_fx_available": lambda: False},
    processing_utils: {"_validate_images_text_input_order": lambda images, text: (images, text)},
    PreTrainedModel: {"is_parallelizable": False},
}
"""What such code imports or reads and transformers 5 does not have, by module or class."""


def restore_removed_names() -> None:
    """Puts `REMOVED` back where it is missing, for the rest of the process, and disables the trust prompt."""
    # Such code loads its tokenizer itself; --trust-remote-code has said yes.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    for owner, names in REMOVED.items():
        for name, value in names.items():
            if not hasattr(owner, name):
                setattr(owner, name, value)


def load_remote(path: str, auto_class: Any, device: str, dtype: str) -> PreTrainedModel:
    """The model in `path`, in eval mode, built by its repository's code.

    Args:
        auto_class: of transformers, by whose name the config's `auto_map` names the model's class.
        dtype: a name of torch's, or `auto` for the config's.

    Raises:
        ValueError: a weight is in no file, or has another shape there.
    """
    restore_removed_names()
    reference = PretrainedConfig.get_config_dict(path)[0]["auto_map"][auto_class.__name__]
    kind = get_class_from_dynamic_module(reference, path)
    # Not AutoConfig's, which imports the same files a second time as other classes.
    config = kind.config_class.from_pretrained(path)
    precision = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    # The property asks a part that is not built yet.
    asks = isinstance(inspect.getattr_static(kind, "_supports_sdpa", None), property)
    options = {"attn_implementation": "eager"} if asks else {}
    with no_init_weights():
        model = kind._from_config(config, dtype=precision, **options)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module.is_custom_code():
            module.tie_weights()
    fill(model, WeightFiles(path))
    return model.to(device).eval()


@torch.no_grad()
def fill(model: nn.Module, files: WeightFiles) -> None:
    """Copies the tensors of `files` into `model`; a tied one may have either of its names there.

    Raises ValueError: a weight is in no file, or has another shape there.
    """
    tensors = model.state_dict(keep_vars=True)
    filled = set()
    for name in tensors.keys() & files.names:
        stored = files.read(name)
        if stored.shape != tensors[name].shape:
            raise ValueError(
                f"--model {files.path}: {name} has the shape {tuple(stored.shape)} in the files, and "
                f"{tuple(tensors[name].shape)} in the model that its code builds"
            )
        tensors[name].copy_(stored)
        filled.add(id(tensors[name]))
    if missing := [name for name, tensor in tensors.items() if id(tensor) not in filled]:
        raise ValueError(f"--model {files.path}: its files lack {len(missing)} weights, such as {missing[0]}")
