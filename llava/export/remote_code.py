"""The file of code that an exported folder brings where no class of transformers computes the same.

It needs transformers alone: it is `modeling_llava_norm.py` with the norm's classes in place of their import.
"""

import inspect

from llava.export import modeling_llava_norm
from llava.model.multimodal_projector.norm import EPS, MIN_GAIN, NORM_TYPES, ProjectorNorm, ScaleGradient

NAME = modeling_llava_norm.__name__.rpartition(".")[2]
AUTO_MAP = {
    "AutoConfig": f"{NAME}.LlavaNormConfig",
    "AutoModel": f"{NAME}.LlavaNormModel",
    "AutoModelForImageTextToText": f"{NAME}.LlavaNormForConditionalGeneration",
    # Programs that ask for a causal LM alone, such as LLaMA-Factory, find the same class.
    "AutoModelForCausalLM": f"{NAME}.LlavaNormForConditionalGeneration",
}
"""Which class each of transformers' Auto classes takes from the folder, for `config.json`."""
_IMPORT = "from llava.model.multimodal_projector.norm import EPS, MIN_GAIN, NORM_TYPES, ProjectorNorm\n"


def code() -> str:
    """The text of the file."""
    own = ProjectorNorm.__module__  # norms of other modules are plug-ins', which `exportable_config` has refused
    arms = {name: arm for name, arm in NORM_TYPES.items() if arm is None or arm.__module__ == own}
    classes = dict.fromkeys(
        cls for arm in arms.values() if arm for cls in reversed(arm.__mro__) if issubclass(cls, ProjectorNorm)
    )
    table = [f'    "{name}": {arm and arm.__name__},' for name, arm in arms.items()]
    pieces = [f"EPS = {EPS!r}\nMIN_GAIN = {MIN_GAIN!r}"]
    pieces += [inspect.getsource(cls).rstrip() for cls in (ScaleGradient, *classes)]
    pieces.append("\n".join(["NORM_TYPES = {", *table, "}"]))
    before, _, after = inspect.getsource(modeling_llava_norm).partition(_IMPORT)
    return before.replace("\nfrom itertools", "\nimport math\nfrom itertools", 1) + "\n\n\n".join(pieces) + "\n" + after
