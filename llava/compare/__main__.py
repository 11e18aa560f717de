"""`python -m llava.compare`: see `llava.experiment.commands`."""

import sys

from llava.experiment.commands import main

if __name__ == "__main__":
    sys.exit(main())
