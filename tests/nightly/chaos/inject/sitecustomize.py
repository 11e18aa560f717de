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
    what = chaos["what"]
    if what in ("kill", "kill_in_save"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise ValueError("injected fault: this rank fails")
    elif what == "hang":
        time.sleep(3600)
    elif what in ("signal", "signal_rank"):
        process = int(Path(chaos["pid_file"]).read_text()) if what == "signal" else os.getpid()
        os.kill(process, getattr(signal, chaos["signal"]))
    elif what == "cut_link":
        subprocess.run(["ip", "link", "set", chaos["link"], "down"], check=True)
    elif what == "fill_disk":
        free = os.statvfs(chaos["folder"]).f_bavail * os.statvfs(chaos["folder"]).f_frsize
        Path(chaos["folder"], "filler").write_bytes(bytes(max(0, free - 65536)))


def install(chaos: dict) -> None:
    """Wraps the trainer's methods."""
    from llava.train.llava_trainer import LLaVATrainer

    def strikes_before(name: str, in_save: bool) -> None:
        original = getattr(LLaVATrainer, name)

        def struck(trainer, *args, **kwargs):
            due = trainer.args.process_index in chaos["ranks"] and trainer.state.global_step == chaos["step"]
            again = chaos.get("once") and Path(chaos["struck"]).exists()
            if due and not again and in_save == (chaos["what"] == "kill_in_save"):
                strike(chaos)
            return original(trainer, *args, **kwargs)

        setattr(LLaVATrainer, name, struck)

    strikes_before("training_step", in_save=False)
    strikes_before("_save_rng_state", in_save=True)


if os.environ.get("CHAOS") and is_rank():
    install(json.loads(os.environ["CHAOS"]))
