"""The entry that LLaVA's scripts call: training with the fastest FlashAttention that is installed."""

import os
import signal
import sys

if __name__ == "__main__":
    # Python looks first in a script's own folder, where transformers would take kernels.py for the package `kernels`.
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != os.path.dirname(os.path.realpath(__file__))]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

    from llava.model.attention import installed_flash
    from llava.train.train import main

    main(attn_implementation=installed_flash())
