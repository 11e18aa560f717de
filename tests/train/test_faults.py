"""What happens to a run when something breaks, in one process; tests/nightly/chaos/run.sh breaks real processes."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_files import write_without_targets
from paths import ROOT
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, write_tiny
from training import LORA, build, flags, logged, same
from transformers import TrainerCallback, TrainerState

from llava.compare.planned import DIVERGED
from llava.train import checkpoint
from llava.train import train as train_module
from llava.train.arguments import TrainingArguments
from llava.train.checkpoint import COMPLETE, check_settings, find_checkpoint, folder_faults, load_weights
from llava.train.llava_trainer import LLaVATrainer, NonFiniteError, poisoned
from llava.train.run_record import write_settings
from llava.train.telemetry import LOG_FILE, JsonlCallback
from llava.utils import failures
from llava.utils.failures import PHASES, REQUEUE_EXIT_CODE, Watchdog
from llava.utils.locks import training_lock

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """An uninterrupted stage-2 run of four steps with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_module.train(flags(tiny, folder, 2, **SAVING))
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """The same run as it stood after its last checkpoint."""
    folder = tmp_path / "copy"
    for step in (2, 4):
        shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    shutil.copy(whole / LOG_FILE, folder)
    return folder


@pytest.fixture
def started(monkeypatch, capsys):
    """A function that runs the process's entry with flags; returns its status and what it printed on stderr."""

    def start(argv):
        monkeypatch.setattr(sys, "argv", ["train_mem.py", *argv])
        with pytest.raises(SystemExit) as ended:
            train_module.main()
        return ended.value.code, capsys.readouterr().err

    return start


def at_step(monkeypatch, step: int, do) -> None:
    """Calls `do(trainer, batches)` when the batches of optimizer step `step` (from 1) have been read."""
    original = LLaVATrainer.get_batch_samples

    def struck(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if self.state.global_step + 1 == step:
            do(self, result[0][0])
        return result

    monkeypatch.setattr(LLaVATrainer, "get_batch_samples", struck)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no marker"])
def test_damaged_checkpoint_is_skipped_with_a_warning_and_never_loaded(copy, caplog, damage):
    file = copy / "checkpoint-4/optimizer.pt"
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        (copy / "checkpoint-4" / COMPLETE).unlink()
    args = TrainingArguments(output_dir=str(copy))
    assert find_checkpoint(args) == copy / "checkpoint-2"
    warning = next(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "checkpoint-4" in warning and (COMPLETE if damage == "no marker" else "optimizer.pt") in warning
    args.resume_from_checkpoint = str(copy / "checkpoint-4")
    with pytest.raises(FileNotFoundError, match="--resume_from_checkpoint .*checkpoint-4: no complete checkpoint"):
        find_checkpoint(args)


@pytest.mark.slow
def test_a_kill_after_the_marker_leaves_the_new_checkpoint_and_the_one_before(tiny, tmp_path, whole, monkeypatch):
    rotate = checkpoint.rotate_checkpoints

    def killed(*args, **kwargs):
        if (tmp_path / "checkpoint-4").exists():
            raise KeyError("killed")
        return rotate(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "rotate_checkpoints", killed)
    argv = flags(tiny, tmp_path, 2, save_total_limit=1, **SAVING)
    with pytest.raises(KeyError, match="killed"):
        train_module.train(argv)
    monkeypatch.undo()
    assert not any(folder_faults(tmp_path / f"checkpoint-{step}") for step in (2, 4))
    train_module.train(argv)
    assert [line["step"] for line in logged(tmp_path)] == [1, 2, 3, 4]
    assert same(weights(tmp_path), weights(whole))


def test_the_checkpoint_of_the_last_step_is_kept_whatever_another_machines_clock_said(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), save_total_limit=1)
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    os.utime(tmp_path / "checkpoint-2", (2**32, 2**32))
    state = SimpleNamespace(global_step=4)
    checkpoint.CheckpointMarker(args, {}).on_save(args, state, None)
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint-4"]


def test_too_small_a_disk_is_refused_before_the_first_step(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "free_gib", lambda folder: 1e-6)
    with pytest.raises(ValueError, match="--output_dir .*per checkpoint.*--save_total_limit"):
        train_module.train(flags(tiny, tmp_path / "run", 2, **SAVING))
    assert not (tmp_path / "run/checkpoint-2").exists()


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ({"save_steps": 0.5}, 2),
        ({"save_steps": 2500}, 2),
        ({"save_strategy": "epoch", "num_train_epochs": 3}, 3),
        ({"save_strategy": "no"}, 0),
    ],
)
def test_room_is_asked_for_as_many_checkpoints_as_the_flags_write(tmp_path, monkeypatch, options, saves):
    monkeypatch.setattr(checkpoint, "checkpoint_bytes", lambda model, args: 2**30)
    monkeypatch.setattr(checkpoint, "model_bytes", lambda model: 0)
    monkeypatch.setattr(checkpoint, "free_gib", lambda folder: saves - 0.5)
    with pytest.raises(ValueError, match=f"about {saves}.00 GiB"):
        checkpoint.check_disk(None, TrainingArguments(output_dir=str(tmp_path), **options), 5000)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of the fixture `tiny` with a model so wide that names and settings hardly count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "hidden_size", 256)
        patch.setitem(SIZES, "intermediate_size", 768)
        return write_tiny(tmp_path_factory.mktemp("wide"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (2, {}), (2, {"bf16": True}), (2, LORA | {"lora_r": 64})],
    ids=["stage 1", "fp32", "bf16", "LoRA"],
)
def test_the_room_for_a_checkpoint_is_known_within_two_percent(wide, tmp_path, monkeypatch, stage, options):
    estimates = []
    original = checkpoint.checkpoint_bytes
    monkeypatch.setattr(checkpoint, "checkpoint_bytes", lambda *args: estimates.append(original(*args)) or estimates[0])
    train_module.train(flags(wide, tmp_path, stage, max_steps=1, save_strategy="steps", save_steps=1, **options))
    real = sum(file.stat().st_size for file in (tmp_path / "checkpoint-1").iterdir())
    assert estimates == [pytest.approx(real, rel=0.02)]


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sides"),
    [
        ({"learning_rate": 0.5}, "learning_rate: checkpoint 0.001, now 0.5"),
        ({"data_path": "pretrain.json"}, "data: checkpoint '24 records, SHA-256 .*, now '24 records, SHA-256"),
        ({"norm": "layernorm"}, "mm_projector_norm: checkpoint 'gwc_layernorm', now 'layernorm'"),
    ],
)
def test_other_settings_are_refused_with_both_sides(tiny, copy, change, sides):
    change = {name: tiny / "data" / value if name == "data_path" else value for name, value in change.items()}
    with pytest.raises(ValueError, match=f"(?s)checkpoint-4 was written by a run with other settings.*{sides}"):
        train_module.train(flags(tiny, copy, 2, **SAVING, **change))


def test_a_run_goes_on_with_moved_files_and_other_rounding_and_names_the_change(tiny, copy, tmp_path, caplog):
    moved = tmp_path / "elsewhere"
    shutil.copytree(tiny / "data", moved)
    shutil.copytree(tiny / "siglip", moved / "siglip")
    shutil.rmtree(copy / "checkpoint-4")
    with (copy / LOG_FILE).open("a") as file:
        file.write('{"step": 3, "lo')  # by a full disk
    options = SAVING | {"data_path": moved / "finetune.json", "image_folder": moved / "images"}
    options |= {"vision_tower": moved / "siglip", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    train_module.train(flags(tiny, copy, 2, **options))
    assert [line["step"] for line in logged(copy)] == [1, 2, 3, 4]
    assert f"{copy / LOG_FILE}: dropping the last line, which was cut off after 15 characters" in caplog.text
    assert "changed within the run: gradient_accumulation_steps: checkpoint 1, now 2" in caplog.text
    assert f"changed within the run: vision_tower: checkpoint '{tiny}/siglip', now '{moved}/siglip'" in caplog.text


def test_a_damaged_line_of_the_log_is_named_with_its_file(tmp_path):
    (tmp_path / LOG_FILE).write_text('{"step": 1}\n{"step": 2, "lo\n')
    args, state = SimpleNamespace(output_dir=tmp_path), TrainerState(global_step=2)
    with pytest.raises(ValueError, match=f"{tmp_path / LOG_FILE}: a line is damaged .*Unterminated"):
        JsonlCallback().on_train_begin(args, state, None)


def test_means_over_micro_batches_do_not_go_on_with_micro_batches_of_another_size(tmp_path):
    settings = {"loss_reduction": "micro_batch_mean", "per_device_train_batch_size": 4, "world_size": 1}
    write_settings(tmp_path, settings)
    check_settings(tmp_path, settings | {"world_size": 2})
    with pytest.raises(ValueError, match="per_device_train_batch_size would make it another run"):
        check_settings(tmp_path, settings | {"per_device_train_batch_size": 2})


def test_checkpoint_that_lacks_a_weight_is_not_loaded(tiny, tmp_path):
    model = train_module.build_model(*train_module.parse_arguments(flags(tiny, tmp_path, 2)))
    model.save_pretrained(tmp_path)
    load_weights(tmp_path, model)
    tensors = weights(tmp_path)
    del tensors["model.mm_projector.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path} does not hold .*weights: 1 differ, model.mm_projector.0"):
        load_weights(tmp_path, model)


# --- folders that hold a run already ----------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of every file, except error reports."""
    files = [f for f in folder.rglob("*") if f.is_file() and failures.FOLDER not in f.parts]
    return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in files}


FINISHED = {
    "stage 1, epochs": (1, {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"}),
    "LoRA": (2, SAVING | LORA),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FINISHED)
def test_finished_run_is_recognised_and_nothing_is_written(tiny, tmp_path, caplog, kind):
    stage, options = FINISHED[kind]
    argv = flags(tiny, tmp_path / "run", stage, **options)
    train_module.train(argv)
    before = snapshot(tmp_path / "run")
    for again in (argv, [*argv, "--resume_from_checkpoint", "True"]):
        caplog.clear()
        caplog.set_level("INFO")
        train_module.train(again)
        assert snapshot(tmp_path / "run") == before
        steps = logged(tmp_path / "run")[-1]["step"]
        (said,) = [r.getMessage() for r in caplog.records if "this run is finished" in r.getMessage()]
        assert f"{tmp_path / 'run'}: this run is finished, after {steps} steps; nothing is written" in said


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["before the final save", "model was cut off"])
def test_kill_after_the_last_checkpoint_costs_only_the_final_save(tiny, copy, whole, monkeypatch, killed):
    monkeypatch.setattr(LLaVATrainer, "training_step", lambda *_, **__: pytest.fail("a step was trained"))
    if killed != "before the final save":
        for name in ("config.json", "resume.json"):
            shutil.copy(whole / name, copy)
        (copy / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:-1])
        shutil.copy(whole / COMPLETE, copy)
    log = (copy / LOG_FILE).read_text()
    train_module.train(flags(tiny, copy, 2, **SAVING))
    assert same(weights(copy), weights(whole))
    assert (copy / LOG_FILE).read_text() == log
    assert sorted(f.name for f in copy.iterdir()) == sorted(f.name for f in whole.iterdir())
    assert json.loads((copy / COMPLETE).read_text())["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("state", ["killed before a checkpoint", "not recorded"])
def test_other_settings_replace_nothing(tiny, tmp_path, monkeypatch, state):
    argv = flags(tiny, tmp_path, 2, max_steps=3)
    at_step(monkeypatch, 3, lambda *_: (_ for _ in ()).throw(KeyError("killed")))
    with pytest.raises(KeyError):
        train_module.train(argv)
    monkeypatch.undo()
    if state == "not recorded":
        (tmp_path / "resume.json").unlink()
    (tmp_path / "notes.txt").write_text("mine")
    held = snapshot(tmp_path)
    other = flags(tiny, tmp_path, 2, max_steps=2, learning_rate=0.5)
    said = "learning_rate: there 0.001, now 0.5\n  max_steps"
    said = "a log of .*no resume.json" if state == "not recorded" else said
    with pytest.raises(ValueError, match=f"(?s){said}.*another --output_dir"):
        train_module.train(other)
    assert snapshot(tmp_path) == held


def test_checkpoints_of_another_trainer_are_refused_and_kept(tiny, tmp_path):
    theirs = tmp_path / "checkpoint-24000/optimizer.pt"
    theirs.parent.mkdir()
    theirs.write_text("of a month's training")
    with pytest.raises(ValueError, match="holds checkpoint-24000, but no resume.json"):
        train_module.train(flags(tiny, tmp_path, 2))
    assert theirs.is_file()


def test_a_folder_in_use_is_refused_before_anything_there_is_touched(tiny, tmp_path, monkeypatch, started):
    for file in (f"{failures.FOLDER}/0-rank0.txt", "checkpoint-2/half"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("of the training that runs")
    monkeypatch.setenv("LOCK_SECONDS", "0")
    with training_lock(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        status, error = started(flags(tiny, tmp_path, 2))
        assert status == 2 and sorted(tmp_path.rglob("*")) == before
    assert f"error: --output_dir {tmp_path}: another training writes there (process {os.getpid()} on" in error


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_a_rerun_ends_with_equal_weights(
    tiny, tmp_path, whole, monkeypatch, number, caplog
):
    before = signal.getsignal(number)
    at_step(monkeypatch, 3, lambda *_: [os.kill(os.getpid(), number) for _ in range(2)])  # as terminal and launcher do
    argv = flags(tiny, tmp_path, 2, **SAVING)
    if number == signal.SIGINT:  # torchrun's only rank, which leaves its group
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        argv += ["--deepspeed", "auto"]
    with pytest.raises(SystemExit) as stopped:
        train_module.train(argv)
    assert (
        stopped.value.code == (0 if number == signal.SIGINT else REQUEUE_EXIT_CODE)
        and signal.getsignal(number) == before
    )
    assert not folder_faults(tmp_path / "checkpoint-3") and not (tmp_path / "model.safetensors").exists()
    (line,) = [one.getMessage() for one in caplog.records if "stop" in one.getMessage()]
    name, place = signal.Signals(number).name, tmp_path / "checkpoint-3"
    assert line == f"{name}: stopped after step 3 of 4, checkpoint {place}; rerun the same command to resume"
    monkeypatch.undo()
    caplog.clear()
    train_module.train(argv)
    assert "removing what" not in caplog.text and "missing keys" not in caplog.text
    assert same(weights(tmp_path), weights(whole))


# --- steps that are not finite ----------------------------------------------------------------------------------------


class Trace(TrainerCallback):
    """The trained weights' sum and the learning rate after every step."""

    def __init__(self):
        self.sums, self.rates = [], []

    def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **kwargs):
        self.sums.append(sum(float(p.detach().double().sum()) for p in model.parameters()))
        self.rates.append(lr_scheduler.get_last_lr()[0])


def test_step_that_is_not_finite_changes_nothing_and_names_its_records(tiny, tmp_path, monkeypatch, caplog):
    trace = Trace()
    at_step(monkeypatch, 2, lambda trainer, batches: batches[0]["images"].fill_(torch.nan))
    original = LLaVATrainer.__init__
    monkeypatch.setattr(LLaVATrainer, "__init__", lambda self, **kw: original(self, **kw, callbacks=[trace]))
    train_module.train(flags(tiny, tmp_path, 2, max_steps=3, gradient_accumulation_steps=2))
    assert trace.sums[1] == trace.sums[0] != trace.sums[2]
    assert trace.rates[1] == trace.rates[0] != trace.rates[2]
    message = next(r.getMessage() for r in caplog.records if "skipped step" in r.getMessage())
    beginning = "skipped step 2: gradient norm nan; loss nan on rank 0: "
    assert message.startswith(f"{beginning}{tiny}/data/finetune.json: record ")
    assert message.count("(id 'q") == 4  # of the one micro-batch at fault
    assert [line.get("nonfinite_steps") for line in logged(tmp_path)] == [None, 1, 1]
    losses = [line["loss"] for line in logged(tmp_path)]
    assert losses[1] == losses[0] != losses[2] and math.isfinite(losses[2])


def test_a_step_without_any_target_has_loss_and_gradient_zero_and_is_named(tiny, tmp_path, caplog):
    """The second record's question alone is longer than a sample may be."""
    data = write_without_targets(tiny, tmp_path / "data.json", {1})
    options = {"data_path": data, "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
    train_module.train(flags(tiny, tmp_path / "run", 2, max_steps=3, model_max_length=400, **options))
    lines = logged(tmp_path / "run")
    assert [line["loss"] == line["grad_norm"] == 0 for line in lines] == [False, True, False]
    assert [line.get("steps_without_targets") for line in lines] == [None, 1, 1]
    assert all(math.isfinite(line["loss"]) and "nonfinite_steps" not in line for line in lines)
    assert "no target is left in step 2" in caplog.text and "record 1 (id 'q1')" in caplog.text


def test_too_many_in_a_row_stop_the_run_with_the_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    original = LLaVATrainer.get_batch_samples

    def spoilt(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if self.state.global_step >= 2:
            result[0][0][0]["images"].fill_(torch.inf)
        return result

    monkeypatch.setattr(LLaVATrainer, "get_batch_samples", spoilt)
    monkeypatch.setattr("llava.train.llava_trainer.MAX_NONFINITE_STEPS", 2)
    with pytest.raises(NonFiniteError, match=r"(?s)skipped step 4: .*2 in a row"):
        train_module.train(flags(tiny, tmp_path, 2, **SAVING))
    assert failures.refusal(NonFiniteError()) is None and NonFiniteError.__name__ == DIVERGED  # as a tuning reads it
    assert [f.name for f in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "checkpoint-2").values())


def test_fp16_that_overflows_step_after_step_ends_the_run(tiny, tmp_path):
    _, trainer = build(flags(tiny, tmp_path, 2))
    trainer.args.fp16, trainer.first_step = True, -1
    trainer.loss_scale = lambda: 0.5
    with pytest.raises(NonFiniteError, match="gradients overflow in fp16"):
        trainer.log({"loss": 1.0})


def test_infinite_loss_poisons_a_finite_gradient_and_finite_loss_does_not():
    for logits, finite in ([0.3, -0.7], True), ([0.0, -torch.inf], False):
        gradients = []
        for change in (lambda loss: loss, poisoned):
            x = torch.tensor([logits], requires_grad=True)
            change(torch.nn.functional.cross_entropy(x, torch.tensor([1]))).backward()
            gradients.append(x.grad)
        assert gradients[0].isfinite().all()
        assert torch.equal(*gradients) if finite else gradients[1].isnan().any()


# --- which rank failed first ------------------------------------------------------------------------------------------


def test_reports_sort_by_progress_then_cause_then_time(tmp_path):
    late, lost, cause = (Watchdog(str(tmp_path), rank) for rank in range(3))
    late.enter("computing", 7)
    lost.enter("reading data", 6)
    cause.enter("reading data", 6)
    late.report_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    lost.report_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    cause.report_exception(ValueError("record 7: image x.png cannot be decoded"))
    reports = [f.read_text() for f in sorted((tmp_path / failures.FOLDER).iterdir())]
    assert [text.split(" on ")[0] for text in reports] == ["rank 2", "rank 1", "rank 0"]
    assert "reading data after 6 finished steps" in reports[0] and "record 7" in reports[0]
    assert PHASES.index("saving") < PHASES.index("reading data") < PHASES.index("computing")


def test_rank_without_progress_says_where_it_hangs_and_ends(tmp_path, monkeypatch, capfd):
    ends: list[int] = []
    monkeypatch.setattr(failures.os, "_exit", ends.append)
    watch = Watchdog(str(tmp_path), 1, timeout=0.2)
    watch.enter("computing", 3)
    watch.start()
    for _ in range(4):  # progress keeps it quiet
        time.sleep(0.1)
        watch.enter("computing", 3)
        assert not ends
    time.sleep(0.6)
    watch.stop()
    assert ends and ends[0] == failures.HANG_EXIT_CODE
    assert "test_rank_without_progress" in capfd.readouterr().err
    assert "no progress" in sorted((tmp_path / failures.FOLDER).iterdir())[0].read_text()


@pytest.mark.parametrize(("hang_timeout", "least"), [(0, 10**6), (3600, 4200)])
def test_collectives_wait_longer_than_a_rank_may_hang(tmp_path, hang_timeout, least):
    assert TrainingArguments(output_dir=str(tmp_path), hang_timeout=hang_timeout).ddp_timeout >= least


def test_time_in_which_the_process_was_stopped_is_no_hang():
    code = "from llava.utils.failures import Watchdog; Watchdog(None, 0, timeout=1.0).start(); print('ready'); input()"
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen([sys.executable, "-uc", code], **options)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    process.communicate("\n")
    assert process.returncode == 0


# --- what the user can fix --------------------------------------------------------------------------------------------


def reports(folder: Path) -> dict[str, str]:
    return {f.suffix: f.read_text() for f in (folder / failures.FOLDER).iterdir()}


@pytest.mark.slow
def test_a_picture_that_goes_missing_is_one_line_with_its_record(tiny, tmp_path, monkeypatch, started):
    shutil.copytree(tiny / "data", tmp_path / "data")
    build = train_module.build_model

    def build_and_lose(*args):
        shutil.rmtree(tmp_path / "data/images")
        (tmp_path / "data/images").mkdir()
        return build(*args)

    monkeypatch.setattr(train_module, "build_model", build_and_lose)
    data = {"data_path": tmp_path / "data/pretrain.json", "image_folder": tmp_path / "data/images"}
    status, error = started(flags(tiny, tmp_path / "run", 1, dataloader_num_workers=1, **data))
    line = error.splitlines()[-1]
    assert status == 2 and "Traceback" not in error and line.endswith(f"(traceback: {tmp_path / 'run/errors'})")
    message = re.match(r"error: (\S+: record \d+ \(id 'c\d+'\): image .*\.png does not exist; .*record) \(", line)[1]
    header, said, _, traceback = reports(tmp_path / "run")[".txt"].split("\n", 3)
    assert header.startswith("rank 0 on ") and said == f"error: {message}" and traceback.startswith("Traceback")


def test_a_bug_shows_its_traceback(tiny, tmp_path, monkeypatch, started):
    at_step(monkeypatch, 1, lambda *_: [][0])
    status, error = started(flags(tiny, tmp_path, 2))
    assert status == 1 and "Traceback" in error and error.splitlines()[-1].startswith("IndexError: list index")
    assert "Traceback" in reports(tmp_path)[".txt"] and len(reports(tmp_path)) == 1
