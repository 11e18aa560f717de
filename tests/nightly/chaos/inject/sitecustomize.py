"""Python imports this before the program when the folder is on PYTHONPATH: makes a training rank fail as CHAOS says.

CHAOS is JSON: `what` (kill, kill_in_save, raise, hang, signal, signal_rank, cut_link, fill_disk), `step` (number of
finished steps when it happens), `ranks`, and what else the fault needs; `once` spares a rank that a launcher
started again. Only the trainer's own processes are touched, never a launcher.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def is_rank() -> bool:
    """Whether this process runs the trainer's entry itself."""
    script = next((word for word in sys.orig_argv[1:] if word != "-u"), "")
    return script.endswith("llava/train/train_mem.py")


def strike(chaos: dict) -> None:
    """Does what `chaos` says, in the middle of a step."""
    Path(chaos["struck"]).write_text(str(time.time()))
    if chaos["what"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif chaos["what"] == "raise":
        raise ValueError("injected fault: this rank fails")
    elif chaos["what"] == "hang":
        time.sleep(3600)
    elif chaos["what"] == "signal":
        os.kill(int(Path(chaos["pid_file"]).read_text()), getattr(signal, chaos["signal"]))
    elif chaos["what"] == "signal_rank":
        os.kill(os.getpid(), getattr(signal, chaos["signal"]))
    elif chaos["what"] == "cut_link":
        subprocess.run(["ip", "link", "set", chaos["link"], "down"], check=True)
    elif chaos["what"] == "fill_disk":
        folder = Path(chaos["folder"])
        with (folder / "filler").open("wb") as file:
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            file.write(bytes(max(0, free - 65536)))


def install(chaos: dict) -> None:
    """Wraps the trainer's methods."""
    from llava.train.llava_trainer import LLaVATrainer

    def due(trainer) -> bool:
        if chaos.get("once") and Path(chaos["struck"]).exists():
            return False
        return trainer.args.process_index in chaos["ranks"] and trainer.state.global_step == chaos["step"]

    get_batch_samples, save_rng = LLaVATrainer.get_batch_samples, LLaVATrainer._save_rng_state

    def struck_batches(self, *args, **kwargs):
        result = get_batch_samples(self, *args, **kwargs)
        if due(self) and chaos["what"] != "kill_in_save":
            strike(chaos)
        return result

    def struck_save(self, output_dir):
        if due(self) and chaos["what"] == "kill_in_save":
            strike(chaos | {"what": "kill"})
        save_rng(self, output_dir)

    LLaVATrainer.get_batch_samples, LLaVATrainer._save_rng_state = struck_batches, struck_save


if os.environ.get("CHAOS") and is_rank():
    install(json.loads(os.environ["CHAOS"]))
