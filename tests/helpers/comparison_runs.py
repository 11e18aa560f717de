"""Made-up runs of a comparison, in the files that training and evaluation write, and calls with a stand-in trainer."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import study_stub
from paths import ROOT
from run_inputs import inputs_in
from shell import new_lines, only

from llava.compare.runs import Run
from llava.eval.results import Answered, Results, TaskResult, write_results
from llava.launch.recipe import STAGES
from llava.utils.digests import revision
from llava.utils.provenance import DONE, RUN_FILE

CHANCE = {"scenes": 25.0, "pope": 50.0}


def write_run(root: Path, seed: int | None, arm: str, right: float, **options) -> Run:
    """A finished run whose answers are right with probability `right`.

    Args:
        options: `answer` (text of wrong answers), `tasks` (number of questions by name), `model` (path of the LLM).
    """
    run, adapter = Run(root, seed, arm), None
    norm = arm.removesuffix("@default").removesuffix("-fixed")
    projector, norm = (arm, "none") if arm.endswith("mlp2x_gelu") else ("mlp2x_gelu", norm)
    for stage in STAGES:
        flags = {"output_dir": run.folder(stage), "seed": seed, "max_steps": 5, "learning_rate": 1e-3}
        flags |= {"model_name_or_path": options.get("model", "smollm2"), "vision_tower": "tower"}
        flags |= {"mm_projector_norm": norm, "mm_projector_type": projector}
        flags["mm_projector_norm_init"] = "default" if arm.endswith("@default") else "text_norm"
        flags["mm_projector_norm_learnable"] = not arm.endswith("-fixed")
        flags |= {"pretrain_mm_mlp_adapter": adapter} if adapter else {}
        study_stub.train({name: str(value) for name, value in flags.items()})
        adapter = run.folder(stage) / "mm_projector.bin"
        (run.folder(stage) / DONE).touch()
        weights = {"mm_language_model": "x"}
        weights["mm_mlp_adapter"] = f"{seed} {arm if stage == 'finetune' or projector == arm else ''}"
        own = {"training.weight_decay": 0.0, "order": f"order-{seed}", "initial_weights": weights}
        own |= {"code": {"digest": "d", "commit": "c0ffee"}}
        own["versions"] = {"torch": "0.1.0"}  # which nobody has installed
        for field, value in own.items():
            change(run, stage, field, value)
    write_scores(run, right, options.get("answer", "wrong"), options.get("tasks", {"scenes": 240}))
    return run


def write_scores(run: Run, right: float, answer: str, tasks: dict[str, int]) -> None:
    """`eval/results.json`: questions are easy or hard for all arms of a seed, up to a little luck of each arm's own."""
    made = {}
    for task, count in tasks.items():
        easy = np.random.default_rng([run.seed or 0, count]).random(count)
        own = np.random.default_rng([run.seed or 0, count, len(run.arm)]).random(count)
        hit = 0.8 * easy + 0.2 * own < right
        samples = [
            Answered(f"{task}-{i}", float(h), "right" if h else answer, "right", ("color", "shape")[i % 2])
            for i, h in enumerate(hit)
        ]
        made[task] = TaskResult("accuracy", 100 * float(hit.mean()), samples, CHANCE.get(task), 1.0, "data")
    fingerprint = revision(str(run.folder("finetune")))
    settings = {"conv_template": "chatml", "limit": None, "mmlu_fewshot": 5, "num_gpus": 0}
    versions = {"torch": "0.1.0"}
    results = Results(str(run.folder("finetune")), fingerprint, "evaluate", versions, settings, "2026-01-01", made)
    write_results(results, run.folder("eval"))


def change(run: Run, stage: str, field: str, value: object) -> None:
    """Sets one dotted field of what a stage recorded."""
    path = run.folder(stage) / RUN_FILE
    content = json.loads(path.read_text())
    *parents, last = field.split(".")
    place = content["starts"][-1]["configuration"]
    for name in parents:
        place = place[name]
    place[last] = value
    path.write_text(json.dumps(content))


# Stand-ins need no memory, so that two train at once on every machine with two cores.
CALL = """from pathlib import Path
from llava.compare import __main__, quickstart, steps
steps.MEMORY_OF_RUN, quickstart.ROOT = 0.01, Path()
exit(__main__.main())"""


class Caller:
    """Calls of `python -m llava.compare` with study_stub in place of Python; `seen()` returns the stub's new calls."""

    def __init__(self, folder: Path, command: str, cwd: Path = ROOT, **env: object):
        python, calls = folder / "python", folder / "calls"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {study_stub.__file__} "$@"\n')
        python.chmod(0o755)
        own = {"LLAVA_PYTHON": python, "CALLS": calls, "NUM_GPUS": 0, "BF16": "False", "DEEPSPEED_CONFIG": ""}
        own |= inputs_in(folder) | {"HOME": folder, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}
        self.env, self.cwd, self.out, self.seen = only(**own | env), cwd, folder / "out", new_lines(calls)
        self.command = [sys.executable, "-c", CALL, command, "--output-dir", self.out]

    def __call__(self, *flags: object, **extra: object) -> subprocess.CompletedProcess:
        words, env = map(str, [*self.command, *flags]), self.env | {k: str(v) for k, v in extra.items()}
        return subprocess.run(list(words), cwd=self.cwd, env=env, capture_output=True, text=True, timeout=240)

    def signalled(self, line: str, sent: int, *flags: object, **extra: object):
        """A call that gets a signal once the stub was called with `line`.

        Returns:
            Its calls, its status, what it printed, and the processes that it had started.
        """
        env, printed = self.env | {k: str(v) for k, v in extra.items()}, self.out.with_name("printed")
        with printed.open("w") as output:
            process = subprocess.Popen(
                list(map(str, [*self.command, *flags])), cwd=self.cwd, env=env, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip
            calls = self.seen()
            while line not in calls and process.poll() is None:
                time.sleep(0.1)
                calls += self.seen()
            assert process.poll() is None, f"it ended before {line}: {printed.read_text()}"
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(sent)
            status = process.wait(timeout=60)
        return calls, status, printed.read_text(), family
