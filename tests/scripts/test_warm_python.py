"""The Python that has imported everything in advance behaves like a new one to whoever starts it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from warm_python import warm_python

pytestmark = pytest.mark.slow

SHOW = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['A'], input()); print('error', file=sys.stderr)"
WAIT = "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"
"""Short sleeps: a signal that arrives on the way into a sleep is handled only after it."""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["-c", SHOW, "--flag", "x"], 0),
        (["-u", "show.py", "x"], 0),
        (["-m", "show", "x"], 0),
        (["-c", "raise SystemExit(3)"], 3),
        (["-c", "raise SystemExit('in words')"], 1),
        (["-c", "import os; os._exit(4)"], 4),
        (["-c", "import os; os.kill(os.getpid(), 9)"], -9),
        (["-c", "import os; os.kill(os.getpid(), 15)"], -15),
    ],
)
def test_words_folder_environment_streams_and_status_are_a_new_pythons(tmp_path, words, status):
    (tmp_path / "show.py").write_text(SHOW)
    options = {
        "cwd": tmp_path,
        "env": os.environ | {"A": "b"},
        "input": "typed\n",
        "capture_output": True,
        "text": True,
    }
    new, warm = (subprocess.run([python, *words], **options) for python in (sys.executable, warm_python()))
    assert (warm.returncode, warm.stdout, warm.stderr) == (new.returncode, new.stdout, new.stderr)
    assert warm.returncode == status


def test_the_trainer_is_there_and_what_is_started_from_it_is_warm_too():
    code = "import subprocess, sys; assert 'deepspeed' in sys.modules; command = [sys.executable, '-c', sys.argv[1]]"
    code += "; subprocess.run(command, check=True)"
    subprocess.run([warm_python(), "-c", code, "import sys; assert 'llava.train.train' in sys.modules"], check=True)


def test_it_runs_in_the_namespaces_of_its_caller():
    enter = ["unshare", "--net", "--uts", "--map-root-user"]
    if subprocess.run([*enter, "true"]).returncode:
        pytest.skip("this machine allows no namespaces")
    code = "import os, socket; print(socket.if_nameindex(), os.getuid())"
    told = subprocess.run([*enter, warm_python(), "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[(1, 'lo')] 0\n"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_program_ends_what_it_runs(sent):
    process = subprocess.Popen([warm_python(), "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pid = int(process.stdout.readline())
    process.send_signal(sent)
    assert process.wait(timeout=30) != 0
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.1)
    raise AssertionError("it lives on")
