"""A process that has imported the trainer and forks two ranks for every run: what a rank imports takes longer than its
steps.

It reads a run as a line of JSON, `{"command": [script, argument, ...], "environment": {}, "port": 1, "output": file}`,
and answers with the ranks' exit statuses. A rank that fails ends the other one, as a launcher does.
"""

import json
import os
import runpy
import signal
import sys
import time
import traceback

SECONDS_TO_END = 30.0  # that a rank has after SIGTERM


def rank(number: int, command: list[str], environment: dict[str, str], port: int, output: str) -> int:
    """Runs the script as its own process would; returns its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(job: dict) -> list[int]:
    """The exit statuses of both ranks, negative for a signal."""
    ranks = {}
    for number in range(2):
        if not (pid := os.fork()):
            status = rank(number, **job)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        ranks[pid] = None
    ended_at = None
    while None in ranks.values():
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks[pid] = os.waitstatus_to_exitcode(status)
        running = [pid for pid, status in ranks.items() if status is None]
        if ended_at is None and any(ranks.values()):
            ended_at = time.monotonic()
            for other in running:
                os.kill(other, signal.SIGTERM)
        elif ended_at is not None and time.monotonic() - ended_at > SECONDS_TO_END:
            for other in running:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.02)
    return list(ranks.values())


def main() -> None:
    import deepspeed  # noqa: F401
    import train_in_turn  # noqa: F401, which imports the trainer

    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
