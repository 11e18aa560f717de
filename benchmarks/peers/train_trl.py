"""TRL's SFTTrainer: python train_trl.py JOB.json, in TRL's environment.

Options: `sampler` (sequential, or batch_rebalance, which balances a step's ranks by length), `attention`.
"""

import torch
from datasets import Dataset, Image, Sequence
from recording import laid_out, read_records, run, training_flags
from transformers import AutoProcessor, LlavaForConditionalGeneration
from trl import SFTConfig, SFTTrainer


def main(job: dict) -> None:
    options = job["options"]
    records = read_records(job)
    for record in records:  # TRL itself puts the image token where the chat template wants it
        for message in record["messages"]:
            message["content"] = message["content"].replace("<image>\n", "").replace("<image>", "")
    sampler = options.get("sampler", "sequential")
    if sampler == "batch_rebalance":
        records = laid_out(records)
    dataset = Dataset.from_list(records).cast_column("images", Sequence(Image()))
    attention = options.get("attention", "sdpa")
    model = LlavaForConditionalGeneration.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=attention
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(job["stage"] == "finetune" or "multi_modal_projector" in name)
    config = SFTConfig(
        **training_flags(job),
        max_length=None,
        assistant_only_loss=True,
        train_sampling_strategy=sampler,
        length_column_name="length",
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(job["model"]),
    )
    trainer.train()


if __name__ == "__main__":
    run(main)
