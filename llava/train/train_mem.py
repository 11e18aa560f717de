"""The entry that LLaVA's scripts call: training with FlashAttention, 3 or else 2, where it is installed."""

import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a start whose imports are not done yet, without a word

    from llava.model.attention import installed_flash
    from llava.train.train import main

    main(attn_implementation=installed_flash())
