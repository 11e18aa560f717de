"""Time and memory of the norm layer alone, and its share of a training step.

The share is the time of the layer's forward and backward pass over that of projector, norm and decoder together, on the
same tokens. Tower, loss and optimizer are left out, so the real share is smaller.
"""

import time

import torch
from transformers import LlamaConfig

from benchmarks.common import add_result_flags, alternate, result_folder, spread, write_result
from llava.model import LlavaLlamaConfig, LlavaLlamaForCausalLM
from llava.model.multimodal_projector.builder import build_vision_projector
from llava.model.multimodal_projector.norm import NORM_TYPES, projector_norm
from llava.utils.commands import Parser, whole

SHAPES = {
    # name: (D, intermediate, layers, heads, key/value heads, E, visual tokens, text tokens)
    "demo": (576, 1536, 30, 9, 3, 192, 16, 24),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 1152, 729, 300),
}
NORMS = [name for name, norm in NORM_TYPES.items() if norm]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--shapes", choices=SHAPES, default="llama-3.2-3b" if torch.cuda.is_available() else "demo")
    parser.add_argument("--samples", type=whole(1), default=16, help="images in the micro-batch")
    parser.add_argument("--repeats", type=whole(1), default=10)
    parser.add_argument("--suffix", default="", help="suffix of the result file's name")
    add_result_flags(parser, quick="few repeats of few images")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.repeats = 4, 5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    d, inner, layers, heads, kv_heads, e, visual, text = SHAPES[args.shapes]
    torch.manual_seed(0)
    config = LlavaLlamaConfig(
        **LlamaConfig(
            hidden_size=d, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=1024,
        ).to_dict()
    )  # fmt: skip
    decoder = LlavaLlamaForCausalLM(config).to(device=device, dtype=dtype).train().get_model()
    decoder.requires_grad_(False)
    features = torch.randn(args.samples, visual, e, device=device, dtype=dtype)
    words = torch.randn(args.samples, text, d, device=device, dtype=dtype)

    projectors = {}
    for norm in NORMS:
        projector_config = LlavaLlamaConfig(**config.to_dict())
        fields = {"mm_projector_type": "mlp2x_gelu", "mm_hidden_size": e}
        fields |= {"mm_projector_norm": norm, "mm_projector_norm_target": 3.2}
        for name, value in fields.items():
            setattr(projector_config, name, value)
        projectors[norm] = build_vision_projector(projector_config).to(device=device, dtype=dtype).train()
    tokens = torch.randn(args.samples, visual, d, device=device, dtype=dtype)

    def layer_alone(norm: str) -> float:
        layer = projector_norm(projectors[norm])
        return seconds(lambda: layer(tokens.clone().requires_grad_()).sum().backward(), device)

    def whole_step() -> float:
        def step() -> None:
            embeddings = torch.cat([projectors["gwc_layernorm"](features), words], dim=1)
            decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state.sum().backward()

        return seconds(step, device)

    arms = {norm: lambda norm=norm: layer_alone(norm) for norm in NORMS}
    arms["copy"] = lambda: seconds(lambda: tokens.clone().requires_grad_().sum().backward(), device)
    times = alternate(arms, args.repeats, warmup=2)
    step_time = spread(alternate({"step": whole_step}, max(3, args.repeats // 3), warmup=1)["step"])["median"]
    rows = []
    for norm in NORMS:
        own = spread(times[norm])["median"] - spread(times["copy"])["median"]
        rows.append(
            {
                "shapes": args.shapes,
                "norm": norm,
                "layer_ms": own * 1e3,
                "step_ms": step_time * 1e3,
                "share_of_step": own / step_time,
                "peak_mib": layer_memory(projector_norm(projectors[norm]), tokens),
            }
        )
        print("{norm:14} {layer_ms:8.3f} ms of {step_ms:9.1f} ms: {share_of_step:.3%}".format(**rows[-1]))
    meta = {"samples": args.samples, "visual_tokens": visual, "text_tokens": text, "dtype": str(dtype)}
    print(write_result(f"norm_layer{args.suffix}", rows, folder=result_folder(args), **meta, repeats=args.repeats))


def seconds(function, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def layer_memory(layer: torch.nn.Module, tokens: torch.Tensor) -> float:
    """MiB that the layer keeps for its backward pass."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(tokens.clone().requires_grad_())
    return sum(storages.values()) / 2**20


if __name__ == "__main__":
    main()
