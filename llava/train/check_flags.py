"""Checks the trainer's flags as a dry run does: `python -m llava.train.check_flags FLAGS`; starts nothing.

What needs a model or a device is not checked.
"""

import dataclasses
import sys

if __name__ == "__main__":
    # With the Trainer's flags Transformers imports peft where it can, and peft every model class: most of the time.
    sys.modules["peft"] = None  # pyrefly: ignore[unsupported-operation]

from llava.anyres import check_modes
from llava.conversation import get_template
from llava.eval.tasks import choose_limited
from llava.train.arguments import DataArguments, ModelArguments
from llava.train.flags import FlagParser


def main() -> int:
    """Returns 0, or ends the process with status 2 and one line if a flag is wrong."""
    parser = FlagParser()
    parsed, _ = parser.parse_known_args(sys.argv[1:])
    try:
        get_template(parsed.version)
        for part in (ModelArguments, DataArguments):
            part(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(part)})
        check_modes(parsed.image_aspect_ratio, parsed.mm_patch_merge_type)
        if parsed.eval_tasks:
            choose_limited(parsed.eval_tasks, "--eval_tasks")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
