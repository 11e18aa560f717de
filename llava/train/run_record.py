"""The two files that say what a run is: `resume.json` of its folder and checkpoints, and `run.json`.

`run.json` is written before the first step: `{"format": 1, "starts": [{"configuration": {...}, "provenance": {...}},
...]}`, with one start, and one more for each time the run was continued from a checkpoint. `configuration` comes from
`llava.train.run_identity`; `provenance` says when, where, on which processor and by which command, how held-out
questions are answered, and which settings of the base's generation_config.json the run does not use.
"""

import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TypedDict

from llava.data.dataset import LazySupervisedDataset
from llava.model.decoding import GREEDY
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.run_identity import Settings, run_configuration
from llava.utils.files import write_json, write_text
from llava.utils.machine import machine
from llava.utils.provenance import RUN_FILE, RUN_FORMAT, read_starts

IDENTITY = "resume.json"


class Identity(TypedDict):
    """The content of `resume.json`."""

    settings: Settings
    step_size: int  # samples of an optimizer step over all ranks
    num_samples: int  # of an epoch


def write_identity(folder: Path, settings: Settings, step_size: int, num_samples: int) -> None:
    """Writes `resume.json` of a checkpoint or of the output folder.

    Args:
        folder: the checkpoint or output folder.
        settings: the run's identity.
        step_size: samples of an optimizer step over all ranks.
        num_samples: samples of an epoch.
    """
    content: Identity = {"settings": settings, "step_size": step_size, "num_samples": num_samples}
    write_json(folder / IDENTITY, content, synced=True)


def write_run_record(
    model: LlavaMetaForCausalLM,
    dataset: LazySupervisedDataset,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    identity: Settings,
    resumed: bool,
) -> None:
    """Writes `run.json`, or adds a start to it if the run is `resumed`. Every rank must call; one writes."""
    configuration = run_configuration(model, dataset, model_args, data_args, training_args, identity)
    if training_args.process_index == 0:
        path = Path(training_args.output_dir, RUN_FILE)
        starts = read_starts(path) if resumed and path.exists() else []
        started = {"base_generation_config": dict(model.file_decoding), "heldout_decoding": GREEDY}
        starts.append({"configuration": configuration, "provenance": provenance() | started})
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": RUN_FORMAT, "starts": starts}, indent=1, default=str)
        write_text(path, text + "\n", synced=True)


def provenance() -> dict[str, str]:
    """When, where, on which processor and by which command this process runs."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = shlex.join([sys.executable, *sys.argv])
    return {"started": now, "command": command, "folder": os.getcwd(), "machine": machine()}
