"""Profiles the optimizer steps of any Trainer's run: python profiled.py WARMUP_STEPS OUTPUT.json SCRIPT [ARGUMENTS].

Runs SCRIPT as it is, here or in a peer's environment. The profile begins at the end of step WARMUP_STEPS and ends with
the run's last step, so that it has the reading of data too. OUTPUT.json gets {"steps", "wall_s", "seconds": {piece:
seconds per step}}, with the host's seconds: operations by their own time, and as `host` what no operation has.
"""

import functools
import json
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Trainer, TrainerCallback

READING = "reading data"
PIECES = {
    "loss": r"log_softmax|nll_loss|cross_entropy",
    "attention": r"attention|softmax|aten::(bmm|baddbmm)$",
    "matrix products": r"aten::(mm|addmm)$|mkldnn|convolution",
    "optimizer": r"_fused_adam|_foreach|linalg_vector_norm",
    "copies and casts": r"aten::(copy_|cat|fill_|zero_|index\w*|embedding\w*|_local_scalar_dense|clone|contiguous)$",
    "elementwise": r"^aten::",
}
"""Operations of a piece, by name; the first that matches counts."""
HOST = "host"


class StepProfile(TrainerCallback):
    """Profiles from the end of one step to the end of the run's last."""

    def __init__(self, warmup_steps: int, output: Path):
        self.warmup_steps, self.output = warmup_steps, output
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.start = 0.0

    def install(self) -> None:
        """Makes every Trainer that is built from now on report here."""
        init = Trainer.__init__

        @functools.wraps(init)  # peers look at its parameters
        def profiled_init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            init(trainer, *args, **kwargs)
            trainer.add_callback(self)
            trainer.get_batch_samples = reading(trainer.get_batch_samples)  # this tree's has its own

        Trainer.__init__ = profiled_init

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.warmup_steps:
            self.profile.start()
            self.start = time.perf_counter()
        elif state.global_step == state.max_steps:
            wall, steps = time.perf_counter() - self.start, state.max_steps - self.warmup_steps
            self.profile.stop()
            seconds = {piece: value / steps for piece, value in seconds_by_piece(self.profile.events(), wall).items()}
            self.output.write_text(json.dumps({"steps": steps, "wall_s": wall / steps, "seconds": seconds}))


def reading(read: Callable) -> Callable:
    """`read`, as a range of the profile."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(READING):
            return read(*args, **kwargs)

    return marked


def seconds_by_piece(events: Iterable[Any], wall: float) -> dict[str, float]:
    """Seconds of each piece, of reading data, and of the host alone; they add up to `wall`."""
    seconds = dict.fromkeys((*PIECES, READING), 0.0)
    for event in events:
        if event.name == READING:
            seconds[READING] += event.cpu_time_total / 1e6
        elif not inside_reading(event) and (piece := piece_of(event.name)):
            seconds[piece] += event.self_cpu_time_total / 1e6
    return seconds | {HOST: wall - sum(seconds.values())}


def inside_reading(event: Any) -> bool:
    while (event := event.cpu_parent) is not None:
        if event.name == READING:
            return True
    return False


def piece_of(name: str) -> str | None:
    """The piece of an operation; None for ranges, such as the optimizer's step, whose own time is the host's."""
    return next((piece for piece, names in PIECES.items() if re.search(names, name)), None)


if __name__ == "__main__":
    warmup_steps, output, script, *arguments = sys.argv[1:]
    StepProfile(int(warmup_steps), Path(output)).install()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
