"""Variables and words that `deepspeed` takes to other nodes arrive as they were set: read back by DeepSpeed itself."""

import os
import re
import socket
import stat
import subprocess

import pytest
from run_inputs import inputs_in
from shell import bash

from llava.launch.passed_on import ENV_FILE, env_file_text, other_nodes, own_lines, passed_on, word_for_hosts
from llava.launch.settings import Refusal
from llava.train.stop_signal import run_dir
from llava.utils.failures import HOST, RUN_DIR

HARD = "a b\"c'd$HOME `id` \\ %n%h 100%% %20 ;&|<>*?~#!{}()[]"


def pdsh(words: list[str], rank: int = 1, host: str = "node-2") -> str:
    """What pdsh hands to ssh: the words joined, and in each %n, %h and %% replaced (its src/common/pipecmd.c)."""
    values = {"n": str(rank), "h": host, "%": "%"}
    return " ".join(re.sub("%([nh%])", lambda m: values[m[1]], word) for word in words)


@pytest.fixture
def by_deepspeed(tmp_path, monkeypatch):
    """A function that has DeepSpeed's own runner start words on two hosts; what the second host's shell makes of it."""
    from deepspeed.launcher import runner

    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")

    def run(variables: dict[str, str], *words: str) -> tuple[dict[str, str], list[str]]:
        (tmp_path / "env").write_text(env_file_text(variables))
        monkeypatch.setattr(runner, "DEEPSPEED_ENVIRONMENT_NAME", str(tmp_path / "env"))
        monkeypatch.setattr("shutil.which", lambda name: name)
        started = []

        class Started:
            returncode = 0

            def __init__(self, command, env=None):
                started.append(command)

            def wait(self):
                return 0

        monkeypatch.setattr(runner.subprocess, "Popen", Started)
        options = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh_check", "--master_addr", "node-1"]
        runner.main([*options, "train.py", *map(word_for_hosts, words)])
        command = pdsh(started[0][started[0].index("-w") + 2 :])
        marked = command.replace(" -u -m deepspeed.launcher.launch", "; printf '%s\\0' ", 1)
        marked = re.sub(r"\S+; printf", "env -0; echo; printf", marked, count=1)
        monkeypatch.undo()
        done = subprocess.run(["sh", "-c", marked], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        env, _, seen = done.stdout.partition("\0\n")
        seen = seen.split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in env.split("\0")), seen[seen.index("train.py") + 1 :]

    return run


def test_variables_and_words_reach_the_other_hosts_shell_as_they_were_set(by_deepspeed):
    variables = {"HF_TOKEN": "hf_abc", "WANDB_NAME": HARD, "HF_HOME": "/a/b c", "NCCL_DEBUG": "INFO", "LLAVA_EMPTY": ""}
    words = ["--data_path", "data/*.json", "--kwargs", '{"a":true}', "--with", HARD, "--percent", "50%n", "it's"]
    env, seen = by_deepspeed(variables, *words)
    assert {name: env.get(name) for name in variables} == variables
    assert seen == words


def test_what_ranks_need_is_passed_on_and_what_belongs_to_one_node_is_not():
    needed = (
        "HF_TOKEN HF_HOME HF_HUB_OFFLINE TORCH_EXTENSIONS_DIR TOKENIZERS_PARALLELISM OMP_NUM_THREADS WANDB_API_KEY "
    )
    needed += (
        "NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME CUDA_DEVICE_MAX_CONNECTIONS LLAVA_ANYTHING PYTORCH_CUDA_ALLOC_CONF "
    )
    needed += "DS_ACCELERATOR XDG_CACHE_HOME https_proxy"
    own = "CUDA_VISIBLE_DEVICES LLAVA_RUN_DIR LLAVA_REQUEUE_DIR LLAVA_PYTHON DS_ENV_FILE HOME PATH RANK HOSTNAME TMPDIR"
    assert passed_on(dict.fromkeys([*needed.split(), *own.split()], "1")).keys() == set(needed.split())


@pytest.mark.parametrize("value", ["a\nb", "a\r", " a", "a\t"])
def test_value_that_a_line_cannot_hold_is_refused_by_name(value):
    with pytest.raises(Refusal, match="^HF_HOME=.* cannot be passed on"):
        env_file_text({"HF_HOME": value})


def test_the_users_file_wins_and_lines_fatal_to_deepspeed_are_not_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    assert own_lines({}) == []
    (tmp_path / "home/.deepspeed_env").write_text("# a comment\n\nHF_HOME=/home's\nMINE=1\n")
    (tmp_path / ".deepspeed_env").write_text("MINE=2\n")
    own = own_lines({})
    assert own == ["HF_HOME=/home's", "MINE=1", "MINE=2"]  # DeepSpeed takes the last
    assert env_file_text({"HF_HOME": "/other", "HF_TOKEN": "x"}, own) == "HF_TOKEN=x\n" + "\n".join(own) + "\n"
    (tmp_path / "named").write_text("NAMED=1\n")
    assert own_lines({ENV_FILE: str(tmp_path / "named")}) == ["NAMED=1"]
    with pytest.raises(Refusal, match="^DS_ENV_FILE=/no/such does not exist"):
        own_lines({ENV_FILE: "/no/such"})
    (tmp_path / "named").write_text("NAMED\n")
    with pytest.raises(Refusal, match="'NAMED' is not a NAME=value line"):
        own_lines({ENV_FILE: str(tmp_path / "named")})


def test_passed_on_variables_are_shown_and_of_secrets_only_the_names():
    environment = {"HF_TOKEN": "hidden", "WANDB_API_KEY": "hidden", "HTTPS_PROXY": "hidden", "HF_HOME": "/a b"}
    environment |= {"TOKENIZERS_PARALLELISM": "false"}
    for by_ssh, more, heading in (
        (True, {}, "deepspeed passes on"),
        (False, {"SLURM_JOB_ID": "7"}, "srun passes on every"),
        (False, {}, "nothing is passed on; set these on every node alike"),
    ):
        first, *lines = other_nodes(environment | more, by_ssh)
        assert first.startswith(heading)
        assert lines == [
            "  HF_HOME='/a b'",
            "  HF_TOKEN",
            "  HTTPS_PROXY",
            "  TOKENIZERS_PARALLELISM=false",
            "  WANDB_API_KEY",
        ]


def test_the_file_is_for_the_user_alone_and_gone_at_the_end(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nstat -c %a "$DS_ENV_FILE" >{tmp_path}/mode\ncp "$DS_ENV_FILE" {tmp_path}/copy\n')
    python.chmod(0o755)
    (tmp_path / "hosts").write_text("node-1 slots=8\nnode-2 slots=8\n")
    env = inputs_in(tmp_path)
    env |= {
        "HOSTFILE": tmp_path / "hosts",
        "LLAVA_PYTHON": python,
        "OUTPUT_DIR": tmp_path / "out",
        "HF_TOKEN": "secret",
    }
    run = bash("scripts/pretrain.sh", TMPDIR=tmp_path, HOME=tmp_path, **env)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "mode").read_text() == "600\n" and stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600
    lines = (tmp_path / "copy").read_text().splitlines()
    assert "HF_TOKEN=secret" in lines and any(line.startswith("LLAVA_RUN_DIR=") for line in lines)
    assert not list(tmp_path.glob("llava-run-*")) and "secret" not in run.stdout + run.stderr
    assert "secret" not in (tmp_path / "out/command.sh").read_text()


def test_a_ranks_word_goes_to_the_launching_script_of_its_own_node_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(RUN_DIR, raising=False)
    assert run_dir() is None
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "on another node"))
    assert run_dir() is None
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    (tmp_path / HOST).write_text("another node, which sees the same temporary folder")
    assert run_dir() is None
    (tmp_path / HOST).write_text(socket.gethostname())
    assert run_dir() == tmp_path
