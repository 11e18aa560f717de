"""TRL's trainers on pictures, with a norm behind the projector.

  python examples/train_trl.py --method sft --model MODEL --records RECORDS.jsonl --output_dir OUTPUT_DIR

All flags of TRL's SFTConfig, DPOConfig or GRPOConfig follow. A line of RECORDS.jsonl has `images`, a list of paths, and
  sft   `messages`
  dpo   `prompt`, `chosen` and `rejected`, each a list of messages
  grpo  `prompt`, a list of messages, and `answer`, with which completions are compared
A message is {"role": ..., "content": text}; TRL puts the pictures before the first text of the user.
"""

import copy
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch
import trl
from datasets import Image, Sequence, load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, HfArgumentParser

from llava.attach import attach

TRAINERS = {
    "sft": (trl.SFTConfig, trl.SFTTrainer),
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
}


@dataclass
class Arguments:
    """What TRL's configurations do not have."""

    model: str = field(metadata={"help": "Vision-language model: folder or hub id."})
    records: str = field(metadata={"help": "JSON lines, see above."})
    method: str = field(default="sft", metadata={"choices": list(TRAINERS)})
    norm: str = field(default="gwc_layernorm", metadata={"help": "See llava.attach.attach."})
    init: str = field(default="text_norm", metadata={"help": "See llava.attach.attach."})


def likeness(completions: list, answer: list[str], **_: object) -> list[float]:
    """GRPO's reward: how much of a completion is in the answer, and the reverse."""
    texts = [completion[0]["content"] for completion in completions]
    return [SequenceMatcher(None, text, expected).ratio() for text, expected in zip(texts, answer, strict=True)]


def main() -> None:
    method = HfArgumentParser(Arguments).parse_args_into_dataclasses(return_remaining_strings=True)[0].method
    config_class, trainer_class = TRAINERS[method]
    arguments, config = HfArgumentParser((Arguments, config_class)).parse_args_into_dataclasses()
    # In bf16 a gain of 0.02 would be rounded back after every update below 6e-5; --bf16 computes in it all the same.
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32)
    attach(model, arguments.norm, arguments.init)
    options = {}
    if method == "dpo":
        options["ref_model"] = copy.deepcopy(model)  # TRL would load one by its name, without the norm
    if method == "grpo":
        options["reward_funcs"] = likeness
    records = load_dataset("json", data_files=arguments.records, split="train")
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=records.cast_column("images", Sequence(Image())),
        processing_class=AutoProcessor.from_pretrained(arguments.model),
        **options,
    )
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
