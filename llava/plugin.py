"""What the file of `--plugin` calls to add its parts; every function raises ValueError where the name exists."""

from collections.abc import Callable

from torch import nn

from llava.model.language_model import families
from llava.model.multimodal_encoder.towers import TOWERS, VisionTower
from llava.model.multimodal_projector.builder import PROJECTOR_TYPES, ProjectorType
from llava.model.multimodal_projector.norm import NORM_TYPES, ProjectorNorm
from llava.utils.plugins import load, registered  # noqa: F401 (for users)


def _add(kind: str, table: dict, name: str, entry: object) -> None:
    if name in table:
        raise ValueError(f"the {kind} {name!r} exists already; take another name")
    table[name] = entry
    registered.add(f"{kind} {name}")


def register_norm(name: str, norm: type[ProjectorNorm]) -> None:
    """Adds a value of `--mm_projector_norm`; raises ValueError if it is not a `ProjectorNorm`."""
    if not (isinstance(norm, type) and issubclass(norm, ProjectorNorm)):
        raise ValueError(f"register_norm({name!r}): expected a subclass of ProjectorNorm, found {norm!r}")
    _add("norm", NORM_TYPES, name, norm)


def register_projector(name: str, build: Callable[[int, int, int], nn.Module], merge: int = 1) -> None:
    """Adds a value of `--mm_projector_type`, in which N stands for a number from 1; the norm comes after it.

    `build` makes of E, D and that number (0 without N) a module from [N, V, E] to [N, V / merge ** 2, D].
    """
    _add("projector", PROJECTOR_TYPES, name, ProjectorType(build, merge))


def register_tower(tower: type[VisionTower]) -> None:
    """Adds a kind of vision tower, by the `model_type` of its `config_class`, which `AutoConfig` must know."""
    _add("tower", TOWERS, tower.config_class.model_type, tower)


def register_family(family: families.Decoder) -> None:
    """Adds a family of decoders; CONTRIBUTING.md says what a decoder must be like."""
    if family.config.model_type in families.MODEL_CLASSES:
        raise ValueError(f"the decoder {family.config.model_type!r} exists already")
    classes = families.llava_classes(family)
    _add("decoder", families.LLAVA_CLASSES, family.model_type, classes)
    vars(families).update({cls.__name__: cls for cls in classes})  # pickle finds classes by name
    families.MODEL_CLASSES.update(dict.fromkeys((family.model_type, family.config.model_type), classes.causal_lm))
    families.DECODERS.append(family)
