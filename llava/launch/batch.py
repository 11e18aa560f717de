"""Keeps the global batch for any number of devices: accumulation = GLOBAL_BATCH / (per-device batch x devices)."""

from dataclasses import dataclass

from llava.launch.devices import Devices
from llava.launch.settings import Refusal, whole_number

_ENOUGH_TO_BE_EVEN = 8  # samples of a step per device, as measured by python -m benchmarks.scaling


@dataclass(frozen=True)
class Batch:
    """Samples of a device's micro-batch, micro-batches of a step, and the number of devices."""

    per_device: int
    accumulation: int
    devices: int

    @property
    def total(self) -> int:
        return self.per_device * self.accumulation * self.devices

    @property
    def length_group_window(self) -> int:
        """What `--length_group_window auto` means: 1, LLaVA's random batches, if a device has many samples; else 16."""
        return 1 if self.per_device * self.accumulation >= _ENOUGH_TO_BE_EVEN else 16

    def __str__(self) -> str:
        return f"{self.total} = {self.devices} x {self.per_device} x {self.accumulation}"


def resolve_batch(devices: Devices, global_batch: str, per_device: str, accumulation: str = "") -> Batch:
    """The batch; where `accumulation` is given it decides, and the global batch follows.

    Args:
        devices: the devices that share the global batch.
        global_batch: samples of an optimizer step over all devices.
        per_device: samples of a device's micro-batch, or `auto` for a device's whole share at once.
        accumulation: micro-batches of a step; empty computes it.

    Raises:
        Refusal: one of them is not a number, or the global batch does not divide; the message lists what would.
    """
    total = whole_number("GLOBAL_BATCH", global_batch, 1)
    if accumulation:
        steps = whole_number("--gradient_accumulation_steps", accumulation, 1)
        size = str(max(1, total // (devices.total * steps))) if per_device == "auto" else per_device
        return Batch(whole_number("PER_DEVICE_BATCH", size, 1), steps, devices.total)
    if per_device == "auto":
        per_device = str(total // devices.total if total % devices.total == 0 else 1)
    size = whole_number("PER_DEVICE_BATCH", per_device, 1)
    steps, rest = divmod(total, size * devices.total)
    if rest:
        raise Refusal(_choices(devices, total, size))
    return Batch(size, steps, devices.total)


def _choices(devices: Devices, total: int, size: int) -> str:
    micro = size * devices.total
    counts = _divisors(total // size) if total % size == 0 else "none"
    sizes = _divisors(total // devices.total) if total % devices.total == 0 else None
    return (
        f"GLOBAL_BATCH={total} is not a multiple of {micro} = {devices.settings} x PER_DEVICE_BATCH={size}.\n"
        "Change one of them:\n"
        f"  NNODES x {devices.variable}   {counts}\n"
        f"  PER_DEVICE_BATCH    {sizes or f'none, {total} is not a multiple of {devices.total}'}\n"
        f"  GLOBAL_BATCH        a multiple of {micro}, such as {(total // micro + 1) * micro} (not the recipe's "
        "batch)"
    )


def _divisors(number: int) -> str:
    return " ".join(str(n) for n in range(1, number + 1) if number % n == 0)
