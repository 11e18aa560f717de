"""The rotary frequencies that training builds: `python rotary_under_zero.py RUNS`, a JSON file with each run's flags.

Each output folder gets a `rotary.pt`: the frequencies before training, and those of the last run after training.
"""

import json
import sys
from pathlib import Path

import torch
from training import rotary_frequencies
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from llava.train import train as train_module
from llava.train.llava_trainer import LLaVATrainer


def save(model: torch.nn.Module, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(rotary_frequencies(model), Path(folder, "rotary.pt"))


def main() -> None:
    LLaVATrainer.save_final = lambda trainer: save(trainer.model, trainer.args.output_dir)
    *built, trained = json.loads(Path(sys.argv[1]).read_text())
    for argv in built:
        parsed = train_module.parse_arguments(argv)
        save(train_module.build_model(*parsed), parsed[2].output_dir)
        unset_hf_deepspeed_config()
    train_module.train(trained)


if __name__ == "__main__":
    main()
