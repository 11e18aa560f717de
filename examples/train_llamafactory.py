"""LLaMA-Factory's `train` command with a norm behind the projector of the model that it loads.

  NORM=gwc_layernorm python examples/train_llamafactory.py settings.yaml

`settings.yaml` is LLaMA-Factory's own. `INIT` is that of llava.attach.attach. With LoRA, train and save the
projector too: `additional_target: ` and the name of its module.
"""

import os

from llamafactory.model import loader
from llamafactory.train.tuner import run_exp
from transformers import AutoModelForImageTextToText

from llava.attach import attach


class WithNorm(AutoModelForImageTextToText):
    """The class by which LLaMA-Factory loads models that take pictures, a reference model too."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        model = AutoModelForImageTextToText.from_pretrained(*args, **kwargs)
        settings = os.environ.get("NORM", "gwc_layernorm"), os.environ.get("INIT", "text_norm")
        return attach(model, *settings)


loader.AutoModelForImageTextToText = WithNorm

if __name__ == "__main__":
    run_exp()
