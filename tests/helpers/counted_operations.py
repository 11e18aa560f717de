"""Operations of a step: what we count against PyTorch's own counter."""

import pytest
import transformers
from packaging.version import Version
from torch.utils.flop_counter import FlopCounterMode

from llava.train.telemetry import batch_work, flop_costs

no_rotary_product = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="this transformers makes rotary angles by a matrix product, which only PyTorch's counter counts",
)


def assert_counted_operations_equal_pytorchs_counter(model, batch: dict) -> None:
    """Eager attention computes all pairs, so these are counted here as well."""
    model.padding_free = True
    model.config._attn_implementation = "eager"
    model.get_vision_tower().vision_model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**{name: value for name, value in batch.items() if name != "indices"}).loss.backward()
    work = batch_work(batch)
    work[1] = work[0] ** 2
    assert counter.get_total_flops() == flop_costs(model) @ work
