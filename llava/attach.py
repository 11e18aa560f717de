"""The norm behind the projector of any vision-language model of transformers, whoever trains it.

    model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")
    attach(model, "gwc_layernorm")
    ...                                       # any trainer; model.save_pretrained(folder)
    model = load_attached(folder)

The layers, and how their gain starts, are those of `llava.model.multimodal_projector.norm`. A forward hook applies the
norm to what the projector returns. Its parameters are the projector's, `<projector>.mm_norm.weight`, so that optimizer
groups, PEFT's `modules_to_save`, FSDP, ZeRO and `save_pretrained` treat them as such.

Shapes: N any leading dimensions, D LLM hidden size.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, TrainerCallback, TrainerState
from transformers.activations import ACT2FN

from llava.families import (
    DEEPSTACK,
    family_of,
    first_tensors,
    is_floating,
    projector_path,
    refuse,
    text_embedding,
)
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
_UNTRAINED = "original_module"
"""PEFT's name for the copy of a module in `modules_to_save` that is the reference without the adapter."""
_CONVERSIONS, _BEFORE = "_weight_conversions", "_weight_conversions_before_attach"
"""The attribute by which `save_pretrained` renames parameters, and where its value is kept meanwhile."""
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Options of `from_pretrained` that say where a folder is, for its config too."""


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
    deepstack: bool = False,
    retrofit: int = 0,
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
        deepstack: DeepStack adds further projections of the picture to states inside the LLM (Qwen3-VL). False leaves
            them as they are; True ends each with a norm of its own, with the same target.
        retrofit: number of steps over which a trained model passes from its own visual tokens, bit for bit, to normed
            ones; needs the callback `Retrofit`. 0 applies the norm at once.

    Raises:
        ValueError: see the messages; the model is then unchanged.
    """
    name = f"attach: {type(model).__name__}"
    _refuse(model, name, norm, retrofit, named=projector is not None)
    fields = ProjectorNormArguments(norm, str(init), eps, min_gain, learnable)
    paths = [projector_path(model, projector or family_of(model.config.model_type).projector, "projector=")]
    if deepstack:
        paths += _deepstack(model, name)
    guarded = _activations(model.config)
    if not guarded:
        raise ValueError(f"{name}: its config names no activation, so a load without the norm could not be refused")
    embedding = text_embedding(model)
    record: Any = SimpleNamespace(hidden_size=full_shape(embedding.get_parameter("weight"))[-1])
    record_norm(record, fields, embedding)
    _insert(model, vars(record) | {"projectors": paths, "retrofit": retrofit})
    _keep_names(model)
    for config, field in guarded:
        setattr(config, field, getattr(config, field) + NEEDS_ATTACH)
    _rename(model, f"{model.config.name_or_path}{NAME_SUFFIX}")
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Takes the norm away, with what it learned, and returns `model`, which is then as before `attach`.

    Raises:
        ValueError: no norm is attached, or PEFT or a trainer has wrapped the model or its projector.
    """
    record = getattr(model.config, RECORD, None)
    if record is None:
        raise ValueError(f"detach: {type(model).__name__} has no attached norm")
    modules = dict(model.named_modules())
    projectors = [modules.get(path, nn.Module()) for path in record["projectors"]]
    if not all(CHILD in dict(projector.named_children()) for projector in projectors):
        raise ValueError(
            f"detach: {type(model).__name__} is wrapped, or its projector is; expected the model that attach returned "
            "(with PEFT: what merge_and_unload() or unload() returns)"
        )
    for projector in projectors:
        delattr(projector, CHILD)
        for key in [key for key, hook in projector._forward_hooks.items() if hook is _end_with_norm]:
            del projector._forward_hooks[key], projector._forward_hooks_with_kwargs[key]
    _unguard(model.config)
    vars(model)[_CONVERSIONS] = vars(model).pop(_BEFORE)
    _rename(model, str(model.config.name_or_path).removesuffix(NAME_SUFFIX))
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
    config = AutoConfig.from_pretrained(folder, **{name: options[name] for name in _HUB if name in options})
    record = getattr(config, RECORD, None)
    if record is None:
        raise ValueError(f"load_attached {folder}: config.json has no {RECORD}; expected a model that attach changed")
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
    for part, field in _activations(model.config):
        setattr(part, field, getattr(part, field) + NEEDS_ATTACH)
    _keep_names(model)
    return model


def attached_norms(model: nn.Module) -> list[ProjectorNorm]:
    """The norms in `model`: the projector's, then DeepStack's."""
    return [module for module in model.modules() if isinstance(module, ProjectorNorm)]


class Blend(nn.Module):
    """A norm that enters over `steps` steps: `y = (1 - a) x + a norm(x)`, `a` growing from 0 to 1.

    The buffer counts the steps, so that `a` is saved with the weights and no dtype rounds it. Until the first step
    `y` is `x` bit for bit; compensation concerns the norm's share of the gradient.

    Raises:
        RuntimeError: trained without anything that moves it.
    """

    def __init__(self, norm: ProjectorNorm, steps: int):
        super().__init__()
        self.norm, self.steps, self.moves = norm, steps, False
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def advance(self, steps: int = 1) -> None:
        """Moves the blend, by a trainer's callback or a loop of one's own; 0 only says that it will be."""
        self.moves = True
        self.step += steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`y` [N, D] for `x` [N, D]."""
        if self.training and torch.is_grad_enabled() and not self.moves:
            raise RuntimeError("retrofit: nothing moves the blend; pass callbacks=[llava.attach.Retrofit()]")
        share = (self.step / self.steps).clamp(max=1)
        return torch.where(share > 0, (1 - share) * x + share * self.norm(x), x)


class Retrofit(TrainerCallback):
    """Moves the blend of `attach(..., retrofit=N)` by one at the end of every optimizer step.

    Raises:
        ValueError: the model has no blend, or a resumed run's blend was not read.
    """

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        step = min(int(blend.step) for blend in self._advance(model, 0))
        if step < state.global_step:
            raise ValueError(
                f"Retrofit: the run resumes after step {state.global_step}, but its blend is at step {step}, so the "
                "checkpoint lacks it or was not read. With LoRA, list the projector in modules_to_save"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        self._advance(model, 1)

    def _advance(self, model: nn.Module | None, steps: int) -> list[Blend]:
        named = model.named_modules() if model else ()
        blends = [module for name, module in named if isinstance(module, Blend) and _UNTRAINED not in name.split(".")]
        if not blends:
            raise ValueError("Retrofit: the model has no blend; expected attach(model, ..., retrofit=N)")
        for blend in blends:
            blend.advance(steps)
        return blends


# --- parts ------------------------------------------------------------------------------------------------------------


def _refuse(model: PreTrainedModel, name: str, norm: str, retrofit: int, named: bool) -> None:
    if norm not in attachable():
        raise ValueError(f"attach: norm: expected one of {', '.join(attachable())}; found {norm!r}")
    if not isinstance(retrofit, int) or isinstance(retrofit, bool) or retrofit < 0:
        raise ValueError(f"attach: retrofit: expected a number of steps, or 0; found {retrofit!r}")
    if type(model).__module__.startswith("llava."):
        raise ValueError(f"{name}: this tree's own model, which is trained with a norm by --mm_projector_norm")
    if getattr(transformers, type(model).__name__, None) is not type(model):
        raise ValueError(f"{name}: expected a class of transformers, not yet wrapped, which load_attached can make")
    if attached_norms(model):
        raise ValueError(f"{name}: its projector ends in a norm already; detach it first")
    if getattr(model, "peft_config", None):
        raise ValueError(f"{name}: it has a PEFT adapter; attach before, and list the projector in modules_to_save")
    refuse(model.config.to_dict(), name, "cannot have the norm")
    if model.config.model_type == "molmo2":
        raise ValueError(f"{name}: it adds a visual token to the embedding of its placeholder, so none has one norm")
    if not (named or hasattr(model.config, "vision_config")):
        raise ValueError(f"{name}: a language model without a vision encoder has no projector")


def _deepstack(model: PreTrainedModel, name: str) -> list[str]:
    paths = [path for path, _ in model.named_modules() if path.split(".")[-2:-1] == [DEEPSTACK]]
    if not paths:
        raise ValueError(f"{name}: deepstack=True, but it has no {DEEPSTACK}")
    return paths


def _insert(model: PreTrainedModel, record: dict[str, Any]) -> None:
    """Puts the norms of `record` in their places, and `record` into the config."""
    embedding = text_embedding(model).get_parameter("weight")
    for path in record["projectors"]:
        projector = model.get_submodule(path)
        fields: Any = SimpleNamespace(**record)
        norm = build_projector_norm(fields)
        assert norm is not None  # `attach` refuses `none`
        like = next((weight for weight in projector.parameters() if weight.is_floating_point()), embedding)
        child = Blend(norm, record["retrofit"]) if record["retrofit"] else norm
        projector.add_module(CHILD, child.to(like.device, like.dtype).train(projector.training))
        projector.register_forward_hook(_end_with_norm, with_kwargs=True)
    setattr(model.config, RECORD, record)


def _keep_names(model: PreTrainedModel) -> None:
    """Has `save_pretrained` write the model's own names.

    It writes many families' published ones instead, and no trainer that resumes by `load_state_dict` finds those.
    """
    own = vars(model)
    own[_BEFORE], own[_CONVERSIONS] = own.get(_CONVERSIONS), []


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


def _activations(config: PretrainedConfig) -> list[tuple[PretrainedConfig, str]]:
    """The fields that name the LLM's activation, or else that of another part."""
    parts = [config.get_text_config(), config]
    parts += [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    for part in parts:
        named = {field: value for field, value in vars(part).items() if "act" in field and isinstance(value, str)}
        if fields := [field for field, value in named.items() if value in ACT2FN]:
            return [(part, field) for field in fields]
    return []


def _unguard(config: PretrainedConfig) -> None:
    """Takes out of `config` what `attach` wrote."""
    delattr(config, RECORD)
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        for field, value in list(vars(part).items()):
            if isinstance(value, str) and value.endswith(NEEDS_ATTACH):
                setattr(part, field, value.removesuffix(NEEDS_ATTACH))


def _rename(model: PreTrainedModel, name: str) -> None:
    model.name_or_path = model.config.name_or_path = name
