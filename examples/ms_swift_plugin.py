"""ms-swift's training with a norm behind the projector of every model that it loads.

  NORM=gwc_layernorm swift sft --external_plugins examples/ms_swift_plugin.py --model MODEL --dataset RECORDS.jsonl ...

`INIT` is that of llava.attach.attach. With LoRA, train and save the projector too: `--modules_to_save`, with the name
of its module.
"""

import functools
import os

from swift.model.register import ModelLoader

from llava.attach import attach

load = ModelLoader.get_model


@functools.wraps(load)
def load_with_norm(*args, **kwargs):
    settings = os.environ.get("NORM", "gwc_layernorm"), os.environ.get("INIT", "text_norm")
    return attach(load(*args, **kwargs), *settings)


ModelLoader.get_model = load_with_norm  # a reference model gets the norm too
