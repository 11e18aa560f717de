"""Training's progress without a terminal: plain lines in place of a bar and of every step's figures.

The figures of every step are in `train_log.jsonl`.
"""

from collections.abc import Callable

from transformers import TrainerCallback

from llava.progress import Progress
from llava.train.telemetry import logged_names


class TrainingProgress(TrainerCallback):
    """Prints from time to time how far the run is, and the result of every evaluation.

    Args:
        step_size: samples of a step over all ranks.
        paused_seconds: gives the seconds that the process has spent so far on evaluation and other work that is not
            training.
    """

    progress: Progress  # from `on_train_begin` on

    def __init__(self, step_size: int, paused_seconds: Callable[[], float] = lambda: 0.0):
        self.step_size, self.paused_seconds = step_size, paused_seconds
        self.paused_before = 0.0
        self.loss: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = not state.is_world_process_zero
        self.paused_before = self.paused_seconds()
        self.progress = Progress(state.max_steps, "training", "steps", done=state.global_step, hidden=hidden)

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.paused = self.paused_seconds() - self.paused_before
        seconds = self.progress.clock() - self.progress.started - self.progress.paused
        rate = self.step_size * (state.global_step - self.progress.before) / max(seconds, 1e-9)
        loss = [] if self.loss is None else [f"loss {self.loss:.4g}"]
        self.progress.note(", ".join([*loss, f"{rate:.3g} samples/s"]))
        self.progress.update(state.global_step - self.progress.done)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        self.loss = logs.get("loss", self.loss)
        if "eval_loss" in logs:
            found = {name: value for name, value in logged_names(logs).items() if name.startswith("eval/")}
            line = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            self.progress.say(f"step {state.global_step}: {line}")

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.close()
