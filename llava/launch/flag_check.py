"""Finds misspelt flags, templates and arms, by this tree's sources and by the trainer's own parser where it can run."""

import ast
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from llava.anyres import check_grids_given, check_modes
from llava.conversation import conv_templates
from llava.launch.plan import ADDED, Plan
from llava.launch.settings import Refusal
from llava.utils.names import nearest_name
from llava.utils.paths import CODE, ROOT

_ARGUMENTS = CODE / "llava/train/arguments.py"
_NORMS = CODE / "llava/model/multimodal_projector/norm.py"
NORM_TABLE = "NORM_TYPES"


def check_sources(plan: Plan) -> list[str]:
    """Checks the flags by this tree's own sources; returns the flags that only the trainer's libraries may know.

    Raises:
        Refusal: there is no such arm or template, or a flag is one of ours misspelt or cut short.
    """
    values = plan.flags.values()
    for flag, variable, allowed in (
        ("mm_projector_norm", "NORM", arms()),
        ("version", "PROMPT_VERSION", conv_templates),
    ):
        if flag in values and values[flag] not in allowed:
            raise Refusal(f"{variable}={values[flag]} is not one of: {' '.join(allowed)}")
    try:
        check_modes(values.get("image_aspect_ratio"), values.get("mm_patch_merge_type", "flat"))
        check_grids_given(values.get("image_aspect_ratio"), values.get("image_grid_pinpoints"))
    except ValueError as error:
        raise Refusal(str(error)) from error
    known = own_flags() | flags_of_scripts()
    strange = [name for name in values if name not in known and name.removeprefix("no_") not in known]
    for name in strange:
        longer = [other for other in sorted(known) if other.startswith(name)]
        if meant := (longer[0] if longer else nearest_name(name, known)):
            raise Refusal(f"--{name} is not a flag of the trainer; did you mean --{meant}?")
    return strange


@cache
def own_flags() -> frozenset[str]:
    """The fields of the trainer's dataclasses that stand in this tree; those of its libraries are not among them."""
    sources = [ast.parse(file.read_text()).body for file in (_ARGUMENTS, _NORMS)]
    classes = [node for body in sources for node in body if isinstance(node, ast.ClassDef)]
    classes = [node for node in classes if node.name.endswith("Arguments")]
    fields = [field.target for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


@cache
def flags_of_scripts() -> frozenset[str]:
    """The flags that the scripts pass, some of them of the trainer's libraries, and those that the launcher adds."""
    texts = ((ROOT / f"scripts/{name}.sh").read_text() for name in ("pretrain", "finetune", "lib"))
    return frozenset(ADDED).union(*(re.findall(r"^ +--(\w+) ", text, re.MULTILINE) for text in texts))


@cache
def arms() -> tuple[str, ...]:
    """The norms by name: the keys of their table, read without importing torch."""
    for node in ast.parse(_NORMS.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        table = getattr(node, "value", None)
        if any(isinstance(target, ast.Name) and target.id == NORM_TABLE for target in targets):
            assert isinstance(table, ast.Dict)
            return tuple(ast.literal_eval(key) for key in table.keys if key is not None)
    raise LookupError(f"{_NORMS}: expected a table {NORM_TABLE}")


def check_by_trainer(python: str, words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Lets the trainer's own parser read `words`; False where its environment is not installed.

    Raises:
        Refusal: the parser rejects them; the message is its own.
    """
    if not Path(python).exists():
        return False
    quiet = {**environment, "PYTHONPATH": f"{CODE}:{environment.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-m", "llava.train.flags", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode == 2:
        raise Refusal(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    return done.returncode == 0
