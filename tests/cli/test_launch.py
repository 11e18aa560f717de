"""The launcher's parts as functions: flags, batch, devices, launch command, inputs, names, load."""

import os
import signal
import subprocess
import threading

import pytest

from llava.launch import supervise
from llava.launch.command import preloads, resolve_launch
from llava.launch.devices import Devices, resolve_batch, resolve_devices
from llava.launch.plan import resolve
from llava.launch.settings import Refusal, parse_flags
from llava.launch.supervise import Supervisor
from llava.utils.provenance import COMPLETE

CPU = {"NUM_GPUS": "0"}


def launcher(deepspeed="zero3.json", cores=8, **environment) -> str:
    """The launch command up to the trainer's entry."""
    environment = {"NUM_GPUS": "8"} | {name: str(value) for name, value in environment.items()}
    devices = resolve_devices(environment)
    return " ".join(resolve_launch(environment, devices, deepspeed, "name", "python", cores).command())


# --- flags ------------------------------------------------------------------------------------------------------------


def test_the_last_value_of_a_flag_counts_and_each_stands_once():
    flags = parse_flags(["--seed", "1", "--max_steps", "2", "--full_decode", "--seed=3", "--max-steps", "4", "5"])
    assert flags.words() == ["--full_decode", "--seed=3", "--max-steps", "4", "5"]
    assert (flags.value("seed"), flags.value("max_steps"), flags.value("nothing")) == ("3", "4 5", "")
    assert flags.values() == {"full_decode": "True", "seed": "3", "max_steps": "4 5"}
    assert flags.with_value("full_decode", "False").words()[:2] == ["--full_decode", "False"]
    assert parse_flags(["--optim", "a", "--optim=", "--a", "-2"]).words() == ["--a", "-2"]  # empty: left out
    assert parse_flags(["--kwargs={'a': 1, 'b=c': 2}"]).value("kwargs") == "{'a': 1, 'b=c': 2}"


# --- batch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "ranks", "per_device"), [(1, 1, "1"), (2, 4, "2"), (4, 8, "auto"), (8, 8, "auto"), (1, 8, "2")]
)
def test_global_batch_is_kept_for_any_number_of_devices(nodes, ranks, per_device):
    batch = resolve_batch(Devices(nodes, ranks, True), "256", per_device)
    assert batch.total == 256 == batch.per_device * batch.accumulation * nodes * ranks
    given = resolve_batch(Devices(nodes, ranks, True), "256", per_device, "3")  # decides, and the batch follows
    assert given.accumulation == 3 and given.total == 3 * given.per_device * nodes * ranks


def test_batch_that_does_not_divide_is_refused_with_the_choices():
    with pytest.raises(Refusal) as refused:
        resolve_batch(Devices(1, 8, True), "256", "3")
    assert "NNODES=1 x NUM_GPUS=8 x PER_DEVICE_BATCH=3; change one of them (PER_DEVICE_BATCH: 1 2 4 8 16 32)" in str(
        refused.value
    )
    with pytest.raises(Refusal, match="CPU_RANKS=7 .*PER_DEVICE_BATCH: none, 256 is not a multiple of 7"):
        resolve_batch(Devices(1, 7, False), "256", "2")


@pytest.mark.parametrize(("name", "value"), [("NUM_GPUS", "two"), ("NNODES", "-1"), ("GLOBAL_BATCH", "1.5")])
def test_count_that_is_not_a_whole_number_is_refused_by_name(name, value):
    environment = {"NUM_GPUS": "8", "GLOBAL_BATCH": "256", name: value}
    with pytest.raises(Refusal, match=f"^{name}={value} is not a whole number"):
        resolve(environment, "train.py", ["--per_device_train_batch_size", "2", "--output_dir", "out"])


@pytest.mark.parametrize(
    ("gpus", "grouped", "window"), [("8", "True", "1"), ("32", "True", "16"), ("32", "False", "1")]
)
def test_batches_are_paired_by_length_where_devices_have_few_samples(gpus, grouped, window):
    words = ["--per_device_train_batch_size", "1", "--output_dir", "out", "--group_by_modality_length", grouped]
    environment = {"NUM_GPUS": gpus, "GLOBAL_BATCH": "128"}
    for value, expected in (("auto", window), ("4", "4")):
        plan = resolve(environment, "train.py", [*words, "--length_group_window", value])
        assert plan.flags.value("length_group_window") == expected


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_are_those_that_are_visible_and_that_slurm_gave():
    assert resolve_devices({"CUDA_VISIBLE_DEVICES": "2,3"}) == Devices(1, 2, True)
    assert resolve_devices({"CUDA_VISIBLE_DEVICES": "-1", "CPU_RANKS": "2", "NNODES": "3"}).total == 6
    assert resolve_devices({"NUM_GPUS": "4", "SLURM_GPUS_ON_NODE": "8"}).total == 4
    with pytest.raises(Refusal, match=r"^NUM_GPUS=8: SLURM gave this node SLURM_GPUS_ON_NODE=4; "):
        resolve_devices({"NUM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"})


def test_hostfile_gives_nodes_and_gpus(tmp_path):
    hostfile = tmp_path / "host file"
    hostfile.write_text("# comment slots=99\nnode-1 slots=8\nnode-2 slots=8\n")
    assert str(resolve_devices({"HOSTFILE": str(hostfile)})) == "16 = 2 nodes x 8 GPUs"
    assert resolve_devices({"HOSTFILE": str(hostfile), "NUM_GPUS": "4", "NNODES": "1"}) == Devices(1, 4, True)
    words = launcher(HOSTFILE=hostfile, NNODES=2, MASTER_PORT=7).partition(" -m deepspeed.launcher.runner ")[2]
    assert words == f"--hostfile {hostfile} --num_nodes 2 --num_gpus 8 --log_level warning --master_port 7"
    for gpus in ({}, {"NUM_GPUS": "8"}):
        with pytest.raises(Refusal, match="NNODES=4, but HOSTFILE=.* has 2 hosts"):
            resolve_devices({"HOSTFILE": str(hostfile), "NNODES": "4"} | gpus)
    hostfile.write_text("node-1 slots=8\nnode-2 slots=4\n")
    with pytest.raises(Refusal, match="NUM_GPUS"):
        resolve_devices({"HOSTFILE": str(hostfile)})


# --- launch -----------------------------------------------------------------------------------------------------------


def test_one_node_runs_under_deepspeed():
    words = "env OMP_NUM_THREADS=1 python -m deepspeed.launcher.runner --num_gpus 8 --master_port 29600"
    assert launcher(MASTER_PORT=29600) == words
    assert launcher().split()[-2] == "--master_port"


def test_one_gpu_without_deepspeed_is_one_process_that_sees_one_gpu():
    words = launcher(deepspeed="", NUM_GPUS=1, CUDA_VISIBLE_DEVICES="3,5")
    assert words == "env CUDA_VISIBLE_DEVICES=3 OMP_NUM_THREADS=8 python"


def test_cuda_visible_devices_needs_torchrun_since_deepspeed_ignores_it():
    words = launcher(NUM_GPUS=2, CUDA_VISIBLE_DEVICES="2,3")
    assert words == "env OMP_NUM_THREADS=4 python -m torch.distributed.run --standalone --nproc_per_node 2"
    with pytest.raises(Refusal, match="CUDA_VISIBLE_DEVICES=2,3"):
        launcher(NUM_GPUS=2, CUDA_VISIBLE_DEVICES="2,3", LAUNCHER="deepspeed")


def test_torchrun_rendezvous_over_nodes():
    words = launcher(cores=96, NNODES=4, MASTER_ADDR="node-1", MASTER_PORT=29611, NODE_RANK=2)
    meeting = "--node_rank 2 --master_addr node-1 --master_port 29611"
    assert words == f"env OMP_NUM_THREADS=12 python -m torch.distributed.run --nnodes 4 --nproc_per_node 8 {meeting}"
    assert "--node_rank 3 " in launcher(NNODES=4, MASTER_ADDR="node-1", SLURM_NODEID=3)


def test_restarts_over_nodes_meet_again_without_node_numbers():
    words = launcher(NNODES=2, MAX_RESTARTS=3, MASTER_ADDR="node-1", MASTER_PORT=1234, RDZV_ID="a")
    assert "--max_restarts 3 --rdzv_backend c10d --rdzv_id a --rdzv_endpoint node-1:1234" in words
    assert "--node_rank" not in words and "is_host" not in words
    for rank, host in ((0, 1), (1, 0)):
        assert f"--rdzv_conf is_host={host}" in launcher(NNODES=2, MAX_RESTARTS=3, NODE_RANK=rank)


def test_restarts_use_torchrun_alone_with_a_store_per_start():
    words = launcher(MAX_RESTARTS=1)
    assert " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " in words and "--max_restarts 1" in words
    for other in ({"LAUNCHER": "deepspeed"}, {"HOSTFILE": "hosts", "NNODES": 1}):
        with pytest.raises(Refusal, match="MAX_RESTARTS=1 needs LAUNCHER=torchrun"):
            launcher(MAX_RESTARTS=1, **other)


def test_cpu_ranks_run_under_deepspeed_and_share_the_cores():
    words = launcher(**CPU, CPU_RANKS=2, MASTER_PORT=29612)
    variables = "CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=4"
    assert words == f"env {variables} python -m deepspeed.launcher.runner --num_accelerators 2 --master_port 29612"
    assert "OMP_NUM_THREADS=1 " in launcher(**CPU, CPU_RANKS=16)
    for variables in ({"LAUNCHER": "torchrun"}, {"LAUNCHER": "deepspeed"}):  # torchrun would leave Adam one thread
        assert " OMP_NUM_THREADS=24 " in launcher(cores=96, NUM_GPUS=4, **variables)
        assert " OMP_NUM_THREADS=7 " in launcher(cores=96, NUM_GPUS=4, **variables, OMP_NUM_THREADS=7)
    with pytest.raises(Refusal, match="DEEPSPEED_CONFIG"):  # without it each rank would train alone
        launcher(deepspeed="", **CPU, CPU_RANKS=2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LAUNCHER": "nonsense"}, "LAUNCHER=nonsense is not one of: auto python deepspeed torchrun"),
        ({"LAUNCHER": "python"}, "one process without DeepSpeed, not NNODES=1 x NUM_GPUS=8"),
        ({"LAUNCHER": "python", "NUM_GPUS": 1}, "one process without DeepSpeed, not .* with 'zero3.json'"),
        ({"LAUNCHER": "deepspeed", "NNODES": 2}, "needs HOSTFILE"),
        ({"NNODES": 2, "NODE_RANK": 2}, "NODE_RANK=2: expected 0 to 1 with NNODES=2"),
    ],
)
def test_launcher_that_does_not_fit_is_refused(variables, message):
    with pytest.raises(Refusal, match=message):
        launcher(**variables)


def test_precision_follows_the_devices_unless_it_is_chosen():
    def flags(*words, **environment):
        variables = {"GLOBAL_BATCH": "8", "NUM_GPUS": "1"} | environment
        return resolve(
            variables, "e", ["--per_device_train_batch_size", "auto", "--output_dir", "a/b", *words]
        ).flags.values()

    assert (flags()["bf16"], flags()["tf32"], flags()["run_name"]) == ("True", "True", "b")
    assert (flags(**CPU)["tf32"], flags(**CPU, BF16="False")["bf16"]) == ("False", "False")
    assert flags("--bf16", "False", BF16="True")["bf16"] == "False"
    assert flags("--fp16", "True")["bf16"] == flags("--fp16")["bf16"] == "False"
    assert flags("--fp16", "FALSE")["bf16"] == flags("--fp16", "off")["bf16"] == "True"


# --- load -------------------------------------------------------------------------------------------------------------


def test_a_cpu_run_takes_an_installed_allocator_that_keeps_its_memory(monkeypatch):
    monkeypatch.setattr("llava.launch.command.wheels_mimalloc", lambda python: "libmimalloc.so.4")
    chosen = {"LD_PRELOAD": "libmimalloc.so.4", "MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ALLOW_THP": "0"}
    assert preloads({}) == chosen and preloads({"LD_PRELOAD": ""}) == {}


@pytest.mark.parametrize(("written", "code"), [(True, 0), (False, 85)])
def test_a_signal_after_the_run_has_ended_asks_for_no_other_start(tmp_path, monkeypatch, written, code):
    """DeepSpeed's launcher takes seconds to close; a queue's SIGTERM may come then. Older markers do not count."""
    (tmp_path / COMPLETE).touch()
    supervisor = Supervisor(tmp_path, alone=False)
    supervisor.began += -60 if written else 60
    # Sent by the command itself, the signal could come before there is a launcher.
    monkeypatch.setattr(supervise, "wait", lambda launcher: signal.raise_signal(signal.SIGTERM) or launcher.wait())
    assert supervisor.run(["sleep", "10"], dict(os.environ)) == code


def test_a_signal_to_the_whole_job_that_ends_the_launcher_first_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "SAME_SIGNAL", 1.0)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    heard = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM))
    heard.start()
    assert Supervisor(tmp_path, alone=False).run(["sh", "-c", "kill -TERM $$"], dict(os.environ)) == 85
    heard.join()
    signal.signal(signal.SIGTERM, before)


def test_ctrl_c_while_the_launcher_starts_leaves_no_launcher_or_handler(tmp_path, monkeypatch):
    """The signal comes before there is a launcher that could pass it on."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Supervisor(tmp_path, alone=True).run(["true"], {})
    assert signal.getsignal(signal.SIGINT) is before
