"""Time of the norm layer alone, and its share of a training step.

The share is the time of the layer's forward and backward pass over that of projector, norm and decoder together, on the
same tokens. Tower, loss and optimizer are left out, so the real share is smaller.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import add_result_flags, alternate, result_folder, spread, write_result
from benchmarks.shapes import PRESETS, build_llava, projector_for
from llava.model.multimodal_projector.norm import NORM_TYPES, projector_norm
from llava.utils.commands import Parser, whole

TEXT = {"demo": 24, "llama-3.2-3b": 300}  # tokens beside a picture
NORMS = [name for name, norm in NORM_TYPES.items() if norm]


def main() -> None:
    parser = Parser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--shapes", choices=TEXT, default="llama-3.2-3b" if gpu else "demo")
    parser.add_argument("--samples", type=whole(1), default=16, help="images in the micro-batch")
    parser.add_argument("--repeats", type=whole(1), default=10)
    add_result_flags(parser, quick="few repeats of few images")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.repeats = 4, 5
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    model = build_llava(PRESETS[args.shapes], device, dtype)
    decoder, tower = model.get_model(), model.get_vision_tower()
    decoder.requires_grad_(False)

    def random_tensor(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(args.samples, tokens, width, device=device, dtype=dtype)

    features = random_tensor(tower.num_tokens, model.config.mm_hidden_size)
    words = random_tensor(TEXT[args.shapes], model.config.hidden_size)
    tokens = random_tensor(tower.num_tokens, model.config.hidden_size)
    projectors = {norm: projector_for(model, norm, device, dtype) for norm in NORMS}

    def alone(layer: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return seconds(lambda: layer(tokens.clone().requires_grad_()).sum().backward(), device)

    def step() -> None:
        embeddings = torch.cat([projectors["gwc_layernorm"](features), words], dim=1)
        decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state.sum().backward()

    layers = {norm: projector_norm(projectors[norm]) for norm in NORMS}
    arms = {name: lambda layer=layer: alone(layer) for name, layer in layers.items()}
    arms["copy"] = lambda: alone(lambda x: x)
    times = {name: spread(values)["median"] for name, values in alternate(arms, args.repeats, warmup=2).items()}
    steps = alternate({"step": lambda: seconds(step, device)}, max(3, args.repeats // 3), warmup=1)["step"]
    step_time = spread(steps)["median"]
    rows: list[dict[str, Any]] = []
    for norm in NORMS:
        own = times[norm] - times["copy"]
        row = {"shapes": args.shapes, "norm": norm, "layer_ms": own * 1e3, "step_ms": step_time * 1e3}
        rows.append(row | {"share_of_step": own / step_time})
        print("{norm:14} {layer_ms:8.3f} ms of {step_ms:9.1f} ms: {share_of_step:.3%}".format(**rows[-1]))
    meta = {"samples": args.samples, "visual_tokens": tower.num_tokens, "text_tokens": TEXT[args.shapes]}
    meta |= {"dtype": str(dtype), "repeats": args.repeats}
    print(write_result("norm_layer", rows, folder=result_folder(args), **meta))


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
