"""`python -m llava.compare`: see `llava.compare.commands`."""

import sys

from llava.compare.commands import main

if __name__ == "__main__":
    sys.exit(main())
