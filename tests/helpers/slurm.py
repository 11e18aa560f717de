"""A stand-in for SLURM: `srun` starts a task per node and ends others as SLURM does; `scontrol` keeps what it hears.

The order is SLURM's own (src/srun/launch.c, slurmstepd/req.c): after the first bad exit, or `--wait` seconds after the
first end, every process of the tasks gets SIGTERM and, when the wait for them is over, SIGKILL. The status is 128 and
the highest signal that ended a task, or else the highest exit code.
"""

import os
import sys
from pathlib import Path

SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys, time
words = sys.argv[1:]
options = dict(word.partition("=")[::2] for word in words[:words.index("bash")])
command, ready = words[words.index("bash"):], pathlib.Path(os.environ["READY"])
pathlib.Path(os.environ["READY"], "options").write_text("\\n".join(words))
def start(node):
    env = os.environ | {{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}}
    return subprocess.Popen(command, env=env, start_new_session=True, stdin=subprocess.DEVNULL)
def signal_all(number):  # every process of the tasks, wherever it is in the tree
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) in {{task.pid for task in tasks}}:
                os.kill(int(stat.parent.name), number)
        except (OSError, ValueError):
            pass
tasks = [start(node) for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
sent, first_end, term = False, None, None
seconds_to_wait = float(os.environ.get("WAIT") or options.get("--wait", "inf"))
while None in [task.poll() for task in tasks]:
    now = time.monotonic()
    if not sent and "SIGNAL" in os.environ and len(list(ready.glob("node*"))) == len(tasks):
        sent = True
        signal_all(getattr(signal, os.environ["SIGNAL"]))
    ended = [task.returncode for task in tasks if task.returncode is not None]
    first_end = first_end or (now if ended else None)
    over = first_end and now - first_end > seconds_to_wait
    if not term and (any(ended) and options["--kill-on-bad-exit"] == "1" or over):
        term = now
        signal_all(signal.SIGTERM)
    if term and now - term > float(os.environ.get("KILL_WAIT", "3")):
        signal_all(signal.SIGKILL)
    time.sleep(0.05)
codes = [task.returncode for task in tasks]
signal_all(signal.SIGKILL)
sys.exit(128 - min(codes) if min(codes) < 0 else max(codes))
"""

# In place of Python with its torchrun and ranks: what each node's training does, by its number.
TRAINER = """#!/usr/bin/env bash
[ "$1" != -c ] || exit 0 # whether it has DeepSpeed
behaviours=($BEHAVIOURS)
exec {python} -c '
import os, pathlib, signal, sys, time
behaviour, checkpoint = sys.argv[1], pathlib.Path(os.environ["OUTPUT_DIR"], "checkpoint-1")
def save(*_):
    time.sleep(1.5 if behaviour == "saves_late" else 0)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "complete.json").touch()
    os._exit(0)
if behaviour != "loads":
    signal.signal(signal.SIGUSR1, save if behaviour.startswith("saves") else lambda *_: None)
ready = pathlib.Path(os.environ["READY"])
(ready / ("node" + os.environ["SLURM_NODEID"])).touch()
while len(list(ready.glob("node*"))) < int(os.environ["SLURM_JOB_NUM_NODES"]):
    time.sleep(0.05)
if behaviour == "fails":
    os._exit(3)
if behaviour == "is_killed":
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)
time.sleep(0 if behaviour == "ends" else 60)
' "${{behaviours[$SLURM_NODEID]}}"
"""


def stand_in(folder: Path, name: str, text: str) -> Path:
    """Writes a program."""
    file = folder / name
    file.write_text(text.format(python=sys.executable) if text in (SRUN, TRAINER) else text)
    file.chmod(0o755)
    return file


def slurm_tools(folder: Path) -> str:
    """Puts both stand-ins into `folder`; PATH with it in front. What `scontrol` was told is in `told`."""
    stand_in(folder, "srun", SRUN)
    record = f'#!/bin/sh\ncase $1 in show) echo node-7 ;; *) echo "$@" >>"{folder}/told" ;; esac\n'
    stand_in(folder, "scontrol", record)
    return f"{folder}:{os.environ['PATH']}"
