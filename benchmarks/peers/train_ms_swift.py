"""ms-swift's `sft` command: python train_ms_swift.py JOB.json, in its environment.

Option: `attention`.
"""

from recording import run, training_flags
from swift import SftArguments, sft_main
from swift.template import TemplateMeta, register_template
from swift.template.templates.llava import LlavaHfTemplate

PARTS = {
    "pretrain": {"prefix": [], "prompt": ["{{QUERY}}"], "suffix": ["\n"]},
    "finetune": {
        "prefix": [],
        "prompt": ["<|im_start|>user\n{{QUERY}}<|im_end|>\n<|im_start|>assistant\n"],
        "suffix": ["<|im_end|>"],
        "system_prefix": ["<|im_start|>system\n{{SYSTEM}}<|im_end|>\n"],
        "default_system": "You are a helpful assistant.",
    },
}


class BenchTemplate(LlavaHfTemplate):
    """ms-swift's template for LLaVA-1.5, without the line break after the image token, which records have already."""

    def replace_tag(self, media_type, index, inputs):
        return ["<image>"]


def main(job: dict) -> None:
    frozen = job["stage"] == "pretrain"
    parts = PARTS[job["stage"]]
    register_template(TemplateMeta("bench", chat_sep=None, template_cls=BenchTemplate, **parts))
    flags = training_flags(job) | {
        "model": job["model"],
        "model_type": "llava1_5_hf",
        "template": "bench",
        "dataset": [job["records"]],
        "split_dataset_ratio": 0.0,
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "load_from_cache_file": False,
        "tuner_type": "full",
        "freeze_llm": frozen,
        "freeze_vit": frozen,
        "freeze_aligner": False,
        "torch_dtype": "float32",
        "attn_impl": job["options"].get("attention", "sdpa"),
        "device_map": "cpu",
        "add_version": False,
        "max_length": 4096,
    }
    sft_main(SftArguments(**flags))


if __name__ == "__main__":
    run(main)
