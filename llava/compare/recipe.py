"""A recipe from Python: the scripts' two stages as methods, and questions to what they trained.

    from llava import Recipe

    recipe = Recipe("demo", norm="gwc_layernorm").pretrain().finetune()
    print(recipe.ask("photo.jpg", "What is this?"))

A keyword is a variable of scripts/pretrain.sh and scripts/finetune.sh in lower case; a positional word is a flag of the
trainer. Both override the environment, as they do in a shell.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llava.launch.recipe import INTERPRETER, STAGES, resolved_run
from llava.launch.settings import NAMES, OF_ONE_STAGE, is_on
from llava.utils.names import nearest_name
from llava.utils.paths import CODE, ROOT, WORK
from llava.utils.plugins import load
from llava.utils.processes import start, wait

if TYPE_CHECKING:
    from PIL import Image

    from llava.asking import Assistant

Value = str | int | float | os.PathLike | None


class Recipe:
    """Both stages of a preset, as scripts/pretrain.sh and scripts/finetune.sh run them, and questions to the result.

    Args:
        preset: a file of scripts/presets; None is the scripts' default.
        variables: the scripts' variables in lower case, for both stages. None is an empty value.

    Raises:
        TypeError: an unknown variable, or a value that is not text, number, path or None.
        ValueError: `output_dir`, which belongs to a single stage; or the working directory lies in another clone than
            the package that runs.
    """

    def __init__(self, preset: str | None = None, **variables: Value):
        refuse_another_clone(Path.cwd())
        if "output_dir" in variables:
            folder = variables["output_dir"]
            raise ValueError(f"output_dir={folder}: both stages would write there; give it to pretrain() or finetune()")
        self.variables = environment_of(variables | ({"preset": preset} if preset else {}))
        self.adapter = ""  # of the stage 1 that this recipe ran, as PRETRAIN_ADAPTER
        self.checkpoint: Path | None = None  # folder of the stage that ran last
        self._assistant: Assistant | None = None

    def plan(self, stage: str, *flags: str, **variables: Value) -> dict[str, Any]:
        """What the stage would run, as `DRY_RUN=json bash scripts/<stage>.sh` prints it; starts nothing.

        Args:
            stage: `pretrain` or `finetune`.
            flags: the trainer's flags, as words after the script's name.
            variables: see `Recipe`; for this stage alone.

        Raises:
            TypeError: see `Recipe`.
            ValueError: no such stage, or the script refuses; the message is its own.
        """
        if stage not in STAGES:
            raise ValueError(f"stage {stage!r} is not one of: {', '.join(STAGES)}")
        return resolved_run(stage, *map(str, flags), **self._environment(stage, variables))

    def pretrain(self, *flags: str, **variables: Value) -> Self:
        """Runs stage 1 to its end, its output where this program's goes; returns this recipe. See `plan`.

        A stage that was interrupted resumes. Ctrl-C stops it after the current step, waits until it has saved, and
        raises KeyboardInterrupt; a second Ctrl-C ends it at once.

        Raises:
            RuntimeError: the run failed; what it printed says why.
        """
        self.adapter = f"{self._run('pretrain', flags, variables)}/mm_projector.bin"
        return self

    def finetune(self, *flags: str, **variables: Value) -> Self:
        """Runs stage 2 on what stage 1 trained; see `pretrain`."""
        self._run("finetune", flags, variables)
        return self

    def ask(self, picture: "str | Path | Image.Image", question: str, **options: Any) -> str:
        """The answer of the stage that ran last, or of this recipe's trained stage 2; it is loaded once.

        Args:
            picture: a path, an http(s) address or a picture.
            options: of `generate`, as `max_new_tokens` (512) and `temperature` (0: the likeliest token).

        Raises:
            FileNotFoundError: nothing has been trained.
            ValueError: the picture cannot be read, or the checkpoint cannot answer.
        """
        from llava.asking import load_assistant, load_picture  # takes seconds
        from llava.constants import DEFAULT_IMAGE_TOKEN
        from llava.model.decoding import evaluation_options

        if self._assistant is None:
            folder = self.checkpoint or (WORK / self.plan(STAGES[1])["flags"]["output_dir"]).resolve()
            if not folder.is_dir():
                raise FileNotFoundError(f"{folder}: nothing is trained there; call pretrain() and finetune() first")
            load(self._environment(STAGES[1], {}).get("PLUGINS", ""), "PLUGINS=")
            self._assistant = load_assistant(str(folder))
        if isinstance(picture, str | os.PathLike):
            picture = load_picture(os.fspath(picture), called="picture")
        turns = [{"from": "human", "value": f"{DEFAULT_IMAGE_TOKEN}\n{question}"}]
        options = evaluation_options(options.pop("max_new_tokens", 512), options.pop("temperature", 0.0)) | options
        return self._assistant.answer([turns], [picture], **options)[0]

    def _environment(self, stage: str, variables: dict[str, Value]) -> dict[str, str]:
        """The variables of a stage's script: the caller's environment, the recipe's, then those for this stage."""
        own = {"PRETRAIN_ADAPTER": self.adapter} if self.adapter and stage == STAGES[1] else {}
        return INTERPRETER | os.environ | own | self.variables | environment_of(variables)

    def _run(self, stage: str, flags: tuple[str, ...], variables: dict[str, Value]) -> str:
        """Runs a stage; returns its output folder as its flag names it."""
        if is_on(os.environ.get("DRY_RUN", "")):
            raise ValueError(f"DRY_RUN={os.environ['DRY_RUN']}: {OF_ONE_STAGE['DRY_RUN']}; leave the variable out")
        name = self.plan(stage, *flags, **variables)["flags"]["output_dir"]
        print(f"{stage}: the scripts of {ROOT}", flush=True)
        environment = {"PYTHONUNBUFFERED": "1", **self._environment(stage, variables)}
        self._assistant = None
        command = ["bash", str(ROOT / f"scripts/{stage}.sh"), *map(str, flags)]
        if code := wait(start(command, environment, cwd=Path.cwd())):
            raise RuntimeError(f"{stage} failed with status {code}; what it printed says why")
        self.checkpoint = (WORK / name).resolve()
        return name


def refuse_another_clone(folder: Path) -> None:
    """Raises ValueError where `folder` lies in a clone of this tree whose scripts are not those that would run."""
    clone = next((each for each in (folder, *folder.parents) if (each / "llava/compare/recipe.py").is_file()), CODE)
    if clone.resolve() != CODE:
        raise ValueError(
            f"{clone} is a clone of its own, but Python imports llava from {CODE}, whose scripts would run; "
            f"use {clone}/.venv/bin/python, or call from another folder"
        )


def environment_of(variables: dict[str, Value]) -> dict[str, str]:
    """Keywords as variables of the scripts.

    Raises:
        TypeError: see `Recipe`.
    """
    for name, value in variables.items():
        if name.upper() in OF_ONE_STAGE:
            raise TypeError(f"{name}: plan(stage) returns what would run, and a run trains; leave {name} out")
        if not name.islower() or name.upper() not in NAMES:
            near = nearest_name(name, NAMES)
            meant = f"did you mean {near.lower()}?" if near else "docs/variables.md lists them"
            raise TypeError(f"{name} is not a variable of the scripts; {meant}")
        if not isinstance(value, Value):
            raise TypeError(f"{name}={value!r}: expected text, a number, a path or None")
    return {name.upper(): "" if value is None else str(value) for name, value in variables.items()}
