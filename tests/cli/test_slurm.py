"""SLURM jobs over several nodes: a signal that ends the run has the job requeued, and a failure never does."""

import os
import shutil

import pytest
from paths import ROOT
from run_inputs import inputs_in
from shell import bash
from slurm import TRAINER, slurm_tools, stand_in


@pytest.fixture
def job(tmp_path):
    """A function that runs a job of stage 1 over two nodes, whose trainings behave as it is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path, python = slurm_tools(folder), stand_in(folder, "trainer", TRAINER)
    number = 1_000_000 + os.getpid()
    state = ROOT / f".slurm-{number}"
    slurm = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": 2}
    slurm |= {"SLURM_SUBMIT_DIR": ROOT, "SLURM_GPUS_ON_NODE": 8, "LLAVA_PYTHON": python, "MASTER_ADDR": "127.0.0.1"}
    slurm |= inputs_in(tmp_path)

    def run(*behaviours: str, **variables: object):
        ready = tmp_path / "ready"
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir()
        told = folder / "told"
        told.unlink(missing_ok=True)
        env = slurm | {"READY": ready, "BEHAVIOURS": " ".join(behaviours), "OUTPUT_DIR": tmp_path / "out"} | variables
        done = bash("scripts/slurm/pretrain.sbatch", path=path, **env)
        done.requeued = told.exists() and told.read_text() == f"requeue {number}\n"
        done.state = state
        return done

    yield run
    shutil.rmtree(state, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("others", ["saves_late", "hangs"])
def test_a_signal_after_a_save_requeues_the_job_whichever_node_ends_first(job, others):
    run = job("saves", others, SIGNAL="SIGUSR1", WAIT=3)
    assert run.requeued and run.returncode == 85, run.stderr
    assert not run.state.exists()


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["fails", "is_killed"])
def test_a_node_that_fails_ends_the_job_at_once_and_it_is_not_requeued(job, failure):
    # The other node still loads: at srun's SIGTERM it says that nothing is trained yet, as at SLURM's own.
    run = job("loads", failure)
    assert not run.requeued and run.returncode == (3 if failure == "fails" else 137), run.stderr
    assert not run.state.exists()


def test_a_run_that_ends_is_not_requeued_and_its_tasks_are_torchruns_with_one_meeting_point(job, tmp_path):
    run = job("ends", "ends", MASTER_ADDR="")
    assert run.returncode == 0 and not run.requeued and not run.state.exists()
    assert "--export=ALL\n" in (tmp_path / "ready/options").read_text()
    command = run.stdout.replace("\\\n", " ")
    assert "-m torch.distributed.run --nnodes 2 --nproc_per_node 8 --node_rank 1" in " ".join(command.split())
    assert "--master_addr node-7 " in command


@pytest.mark.slow
def test_a_job_always_signalled_before_its_first_step_is_given_up(job):
    runs = [job("loads", "loads", SIGNAL="SIGUSR1") for _ in range(4)]
    assert [run.requeued for run in runs] == [True, True, True, False]
    assert runs[-1].returncode == 2 and "give more time (sbatch --time=...)" in runs[-1].stderr
    assert not runs[-1].state.exists()
