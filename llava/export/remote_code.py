"""The code that an exported folder brings where no class of transformers computes the same.

It needs transformers alone. Its files are this tree's modules: the projector's classes, with the norm's copied into
their file, and for pictures in crops those that count and order visual tokens. They import each other as files of one
folder.
"""

import inspect
import re
from types import ModuleType

from transformers import PretrainedConfig, PreTrainedModel

from llava import anyres
from llava.export import modeling_llava_next_norm, modeling_llava_norm
from llava.export.modeling_llava_next_norm import (
    LlavaNextNormConfig,
    LlavaNextNormForConditionalGeneration,
    LlavaNextNormModel,
    LlavaNextNormProcessor,
)
from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration, LlavaNormModel
from llava.model import crops
from llava.model.hf_folder import NEXT_NORM, WITH_NORM
from llava.model.multimodal_projector.norm import EPS, MIN_GAIN, NORM_TYPES, ProjectorNorm, ScaleGradient

CLASSES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], type[PreTrainedModel]]] = {
    WITH_NORM: (LlavaNormConfig, LlavaNormModel, LlavaNormForConditionalGeneration),
    NEXT_NORM: (LlavaNextNormConfig, LlavaNextNormModel, LlavaNextNormForConditionalGeneration),
}
"""Config, model and model with head of each `model_type` that is no class of transformers."""
COPIED = (modeling_llava_next_norm, anyres, crops)
"""Modules of a folder of `llava_next_norm`, besides the projector's."""
_LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"
_IMPORT = "from llava.model.multimodal_projector.norm import EPS, MIN_GAIN, NORM_TYPES, ProjectorNorm\n"


def auto_map(model_type: str) -> dict[str, str]:
    """Which class each of transformers' Auto classes takes from the folder, for `config.json`."""
    config, model, with_head = CLASSES[model_type]
    classes = {"AutoConfig": config, "AutoModel": model}
    # Programs that ask for a causal LM alone, such as LLaMA-Factory, find the same class.
    classes |= dict.fromkeys(("AutoModelForImageTextToText", "AutoModelForCausalLM"), with_head)
    return {auto: place(cls) for auto, cls in classes.items()}


def processor_class() -> dict[str, object]:
    """What names the processor of a folder of `llava_next_norm` that cuts pictures."""
    cls = LlavaNextNormProcessor
    return {"processor_class": cls.__name__, "auto_map": {"AutoProcessor": place(cls)}}


def place(cls: type) -> str:
    """File, without its ending, and name of a class in the folder."""
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def code_files(model_type: str) -> dict[str, str]:
    """Names and texts of the folder's files of code; none for a class of transformers."""
    files = {} if model_type not in CLASSES else {file_of(modeling_llava_norm): with_norms(modeling_llava_norm)}
    return files | ({file_of(module): copied(module) for module in COPIED} if model_type == NEXT_NORM else {})


def file_of(module: ModuleType) -> str:
    return f"{module.__name__.rpartition('.')[2]}.py"


def copied(module: ModuleType) -> str:
    """The module's text, with imports of this tree from files beside it."""
    text = re.sub(r"^from llava\.(?:\w+\.)*(\w+) import", r"from .\1 import", inspect.getsource(module), flags=re.M)
    return _LICENSE + text.removeprefix(_LICENSE)


def with_norms(module: ModuleType) -> str:
    """The text of the projector's module, with the norm's classes in place of their import."""
    own = ProjectorNorm.__module__  # `refuse_plugins` has refused the norms of other modules
    arms = {name: arm for name, arm in NORM_TYPES.items() if arm is None or arm.__module__ == own}
    classes = dict.fromkeys(
        cls for arm in arms.values() if arm for cls in reversed(arm.__mro__) if issubclass(cls, ProjectorNorm)
    )
    table = [f'    "{name}": {arm and arm.__name__},' for name, arm in arms.items()]
    pieces = [f"EPS = {EPS!r}\nMIN_GAIN = {MIN_GAIN!r}"]
    pieces += [inspect.getsource(cls).rstrip() for cls in (ScaleGradient, *classes)]
    pieces.append("\n".join(["NORM_TYPES = {", *table, "}"]))
    before, _, after = inspect.getsource(module).partition(_IMPORT)
    return before.replace("\nfrom itertools", "\nimport math\nfrom itertools", 1) + "\n\n\n".join(pieces) + "\n" + after
