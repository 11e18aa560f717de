"""Training's progress: a bar with a line per logged step in a terminal, elsewhere a plain line from time to time.

All figures of every step are in `train_log.jsonl`.
"""

import sys
from collections.abc import Callable, Mapping

from transformers import TrainerCallback

from llava.train.telemetry import logged_names
from llava.utils.progress import in_terminal, progress


class TrainingProgress(TrainerCallback):
    """Shows training progress, the main figures of logged steps in a terminal, and the result of every evaluation.

    Args:
        step_size: samples of a step over all ranks.
        paused_seconds: gives the seconds that the process has spent so far on evaluation and other work that is not
            training.
    """

    bar: progress  # from `on_train_begin` on

    def __init__(self, step_size: int, paused_seconds: Callable[[], float] = lambda: 0.0):
        self.step_size, self.paused_seconds = step_size, paused_seconds
        self.paused = 0.0  # seconds that the bar leaves out so far
        self.loss: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = not state.is_world_process_zero
        self.paused = self.paused_seconds()
        self.bar = progress(state.max_steps, "training", "steps", done=state.global_step, hidden=hidden)

    def on_step_end(self, args, state, control, **kwargs):
        bar = self.bar
        if bar.disable:  # of another rank
            return
        paused = self.paused_seconds()
        bar.start_t += paused - self.paused
        self.paused = paused
        rate = self.step_size * (state.global_step - bar.initial) / max(bar.format_dict["elapsed"], 1e-9)
        loss = [] if self.loss is None else [f"loss {self.loss:.4g}"]
        bar.set_postfix_str(", ".join([*loss, f"{rate:.3g} samples/s"]), refresh=False)
        bar.update(state.global_step - bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs, lines = logs or {}, []
        self.loss = logs.get("loss", self.loss)
        if "loss" in logs and in_terminal():
            lines.append(main_figures(logs))
        if "eval_loss" in logs:
            results = {name: value for name, value in logged_names(logs).items() if name.startswith("eval/")}
            lines.append(", ".join(f"{name} {value:.4g}" for name, value in results.items()))
        for line in lines if state.is_world_process_zero else []:
            self.bar.write(f"step {state.global_step}: {line}", file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


def main_figures(logs: Mapping[str, float]) -> str:
    """Loss, learning rate, the norm of visual tokens over that of text tokens, and samples per second, in a line."""
    figures = {"loss": logs.get("loss"), "learning rate": logs.get("learning_rate")}
    if "norm/llm_input" in logs and logs.get("norm/text_embeddings"):
        figures["visual over text norm"] = logs["norm/llm_input"] / logs["norm/text_embeddings"]
    figures["samples/s"] = logs.get("samples_per_second")
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
