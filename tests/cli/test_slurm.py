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


@pytest.mark.slow
def test_what_an_earlier_start_left_behind_does_not_requeue_a_failed_one(job):
    run = job("saves", "saves", SIGNAL="SIGUSR1")
    assert run.requeued
    run.state.mkdir()
    (run.state / "saved").touch()
    assert not job("hangs", "fails", KILL_WAIT=1).requeued


def test_a_run_that_ends_is_not_requeued(job):
    run = job("ends", "ends")
    assert run.returncode == 0 and not run.requeued and not run.state.exists()


@pytest.mark.slow
def test_a_job_always_signalled_before_its_first_step_is_given_up(job):
    runs = [job("loads", "loads", SIGNAL="SIGUSR1") for _ in range(4)]
    assert [run.requeued for run in runs] == [True, True, True, False]
    assert runs[-1].returncode == 2 and "give more time (sbatch --time=...)" in runs[-1].stderr
    assert not runs[-1].state.exists()


def test_variables_reach_the_tasks_whatever_sbatch_was_told_to_export(job, tmp_path):
    job("ends", "ends")
    assert "--export=ALL\n" in (tmp_path / "ready/options").read_text()


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_the_batch_files_ask_for_a_signal_in_time_and_may_be_requeued(stage):
    header = (ROOT / f"scripts/slurm/{stage}.sbatch").read_text()
    assert "#SBATCH --signal=USR1@" in header and "#SBATCH --requeue\n" in header
