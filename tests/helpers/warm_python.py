"""A Python that has imported the trainer and loaded DeepSpeed's CPU Adam: both take longer than a tiny model's steps.

`warm_python()` is a program that takes a script, `-m` or `-c` as `python` does. It hands its words, environment, folder
and streams to a server, which forks a process that runs them. The program passes signals on to that process and ends as
it ends. The process has the program's namespaces, and what it starts as `sys.executable` is warm too. Not for tests of
what is read at import, such as HF_HOME, or of which process is whose child.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from paths import ROOT

from llava.launch.supervise import release_left

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
job = {{"words": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}}
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps(job).encode() + b"\\n"], [0, 1, 2])
    answers = server.makefile()
    process = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(process, number))
    status = int(answers.readline() or 1)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
SERVERS: list[subprocess.Popen] = []
NAMESPACES = {"mnt": 0x20000, "uts": 0x4000000, "user": 0x10000000, "net": 0x40000000}
"""Flags of setns(2), which Python has from 3.12 on."""


@functools.cache
def warm_python() -> Path:
    """The program; its server ends with this process, which closes the server's input."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    atexit.register(lambda: subprocess.run(["rm", "-r", folder], check=False))
    program, address = folder / "python", folder / "socket"
    program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        command = [sys.executable, __file__, str(listener.fileno())]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": [listener.fileno()]}
        SERVERS.append(subprocess.Popen(command, env=environment, **options))
    return program


# --- the server -------------------------------------------------------------------------------------------------------


def load_op() -> None:
    """The op that CPU ranks use; for it DeepSpeed measures the processor, with a second's pause, twice."""
    import cpuinfo
    from deepspeed.accelerator import get_accelerator

    release_left()  # of an interrupted run of the tests, whose server was killed
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    get_accelerator().create_op_builder("CPUAdamBuilder").load()


def main(file: int) -> None:
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401, which DeepSpeed's engine imports, and that the compiler
    import train_in_turn  # noqa: F401, which imports the trainer

    load_op()
    gc.freeze()  # memory that no collection touches stays shared with the forks
    with socket.socket(fileno=file) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def serve(connection: socket.socket) -> None:
    """Runs one job and answers with its process and its exit status, negative for a signal."""
    enter_namespaces(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    text, streams, _, _ = socket.recv_fds(connection, 2**16, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(2**16) or b"\n"
    process = os.fork()
    if not process:
        connection.close()
        status = run(streams, **json.loads(text))
        with contextlib.suppress(Exception):  # perhaps nobody reads it any more
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    for stream in streams:
        os.close(stream)
    connection.sendall(b"%d\n" % process)
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.killpg(process, signal.SIGKILL)  # the program was killed
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % status)


def enter_namespaces(process: int) -> None:
    """Joins the namespaces of `process`, such as a host's of `tests/nightly/chaos/two_nodes.sh`."""
    own, its = ([os.readlink(f"/proc/{p}/ns/{name}") for name in NAMESPACES] for p in ("self", process))
    flags = sum(flag for flag, a, b in zip(NAMESPACES.values(), own, its, strict=True) if a != b)
    libc = ctypes.CDLL(None, use_errno=True)
    if flags and libc.setns(os.pidfd_open(process), flags):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def run(streams: list[int], words: list[str], environment: dict[str, str], folder: str) -> int:
    """Runs the words as a process of their own would; its exit status."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable, sys.orig_argv = words[0], words
    words = [word for word in words[1:] if word != "-u"]
    script = [] if words[0] in ("-m", "-c") else [os.path.dirname(words[0])]
    sys.path = [*script, *filter(None, environment.get("PYTHONPATH", "").split(":")), *sys.path]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, folder)
            warnings.filterwarnings("ignore", module="runpy")  # it was imported in advance
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
