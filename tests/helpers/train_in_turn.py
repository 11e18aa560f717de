"""Trains several runs one after the other in one process group: starting takes longer than a tiny model's three steps.

Every rank calls `python train_in_turn.py RUNS`, a JSON file with the flags of each run. Each final folder gets a
`greedy_tokens.json`, what the trained model said in training's own precision and partitioning, and its `buffers.pt`.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from training import greedy_tokens
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from llava.model.zero3 import is_partitioned
from llava.train.llava_trainer import LLaVATrainer
from llava.train.train import train


def refuse_moves() -> None:
    """Makes moving what ZeRO-3 has placed an error: nothing would bring its buffers back to the GPU."""

    def refusing(name, move):
        def checked(module, *args, **kwargs):
            device = torch._C._nn._parse_to(*args, **kwargs)[0] if name == "to" else name
            if device is not None and is_partitioned(module):
                raise AssertionError(f"{type(module).__name__}, which ZeRO-3 has placed, is moved to {device}")
            return move(module, *args, **kwargs)

        return checked

    for name in ("to", "cuda", "cpu"):
        setattr(nn.Module, name, refusing(name, getattr(nn.Module, name)))


def generate_before_the_final_folder() -> None:
    save_final = LLaVATrainer.save_final

    def generate_and_save(trainer):
        tokens = greedy_tokens(trainer.model)
        save_final(trainer)
        if trainer.args.should_save:
            Path(trainer.args.output_dir, "greedy_tokens.json").write_text(json.dumps(tokens))
            torch.save(dict(trainer.model.named_buffers()), Path(trainer.args.output_dir, "buffers.pt"))

    LLaVATrainer.save_final = generate_and_save


def main() -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    get_accelerator().is_fp16_supported = lambda: True  # every CPU computes it, if slowly
    destroy = torch.distributed.destroy_process_group
    # The ranks' own group stays: a second one would find the first one's store.
    torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    refuse_moves()
    generate_before_the_final_folder()
    for argv in json.loads(Path(sys.argv[1]).read_text()):
        train(argv)
        unset_hf_deepspeed_config()
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # each run makes its own, as the first of a process does


if __name__ == "__main__":
    main()
