"""Your own parts without a fork: what a plug-in file calls, and `load`, which executes one.

    register_norm("half_rmsnorm", HalfNorm)     # a subclass of ProjectorNorm, such as AlignedRMSNorm

`--plugin my_parts.py` loads such a file before the flags are parsed, which may then name its parts. Every function
raises ValueError where the name exists.
"""

from collections.abc import Callable

import torch
from torch import nn

from llava.model.language_model import families
from llava.model.language_model.families import Family
from llava.model.multimodal_encoder.towers import TOWERS
from llava.model.multimodal_encoder.vision_tower import VisionTower
from llava.model.multimodal_projector.builder import PROJECTOR_TYPES, ProjectorType
from llava.model.multimodal_projector.norm import NORM_TYPES, ProjectorNorm
from llava.train.arguments import OPTIMIZERS, TrainingArguments
from llava.utils.plugins import claim, load

__all__ = ["load", "register_family", "register_norm", "register_optimizer", "register_projector", "register_tower"]


def register_norm(name: str, norm: type[ProjectorNorm]) -> None:
    """Adds a value of `--mm_projector_norm`; raises ValueError if it is no `ProjectorNorm`."""
    if not (isinstance(norm, type) and issubclass(norm, ProjectorNorm)):
        raise ValueError(f"register_norm({name!r}): expected a subclass of ProjectorNorm, found {norm!r}")
    claim("norm", NORM_TYPES, name, norm)


def register_projector(name: str, build: Callable[[int, int, int], nn.Module], merge: int = 1) -> None:
    """Adds a value of `--mm_projector_type`; the norm comes after it.

    Args:
        name: a capital N in it stands for a number from 1.
        build: gets E, D and that number (0 without N); gives a module from [N, V, E] to [N, V / merge ** 2, D]. A plain
            `nn.Sequential` keeps its parameter names.
        merge: side of the square of patches that becomes one visual token.
    """
    claim("projector", PROJECTOR_TYPES, name, ProjectorType(build, merge))


def register_tower(tower: type[VisionTower]) -> None:
    """Adds a kind of vision tower, by the `model_type` of its `config_class`, which `AutoConfig` must know."""
    claim("tower", TOWERS, tower.config_class.model_type, tower)


def register_family(family: Family) -> None:
    """Adds a family of decoders; CONTRIBUTING.md says what a decoder must be like."""
    if family.config.model_type in families.MODEL_CLASSES:
        raise ValueError(f"the decoder {family.config.model_type!r} exists already")
    made = families.llava_classes(family)
    claim("decoder", families.LLAVA_CLASSES, family.model_type, made)
    vars(families).update({cls.__name__: cls for cls in made})  # pickle finds classes by name
    families.MODEL_CLASSES.update(dict.fromkeys((family.model_type, family.config.model_type), made.causal_lm))
    families.FAMILIES.append(family)


def register_optimizer(name: str, build: Callable[[list[dict], TrainingArguments], torch.optim.Optimizer]) -> None:
    """Adds a value of `--optim`, which must not be one of the Hugging Face Trainer's.

    Args:
        name: the value.
        build: gets the parameter groups, each with `params`, `lr`, `weight_decay` and `name`, and the training
            arguments; gives the optimizer.
    """
    claim("optimizer", OPTIMIZERS, name, build)
