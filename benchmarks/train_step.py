"""Tokens per second, MFU and memory of a training step, by padding, attention backend, loss head and norm.

Random weights in the shapes of a preset, synthetic micro-batches with lengths like LLaVA's, one device, data in memory.
Arms differ in one thing from the first, and take turns. The losses of all arms without a different norm must agree.
"""

import argparse
import gc
import random
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import SiglipVisionConfig

from benchmarks.common import alternate, spread, write_result
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.collate import DataCollatorForSupervisedDataset
from llava.model.attention import SEGMENTS, packed_attention
from llava.model.language_model.families import LLAVA_CLASSES
from llava.model.multimodal_projector.builder import build_vision_projector
from llava.train.flops import Work, batch_work, flop_costs, peak_tflops, required_flops
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, VISION_TOWER, set_trainable

SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16} | {
    "image_size": 384,
    "patch_size": 14,
}
SMALL_TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 3} | {
    "image_size": 64,
    "patch_size": 16,
}


@dataclass(frozen=True)
class Preset:
    """Shapes of language model and tower."""

    model_type: str  # a key of LLAVA_CLASSES
    language_model: dict[str, int]
    tower: dict[str, int]


def decoder_sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


PRESETS = {
    "tiny": Preset("llava_llama", decoder_sizes(256, 688, 4, 4, 4, 2048), SMALL_TOWER),
    "demo": Preset("llava_llama", decoder_sizes(576, 1536, 30, 9, 3, 49_152), SMALL_TOWER),
    "llama-3.2-3b": Preset("llava_llama", decoder_sizes(3072, 8192, 28, 24, 8, 128_256), SO400M),
    "qwen2.5-7b": Preset("llava_qwen", decoder_sizes(3584, 18_944, 28, 28, 4, 152_064), SO400M),
}
STAGES = {1: {ADAPTER}, 2: {VISION_TOWER, ADAPTER, LANGUAGE_MODEL}}


@dataclass(frozen=True)
class Arm:
    """One way to compute the step."""

    name: str
    padding_free: bool = True
    backend: str | None = None
    loss_head: str = "auto"
    norm: str = "gwc_layernorm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--preset", choices=PRESETS, default="llama-3.2-3b" if gpu else "tiny")
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384 if gpu else 2048)
    parser.add_argument("--micro-batches", type=int, default=4, help="different ones, in turn")
    parser.add_argument("--steps", type=int, default=8 if gpu else 4, help="of every arm in every round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--arms", nargs="+", help="names of arms; default: all that run on this machine")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--suffix", default="", help="of the result file")
    parser.add_argument("--quick", action="store_true", help="one round of two steps")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.micro_batches, args.repeats = 2, 2, 1
    device = torch.device("cuda" if gpu else "cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    arms = {arm.name: arm for arm in runnable_arms(device)}
    if unknown := set(args.arms or ()) - arms.keys():
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; this machine has {', '.join(arms)}")
    rows = []
    for stage in args.stages:
        rows += measure_stage(args, stage, [arms[n] for n in args.arms or arms], device, dtype)
        gc.collect()  # the model of one stage must be gone before the next
    names = ("preset", "micro_batch_tokens", "micro_batches", "steps", "repeats", "activation_checkpointing")
    meta = {name: getattr(args, name) for name in names}
    print(write_result(f"train_step{args.suffix}", rows, dtype=str(dtype), **meta))


def runnable_arms(device: torch.device) -> list[Arm]:
    """The reference first; each other differs from it in one thing, but for `padded_plain`, which is upstream's way."""
    arms = [Arm("packed"), Arm("padded", padding_free=False, backend="sdpa")]
    arms += [Arm("padded_plain", padding_free=False, backend="sdpa", loss_head="plain")]
    fastest = packed_attention(None, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    others = ["sdpa", "eager"] if device.type == "cpu" else ["sdpa", SEGMENTS, "packed_varlen", "flash_attention_2"]
    arms += [Arm(f"packed_{name.removeprefix('packed_')}", backend=name) for name in others if name != fastest]
    arms += [Arm("plain_loss", loss_head="plain")]
    if device.type == "cuda":
        arms += [Arm("chunked_loss", loss_head="chunked")]
    return [*arms, Arm("no_norm", norm="none"), Arm("layernorm", norm="layernorm")]


def build_model(preset: Preset, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, its projector without norm."""
    classes = LLAVA_CLASSES[preset.model_type]
    config = classes.config(**preset.language_model, max_position_embeddings=4096)
    config.mm_vision_config = SiglipVisionConfig(**preset.tower).to_dict()
    config.mm_projector_type, config.mm_projector_norm = "mlp2x_gelu", "none"
    config.tokenizer_model_max_length = 2048
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = classes.causal_lm(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def micro_batches(args: argparse.Namespace, stage: int, model: Any, device: torch.device) -> list[dict]:
    """Stage 1: a picture and a caption of about 20 tokens. Stage 2: log-normal texts, one in eleven without picture."""
    generator, visual = random.Random(stage), model.get_vision_tower().num_tokens
    collate, side = DataCollatorForSupervisedDataset(0), model.get_vision_tower().image_size
    vocabulary = model.config.vocab_size
    batches = []
    for number in range(args.micro_batches):
        samples, tokens = [], 0
        while tokens < args.micro_batch_tokens:
            has_image = stage == 1 or generator.random() > 1 / 11
            median = 20 if stage == 1 else 220
            length = int(min(2048 - visual, max(8, generator.lognormvariate(torch.tensor(median).log().item(), 0.8))))
            ids = torch.randint(5, vocabulary, (length,), generator=torch.Generator().manual_seed(number))
            labels = ids.clone()
            labels[: 0 if stage == 1 else length // 3] = IGNORE_INDEX
            if has_image:
                ids = torch.cat([torch.tensor([IMAGE_TOKEN_INDEX]), ids])
                labels = torch.cat([torch.tensor([IGNORE_INDEX]), labels])
            sample = {"input_ids": ids, "labels": labels}
            if has_image:
                sample["images"] = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(number))
            samples.append(sample)
            tokens += length + has_image * visual
        batches.append({k: v.to(device) for k, v in collate(samples).items()})
    return batches


def measure_stage(
    args: argparse.Namespace, stage: int, arms: list[Arm], device: torch.device, dtype: torch.dtype
) -> list[dict]:
    """One row per arm."""
    model = build_model(PRESETS[args.preset], device, dtype)
    if args.activation_checkpointing:
        model.gradient_checkpointing_enable()
    batches = micro_batches(args, stage, model, device)
    set_trainable(model, frozenset(STAGES[stage]))
    costs = flop_costs(model)
    work = sum((batch_work(b, model.get_vision_tower().num_tokens, 2048) for b in batches), Work())
    flops = required_flops(costs, work) / len(batches)
    tokens = float(work.tokens) / len(batches)
    projectors = {arm.norm: projector_for(model, arm.norm, device, dtype) for arm in arms}
    losses, peaks = {}, {}
    trained = {p for p in model.parameters() if p.requires_grad}
    trained |= {p for projector in projectors.values() for p in projector.parameters()}
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)  # weights stay as they are, so that losses agree

    def prepare(arm: Arm) -> None:
        model.get_model().mm_projector = projectors[arm.norm]
        set_trainable(model, frozenset(STAGES[stage]))
        model.padding_free, model.lm_head.loss_head = arm.padding_free, arm.loss_head
        model.config._attn_implementation = arm.backend or packed_attention(None, device, dtype)

    def run(arm: Arm) -> float:
        prepare(arm)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        for step in range(args.steps):
            batch = batches[step % len(batches)]
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                first = loss.detach()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peaks[arm.name] = torch.cuda.max_memory_allocated() / 2**30
        losses[arm.name] = first.item()
        return (time.perf_counter() - start) / args.steps

    times = alternate({arm.name: lambda arm=arm: run(arm) for arm in arms}, args.repeats, warmup=1)
    check_losses(stage, arms, losses, dtype)
    peak = peak_tflops(device)
    rows = []
    for arm in arms:
        seconds = spread(times[arm.name])
        row = {"stage": stage, "arm": arm.name, "seconds": seconds["median"], "seconds_max": seconds["max"]}
        row |= {"tokens_per_second": tokens / seconds["median"], "tflops": flops / seconds["median"] / 1e12}
        row |= {"speed_over_padded_plain": None, "loss": losses[arm.name]}
        if peak:
            row |= {"mfu": flops / seconds["median"] / 1e12 / peak, "peak_gib": peaks[arm.name]}
        rows.append(row)
    slow = next((row["seconds"] for row in rows if row["arm"] == "padded_plain"), None)
    for row in rows:
        row["speed_over_padded_plain"] = slow / row["seconds"] if slow else None
        print(
            f"stage {stage} {row['arm']:18} {row['seconds']:8.3f} s  {row['tokens_per_second']:10.0f} tokens/s"
            + (f"  {row['mfu']:.1%} MFU  {row['peak_gib']:.1f} GiB" if peak else f"  {row['tflops']:.3f} TFLOP/s"),
            flush=True,
        )
    return rows


def projector_for(model: Any, norm: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A projector with the weights of every other, ending in `norm`."""
    config = SimpleNamespace(
        mm_projector_type="mlp2x_gelu",
        mm_hidden_size=model.config.mm_hidden_size,
        hidden_size=model.config.hidden_size,
        mm_projector_norm=norm,
        mm_projector_norm_target=3.2,
    )
    torch.manual_seed(1)
    return build_vision_projector(config).to(device=device, dtype=dtype).train()


def check_losses(stage: int, arms: list[Arm], losses: dict[str, float], dtype: torch.dtype) -> None:
    """Ends the program where arms with the same norm disagree."""
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for norm in {arm.norm for arm in arms}:
        values = [losses[arm.name] for arm in arms if arm.norm == norm]
        if max(values) - min(values) > tolerance * max(values):
            sys.exit(f"error: stage {stage}: losses of arms that should agree: {losses}")


if __name__ == "__main__":
    main()
