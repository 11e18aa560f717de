"""The entry that LLaVA's scripts call: training with FlashAttention 2 where it is installed."""

import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a start whose imports are not done yet, without a word

    from transformers.utils import is_flash_attn_2_available

    from llava.train.train import main

    main(attn_implementation="flash_attention_2" if is_flash_attn_2_available() else None)
