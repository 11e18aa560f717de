"""Are these words flags of the trainer? `python -m llava.train.flag_check FLAGS` parses them and does nothing else.

Exit status 2 and one line where they are not. A dry run of the scripts asks here.
"""

import sys

from llava.model.multimodal_projector.norm import NORM_FIELDS, ProjectorNormArguments
from llava.train.flags import FlagParser


def main() -> int:
    """0, or 2 where a flag is wrong."""
    parser = FlagParser()
    found, _ = parser.parse_known_args(sys.argv[1:])
    try:
        ProjectorNormArguments(**{name: getattr(found, name) for name in NORM_FIELDS})
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
