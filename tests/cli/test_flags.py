"""The trainer's command line: its frozen list of flags, and what it refuses."""

import pytest

from llava.model.multimodal_projector.norm import NORM_FIELDS
from llava.train import arguments
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments, parse_flags

REQUIRED = ["--model_name_or_path", "x", "--output_dir", "y"]
# The flags of this tree besides the norm's. A new one replaces an old one: CONTRIBUTING.md says when none is needed.
FROZEN = {
    ModelArguments: "model_name_or_path plugin version attn_implementation freeze_backbone tune_mm_mlp_adapter "
    "freeze_mm_mlp_adapter unfreeze_mm_vision_tower mm_tunable_parts vision_tower mm_vision_select_layer "
    "mm_vision_select_feature pretrain_mm_mlp_adapter mm_projector_type mm_patch_merge_type "
    "mm_use_im_start_end mm_use_im_patch_token",
    DataArguments: "data_path image_folder eval_data_path eval_image_folder on_bad_record "
    "data_cache_dir image_aspect_ratio "
    "image_grid_pinpoints label_masking lazy_preprocess is_multimodal",
    TrainingArguments: "lr_scheduler_type warmup_ratio mm_projector_lr mm_vision_tower_lr model_max_length "
    "group_by_modality_length length_group_window loss_reduction "
    "lora_enable lora_r lora_alpha lora_dropout "
    "lora_weight_path bits activation_checkpointing "
    "gradient_checkpointing use_liger_kernel remove_unused_columns padding_free max_tokens_per_micro_batch "
    "hang_timeout compile_layers save_strategy cache_dir "
    "evaluation_strategy telemetry_steps profile_steps",
}


@pytest.mark.parametrize("owner", FROZEN, ids=lambda owner: owner.__name__)
def test_the_command_line_is_frozen(owner):
    own = {name for cls in owner.__mro__ if cls.__module__.startswith("llava.") for name in cls.__annotations__}
    assert own - set(NORM_FIELDS) == set(FROZEN[owner].split())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["--learning_rat", "1"], "error: unrecognized arguments: --learning_rat 1 (--help"),
        (["--learning_rate", "abc"], "argument --learning_rate/--learning-rate: invalid float value: 'abc'"),
        (["--save_strategy", "best"], "argument --save_strategy/--save-strategy: invalid choice: 'best'"),
        (["--no_dataloader_in_order"], "--dataloader_in_order False: this trainer does not take the flag"),
    ],
)
def test_wrong_flag_is_named_in_one_line(argument, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags([*REQUIRED, *argument])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("installed", "reports_to"), [(True, ["tensorboard"]), (False, [])])
def test_auto_reports_to_tensorboard_where_the_python_that_trains_has_it(monkeypatch, installed, reports_to):
    monkeypatch.setattr(arguments, "is_tensorboard_available", lambda: installed)
    assert parse_flags([*REQUIRED, "--report_to", "auto"])[2].report_to == reports_to


def test_spellings_of_llavas_scripts_and_of_the_library_are_taken():
    words = ["--evaluation_strategy", "no", "--per_device_eval_batch_size", "4", "--lazy_preprocess", "True"]
    words += ["--gradient_checkpointing", "True", "--mm_use_im_start_end", "False", "--max-steps", "7", "--bf16"]
    words += ["--no_padding_free", "--no-lazy-preprocess", "--local_rank=0", "--mm_patch_merge_type", "flat"]
    _, _, training = parse_flags([*REQUIRED, *words])
    assert (training.max_steps, training.bf16, training.padding_free) == (7, True, False)
    assert training.activation_checkpointing is True
