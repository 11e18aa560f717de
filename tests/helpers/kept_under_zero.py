"""What a decoder layer keeps under ZeRO-3: `python kept_under_zero.py TINY`, the folder of the fixture `tiny`.

Prints a line `KEPT {...}`: for each case the bytes that autograd keeps with DeepSpeed's own linear layers and with
ours, the estimate, and whether both give the same gradients.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from activations import kept_by_one_layer
from tiny_models import STAGE_1, STAGE_2, make

from llava.model.attention import SEGMENTS
from llava.model.lora import add_lora
from llava.model.zero3 import gathered
from llava.train.distributed import use_gloo_backend
from llava.train.memory import estimate_memory
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, set_trainable
from llava.train.zero import fit_zero

TOKENS = 64
CASES = {"stage 1": STAGE_1, "stage 2": STAGE_2, "lora": frozenset({ADAPTER, LANGUAGE_MODEL})}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def built(tiny: Path, case: str) -> torch.nn.Module:
    """The model, partitioned, with an attention that runs on a CPU."""
    model = make(tiny).train()
    if case == "lora":
        add_lora(model, r=4, alpha=8, dropout=0.1, dtype=torch.float32)
    set_trainable(model, CASES[case])
    model.config._attn_implementation = SEGMENTS
    deepspeed.zero.Init(module=model, config_dict_or_path=CONFIG)
    return model


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients of the first layer's input and of its trained weights."""
    torch.manual_seed(0)
    decoder = model.get_model()
    hidden = torch.randn(1, TOKENS, decoder.config.hidden_size, requires_grad=True)
    embeddings = decoder.rotary_emb(hidden, torch.arange(TOKENS)[None])
    layer = decoder.layers[0]
    layer(hidden, position_embeddings=embeddings, attention_mask=None).square().sum().backward()
    weights = [p for p in layer.parameters() if p.requires_grad]
    return [hidden.grad, *(p.grad.clone() for p in weights)]


def measured(model: torch.nn.Module) -> tuple[int, list[torch.Tensor]]:
    with gathered(list(model.parameters())):
        return kept_by_one_layer(model, TOKENS, False), gradients(model)


def main() -> None:
    use_gloo_backend()
    deepspeed.init_distributed("gloo")
    arguments = SimpleNamespace(deepspeed="zero.json", hf_deepspeed_config=SimpleNamespace(config=CONFIG), world_size=1)
    vars(arguments).update(optim="adamw_torch", bf16=False, fp16=False, use_liger_kernel=False)
    arguments.device = torch.device("cpu")
    tiny = Path(sys.argv[1])
    plain = {case: measured(built(tiny, case)) for case in CASES}
    result = {}
    for case, (bytes_before, before) in plain.items():
        model = built(tiny, case)
        fit_zero(model, arguments)
        bytes_kept, after = measured(model)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        estimate = estimate_memory(model, arguments, TOKENS).layer
        result[case] = {"deepspeed": bytes_before, "ours": bytes_kept, "estimate": estimate, "same": same}
    print("KEPT", json.dumps(result))


if __name__ == "__main__":
    main()
