"""What DeepSpeed sends in a step: every rank calls `python sent_by_zero.py TINY RUNS`.

RUNS is a JSON list of [stage of the recipe, section `zero_optimization`, micro-batches]. Prints a line `SENT [...]`:
for each run the bytes that a rank receives in the third step, in rings of all ranks and in those of a node
(`zero_hpz_partition_size`), and what `step_traffic` says of it.
"""

import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

received = {"everywhere": 0.0, "in_node": 0.0}  # bytes, by the ring


def ring_bytes(name: str, args: tuple, kwargs: dict) -> float:
    """The bytes that a rank of a ring receives, over the share (n - 1) / n."""
    tensors = [*args, *kwargs.values()]
    size = max(sum(t.nbytes for t in (x if isinstance(x, list) else [x])) for x in tensors if holds_tensors(x))
    return size * (2 if name == "all_reduce" else 1)


def holds_tensors(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list) and isinstance(value[0], torch.Tensor))


def counted(name: str):
    collective = getattr(dist, name)

    @functools.wraps(collective)
    def call(*args, **kwargs):
        group = kwargs.get("group")
        ranks, of_node = dist.get_world_size(group), groups._get_zero_param_intra_parallel_group()
        ring = "in_node" if group is not None and group is of_node else "everywhere"
        received[ring] += ring_bytes(name, args, kwargs) * (ranks - 1) / ranks
        return collective(*args, **kwargs)

    setattr(dist, name, call)


# Before DeepSpeed is imported, which takes some of them into its own objects.
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor")
for collective in (*COLLECTIVES, "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"):
    counted(collective)

import deepspeed  # noqa: E402
from batches import IMG, collated  # noqa: E402
from deepspeed.utils import groups  # noqa: E402
from tiny_models import STAGE_1, STAGE_2, trained  # noqa: E402

from benchmarks.traffic import step_traffic  # noqa: E402
from llava.model.attention import SEGMENTS  # noqa: E402
from llava.train.distributed import use_gloo_backend  # noqa: E402

PARTS = {1: STAGE_1, 2: STAGE_2}


def step(engine, micro_batches: int) -> None:
    for number in range(micro_batches):
        engine.set_gradient_accumulation_boundary(number == micro_batches - 1)
        engine.backward(engine(**collated([[5, IMG, 6, 7], [8, 9]])).loss)
    engine.step()


def sent(tiny: Path, stage: int, zero: dict, micro_batches: int) -> dict[str, float]:
    """Received bytes and the function's, by kind of group."""
    model = trained(tiny, PARTS[stage])
    model.config._attn_implementation = SEGMENTS
    said = step_traffic(model, zero, dist.get_world_size(), micro_batches)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):  # DeepSpeed records the order of modules first
        step(engine, micro_batches)
    received.update(everywhere=0.0, in_node=0.0)
    step(engine, micro_batches)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # each run makes its own
    return received | {"said": vars(said)}


def main() -> None:
    use_gloo_backend()
    deepspeed.init_distributed("gloo")
    results = [sent(Path(sys.argv[1]), *run) for run in json.loads(sys.argv[2])]
    if dist.get_rank() == 0:
        print("SENT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
