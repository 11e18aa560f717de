"""The entry that LLaVA's scripts call: training with FlashAttention 2 where it is installed."""

from transformers.utils import is_flash_attn_2_available

from llava.train.train import train

if __name__ == "__main__":
    train(attn_implementation="flash_attention_2" if is_flash_attn_2_available() else None)
