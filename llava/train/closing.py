"""The last lines of a finished run: where the model is, and the next commands."""

import logging
import os
import shlex
from pathlib import Path

from llava.mm_utils import from_anywhere
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.train.arguments import DataArguments, ModelArguments
from llava.utils.paths import WORK

logger = logging.getLogger(__name__)


def print_next_steps(
    model_args: ModelArguments, data_args: DataArguments, output_dir: str, adapter_only: bool, lora: bool
) -> None:
    """Logs `closing_lines`, on the rank that logs."""
    for line in closing_lines(model_args, data_args, output_dir, adapter_only, lora):
        logger.info(line)


def closing_lines(
    model_args: ModelArguments, data_args: DataArguments, output_dir: str, adapter_only: bool, lora: bool
) -> list[str]:
    """The lines that name the model and the next steps, with paths that are valid from anywhere.

    Args:
        model_args, data_args: the run's flags.
        output_dir: the final folder.
        adapter_only: only projector and norm were trained (stage 1).
        lora: the folder holds adapters, which need their base.
    """
    folder = Path(output_dir).absolute()
    path = shlex.quote(str(folder))
    if adapter_only:
        if "PRESET" in os.environ:  # set by scripts/pretrain.sh
            settings = {"PRESET": os.environ["PRESET"]}
        else:
            paths = {"MODEL_PATH": model_args.model_name_or_path, "VISION_TOWER": model_args.vision_tower}
            settings = {name: from_anywhere(value) for name, value in paths.items() if value}
        settings |= {"NORM": model_args.mm_projector_norm, "PRETRAIN_ADAPTER": str(folder / ADAPTER_FILE)}
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        return [
            f"stage 1 is done, projector and norm are in {folder / ADAPTER_FILE}",
            f"next, stage 2, with your other settings: {words} bash scripts/finetune.sh",
        ]
    chat = f"python -m llava.serve.cli --model-path {path} --image-file PICTURE"
    if lora:
        merge = f"python -m llava.model.merge_lora --model-path {path} --save-model-path {path}-merged"
        return [f"the adapters are in {folder}; to talk to the model: {chat}", f"next, merged with its base: {merge}"]
    score = f"bash scripts/evaluate.sh {path}" if is_recipes(data_args.data_path) else score_command(path, data_args)
    return [f"the model is in {folder}; to talk to it: {chat}", f"next, its scores: {score}"]


def is_recipes(data_path: str | None) -> bool:
    """Whether the training data are those that the recipes prepare, and not the user's own."""
    prepared = WORK / "playground/data"
    return all(Path(part.strip()).absolute().is_relative_to(prepared) for part in (data_path or "").split(","))


def score_command(path: str, data_args: DataArguments) -> str:
    """The command that asks the user's held-out questions and scores the answers."""
    images = data_args.eval_image_folder or data_args.image_folder
    words = ["--data", from_anywhere(data_args.eval_data_path or "QUESTIONS")]
    words += ["--image-folder", from_anywhere(images or "IMAGES")]
    answer = f"python -m llava.eval.answer --model-path {path} {shlex.join(words)} --output answers.jsonl"
    return f"{answer} && python -m llava.eval.score answers.jsonl"
