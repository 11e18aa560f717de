"""Trains runs in turn, each with its own usable memory: `python train_by_auto.py RUNS BYTES`.

RUNS is as for `train_in_turn`, and BYTES a JSON list of what the ranks may take in each run.
"""

import json
import sys

import train_in_turn

from llava.train import zero_choice


def main() -> None:
    usable = json.loads(sys.argv.pop())
    zero_choice.memory_budget = lambda device, parameters: usable.pop(0)
    train_in_turn.main()


if __name__ == "__main__":
    main()
