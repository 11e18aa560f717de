"""Are these words flags of the trainer? `python -m llava.train.flag_check FLAGS` parses them and does nothing else.

Exit status 2 and one line where they are not. A dry run of the scripts asks here.
"""

import difflib
import sys

import torch
from transformers import HfArgumentParser

from llava.model.multimodal_projector.norm import resolve_target_norm
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments


def check(words: list[str]) -> None:
    """Raises ValueError that names the flag at fault."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    parser.error = refuse
    values, unknown = parser.parse_known_args(words)
    for word in unknown:
        near = difflib.get_close_matches(word.split("=")[0], parser._option_string_actions, 1)
        raise ValueError(f"{word} is not a flag of the trainer" + (f"; did you mean {near[0]}?" if near else ""))
    resolve_target_norm(values.mm_projector_norm_init, torch.ones(1, 1))


def main() -> int:
    """0, or 2 where a flag is wrong."""
    try:
        check(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
