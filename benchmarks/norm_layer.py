"""Time of the norm layer alone, and its share of a training step.

The share is the time of the layer's forward and backward pass over that of projector, norm and decoder together, on the
same tokens. Tower, loss and optimizer are left out, so the real share is smaller.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import add_output_dir, write_result
from benchmarks.shapes import PRESETS, build_llava, projector_for
from llava.model.multimodal_projector.norm import projector_norm
from llava.utils.commands import Parser

TEXT = {"demo": 24, "llama-3.2-3b": 300}  # tokens beside a picture
NORM, SAMPLES, REPEATS = "gwc_layernorm", 16, 10  # samples: images in the micro-batch


def main() -> None:
    parser = Parser(description=__doc__)
    add_output_dir(parser)
    args, gpu = parser.parse_args(), torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    shapes = "llama-3.2-3b" if gpu else "demo"
    model = build_llava(PRESETS[shapes], device, dtype)
    decoder, tower = model.get_model(), model.get_vision_tower()
    decoder.requires_grad_(False)

    def random_tensor(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(SAMPLES, tokens, width, device=device, dtype=dtype)

    features = random_tensor(tower.num_tokens, model.config.mm_hidden_size)
    words = random_tensor(TEXT[shapes], model.config.hidden_size)
    tokens = random_tensor(tower.num_tokens, model.config.hidden_size)
    projector = projector_for(model, NORM, device, dtype)

    def alone(layer: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return seconds(lambda: layer(tokens.clone().requires_grad_()).sum().backward(), device)

    def step() -> None:
        embeddings = torch.cat([projector(features), words], dim=1)
        decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state.sum().backward()

    arms = {"layer": lambda: alone(projector_norm(projector)), "copy": lambda: alone(lambda x: x)}
    arms["step"] = lambda: seconds(step, device)
    rounds = [{name: run() for name, run in arms.items()} for _ in range(2 + REPEATS)][2:]  # in turns, after a warm-up
    times = {name: statistics.median(values[name] for values in rounds) for name in arms}
    own, step_time = times["layer"] - times["copy"], times["step"]
    row: dict[str, Any] = {"shapes": shapes, "norm": NORM, "layer_ms": own * 1e3, "step_ms": step_time * 1e3}
    row["share_of_step"] = own / step_time
    print(row)
    meta = {"samples": SAMPLES, "visual_tokens": tower.num_tokens, "text_tokens": TEXT[shapes]}
    meta |= {"dtype": str(dtype), "repeats": REPEATS}
    print(write_result("norm_layer", [row], folder=args.output_dir, **meta))


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """How long `function` takes, its work on the device included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
