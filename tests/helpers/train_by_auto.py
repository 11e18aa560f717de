"""Trains runs in turn, each with its own usable memory: `python train_by_auto.py RUNS BYTES`.

RUNS is as for `train_in_turn`, and BYTES a JSON list of what each rank may take in each run. Every rank raises
AssertionError where ranks choose different flags; they would hang in training.
"""

import json
import os
import sys

import train_in_turn
from accelerate.utils import gather_object

from llava.train import memory
from llava.train import train as train_module


def resolve_alike(argv: list[str], usable: list[list[float]]) -> list[str]:
    of_ranks, budget = usable.pop(0), memory.memory_budget
    memory.memory_budget = lambda device, parameters: of_ranks[int(os.environ["RANK"])]
    flags = gather_object([memory.resolve_auto(argv)])
    memory.memory_budget = budget  # what the machine has decides on recomputation
    assert all(words == flags[0] for words in flags), f"the ranks choose {[words[-1] for words in flags]}"
    return flags[0]


def main() -> None:
    usable = json.loads(sys.argv.pop())
    train_module.resolve_auto = lambda argv: resolve_alike(argv, usable)
    train_in_turn.main()


if __name__ == "__main__":
    main()
