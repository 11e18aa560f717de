"""The norm after the projector of any vision-language model of transformers, whoever trains it.

    model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")
    attach(model, "gwc_layernorm")
    ...                                       # any trainer; model.save_pretrained(folder)
    model = load_attached(folder)

The layers, and how their gain starts, are those of `llava.model.multimodal_projector.norm`. A forward hook applies the
norm to what the projector returns. Its parameters are the projector's, `<projector>.mm_norm.weight`, so that optimizer
groups, PEFT's `modules_to_save`, FSDP, ZeRO and `save_pretrained` treat them as such.

Shapes: N any leading dimensions, D LLM hidden size.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from llava.families import family_of, first_tensors, is_floating, projector_path, refuse, text_embedding
from llava.model.decoding import HUB_OPTIONS
from llava.model.multimodal_projector.adapter import check_finite
from llava.model.multimodal_projector.norm import (
    EPS,
    MIN_GAIN,
    NORM_TYPES,
    ProjectorNorm,
    ProjectorNormArguments,
    build_projector_norm,
    record_norm,
)
from llava.model.zero3 import full_shape

RECORD = "llava_attached"
"""The config's entry: what builds the norm, and where it is."""
CHILD = "mm_norm"
"""The norm's name in the projector."""
NAME_SUFFIX = " with the norm of llava.attach"
NEEDS_ATTACH = ", and a norm behind the projector: load this folder by llava.attach.load_attached"
"""Ends the activation's name in the config, which a class without the norm looks up and does not find."""


def attachable() -> list[str]:
    """The norms that `attach` takes, a plug-in's too."""
    return [name for name, norm in NORM_TYPES.items() if norm]


def attach(
    model: PreTrainedModel,
    norm: str = "gwc_layernorm",
    init: str | float = "text_norm",
    *,
    eps: float = EPS,
    min_gain: float = MIN_GAIN,
    learnable: bool = True,
    projector: str | None = None,
) -> PreTrainedModel:
    """Ends the projector of `model` with a norm, and returns `model`. Before PEFT, FSDP or DeepSpeed wrap it.

    What the model's name stands for lacks the norm. So `model.config.name_or_path` gets a suffix, and a trainer that
    would load a second copy by it (a reference model) fails; give it that copy, and the processor.

    Args:
        model: loaded, of a class of transformers that takes pictures.
        norm: see `attachable`.
        init: initial norm of a visual token, see `parse_init`; `text_norm` is measured on what the model's own text
            embedding returns.
        eps, min_gain, learnable: see `ProjectorNorm`.
        projector: path of the projector's module; default: by the rules of `llava.families`.

    Raises:
        ValueError: see the messages; the model is then unchanged.
    """
    name = f"attach: {type(model).__name__}"
    _refuse(model, name, norm, named=projector is not None)
    fields = ProjectorNormArguments(norm, str(init), eps, min_gain, learnable)
    path = projector_path(model, projector or family_of(model.config.model_type).projector, "projector=")
    if not _guard(copy.deepcopy(model.config)):
        raise ValueError(
            f"{name}: its config has no activation that it leaves alone when it is loaded, so a load without the norm "
            "could not be refused"
        )
    embedding = text_embedding(model)
    record: Any = SimpleNamespace(hidden_size=full_shape(embedding.get_parameter("weight"))[-1])
    record_norm(record, fields, embedding)
    _insert(model, vars(record) | {"projectors": [path]})
    _keep_names(model)
    _guard(model.config)
    model.name_or_path = model.config.name_or_path = f"{model.config.name_or_path}{NAME_SUFFIX}"
    return model


def load_attached(folder: str, **options: Any) -> PreTrainedModel:
    """The model with its norm from a folder that `save_pretrained` wrote.

    Args:
        folder: or a hub id.
        options: of `from_pretrained`, such as `dtype`, `device_map` and `revision`.

    Raises:
        ValueError: the folder is not of a model with an attached norm, lacks the norm's weights, or has the norm of
            a plug-in that is not loaded.
    """
    if Path(folder, "adapter_config.json").is_file():
        raise ValueError(
            f"load_attached {folder}: an adapter of PEFT; load its base, attach with the same arguments, then call "
            "PeftModel.from_pretrained"
        )
    config = AutoConfig.from_pretrained(folder, **{name: options[name] for name in HUB_OPTIONS if name in options})
    record = getattr(config, RECORD, None)
    if record is None:
        raise ValueError(f"load_attached {folder}: config.json has no {RECORD}; expected a model that attach changed")
    if record.get("retrofit"):
        raise ValueError(f"load_attached {folder}: its norm entered by retrofit=, which only commit 382b45f can load")
    _unguard(config)
    assert config.architectures  # `save_pretrained` writes it
    plain = getattr(transformers, config.architectures[0])

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        _insert(self, record)

    # The library compares names of classes, and must load the norm's tensors as it loads all others.
    attached: Any = type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})
    model, info = attached.from_pretrained(folder, config=config, output_loading_info=True, **options)
    model.__class__ = plain
    lost = [key for key in info["missing_keys"] if f".{CHILD}." in key]
    if lost:
        raise ValueError(f"load_attached {folder}: config.json has {RECORD}, but the weights lack {', '.join(lost)}")
    for norm in attached_norms(model):
        check_finite(dict(norm.named_parameters()), f"load_attached {folder}: {CHILD}")
        norm.train(norm.training)
    _guard(model.config)
    _keep_names(model)
    return model


def attached_norms(model: nn.Module) -> list[ProjectorNorm]:
    """The norms in `model`: the projector's."""
    return [module for module in model.modules() if isinstance(module, ProjectorNorm)]


# --- parts ------------------------------------------------------------------------------------------------------------


def _refuse(model: PreTrainedModel, name: str, norm: str, named: bool) -> None:
    if norm not in attachable():
        raise ValueError(f"attach: norm: expected one of {', '.join(attachable())}; found {norm!r}")
    if type(model).__module__.startswith("llava."):
        raise ValueError(f"{name}: this tree's own model, which is trained with a norm by --mm_projector_norm")
    if getattr(transformers, type(model).__name__, None) is not type(model):
        raise ValueError(f"{name}: expected a class of transformers, not yet wrapped, which load_attached can make")
    if attached_norms(model):
        raise ValueError(f"{name}: its projector ends in a norm already")
    if getattr(model, "peft_config", None):
        raise ValueError(f"{name}: it has a PEFT adapter; attach before, and list the projector in modules_to_save")
    refuse(model.config.to_dict(), name, "cannot have the norm")
    if model.config.model_type == "molmo2":
        raise ValueError(f"{name}: it adds a visual token to the embedding of its placeholder, so none has one norm")
    if not (named or hasattr(model.config, "vision_config")):
        raise ValueError(f"{name}: a language model without a vision encoder has no projector")


def _insert(model: PreTrainedModel, record: dict[str, Any]) -> None:
    """Puts the norms of `record` in their places, and `record` into the config."""
    embedding = text_embedding(model).get_parameter("weight")
    for path in record["projectors"]:
        projector = model.get_submodule(path)
        fields: Any = SimpleNamespace(**record)
        norm = build_projector_norm(fields)
        assert norm is not None  # `attach` refuses `none`
        like = next((weight for weight in projector.parameters() if weight.is_floating_point()), embedding)
        projector.add_module(CHILD, norm.to(like.device, like.dtype).train(projector.training))
        projector.register_forward_hook(_end_with_norm, with_kwargs=True)
    setattr(model.config, RECORD, record)


def _keep_names(model: PreTrainedModel) -> None:
    """Has `save_pretrained` write the model's own names.

    It writes many families' published ones instead, and no trainer that resumes by `load_state_dict` finds those.
    """
    vars(model)["_weight_conversions"] = []


def _end_with_norm(projector: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """The hook, a function of the module alone, so that a copy of the projector applies its own norm."""
    if not is_floating(first_tensors(args, kwargs)):  # Ovis also looks its picture markers up
        return output
    norm = projector.get_submodule(CHILD)
    if isinstance(output, list):  # a tensor per picture
        return [norm(tokens) for tokens in output]
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"attach: {type(projector).__name__} returns {type(output).__name__}; expected visual tokens")
    return norm(output)


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """The LLM's config, the whole one and those of the other parts."""
    nested = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config.get_text_config(), config, *nested]


def _guard(config: PretrainedConfig) -> bool:
    """Marks the names of one part's activations; False where loading sets them again in every part."""
    for index, part in enumerate(_parts(config)):
        strings = {field: name for field, name in vars(part).items() if isinstance(name, str)}
        names = {field: name for field, name in strings.items() if "act" in field and name in ACT2FN}
        for field, name in names.items():
            setattr(part, field, name + NEEDS_ATTACH)
        loaded = vars(_parts(type(config).from_dict(config.to_dict()))[index])
        if any(str(loaded.get(field)).endswith(NEEDS_ATTACH) for field in names):
            return True
        for field, name in names.items():
            setattr(part, field, name)
    return False


def _unguard(config: PretrainedConfig) -> None:
    """Takes out of `config` what `attach` wrote."""
    delattr(config, RECORD)
    for part in _parts(config):
        for field, value in list(vars(part).items()):
            if isinstance(value, str) and value.endswith(NEEDS_ATTACH):
                setattr(part, field, value.removesuffix(NEEDS_ATTACH))
