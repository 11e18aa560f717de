"""LLaMA-Factory's own `train` command: python train_llamafactory.py JOB.json, in its environment.

Option: `attention`.
Samples are tokenized before the first step, as LLaMA-Factory does; pictures are read as steps need them.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

from recording import run, training_flags

# ruff: noqa: E402
# PyPI's torchaudio needs a CUDA build of torch. LLaMA-Factory imports it, but uses it only for audio.
sys.modules["torchaudio"] = ModuleType("torchaudio")

from llamafactory.data.formatter import StringFormatter
from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.data.template import register_template
from llamafactory.train.tuner import run_exp

TEMPLATES = {
    "pretrain": {
        "format_user": StringFormatter(slots=["{{content}}"]),
        "format_assistant": StringFormatter(slots=["{{content}}\n"]),
    },
    "finetune": {
        "format_user": StringFormatter(
            slots=["<|im_start|>user\n{{content}}<|im_end|>\n<|im_start|>assistant\n"],
        ),
        "format_assistant": StringFormatter(slots=["{{content}}<|im_end|>"]),
        "format_system": StringFormatter(slots=["<|im_start|>system\n{{content}}<|im_end|>\n"]),
        "default_system": "You are a helpful assistant.",
    },
}


def main(job: dict) -> None:
    stage = job["stage"]
    register_template("bench", **TEMPLATES[stage], mm_plugin=get_mm_plugin("llava", image_token="<image>"))
    records = Path(job["records"])
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    dataset = {
        "file_name": records.name,
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": tags,
    }
    arguments = training_flags(job) | {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": job["model"],
        "finetuning_type": "full",
        "freeze_vision_tower": stage == "pretrain",
        "freeze_language_model": stage == "pretrain",
        "freeze_multi_modal_projector": False,
        "dataset": "bench",
        "dataset_dir": str(records.parent),
        "template": "bench",
        "cutoff_len": 4096,
        "overwrite_cache": True,
        "disable_shuffling": True,
        "disable_gradient_checkpointing": True,
        "flash_attn": job["options"].get("attention", "sdpa"),
    }
    (records.parent / "dataset_info.json").write_text(json.dumps({"bench": dataset}))
    run_exp(arguments)


if __name__ == "__main__":
    run(main)
