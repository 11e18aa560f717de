"""The trainer's flags for the tiny models, and runs by its own parts."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from llava.constants import IMAGE_TOKEN_INDEX
from llava.model.attention import SEGMENTS
from llava.model.builder import load_pretrained_model
from llava.train import train as train_module
from llava.train.arguments import TrainingArguments
from llava.train.checks import checked_eval_records, checked_records
from llava.train.telemetry import LOG_FILE

ALL_PARTS = "mm_vision_tower,mm_mlp_adapter,mm_language_model"
LM_AND_PROJECTOR = "mm_mlp_adapter,mm_language_model"
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "mm_tunable_parts": LM_AND_PROJECTOR}


def flags(tiny, output_dir, stage: int, model="llama", tower="siglip", norm="gwc_layernorm", **overrides) -> list[str]:
    """The trainer's command line for two steps of a stage; None leaves a flag out."""
    values = {
        "model_name_or_path": tiny / model,
        "vision_tower": tiny / tower,
        "version": "chatml",
        "data_path": tiny / "data" / ("pretrain.json" if stage == 1 else "finetune.json"),
        "image_folder": tiny / "data" / "images",
        "output_dir": output_dir,
        "mm_projector_norm": norm,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    values |= {"tune_mm_mlp_adapter": True} if stage == 1 else {"mm_tunable_parts": ALL_PARTS}
    return [x for k, v in (values | overrides).items() if v is not None for x in (f"--{k}", str(v))]


def run(*args, **kwargs):
    """Trains and returns the weights and config of the final folder."""
    argv = flags(*args, **kwargs)
    train_module.train(argv)
    folder = argv[argv.index("--output_dir") + 1]
    return load_file(f"{folder}/model.safetensors"), json.loads(Path(folder, "config.json").read_text())


def training_arguments(tmp_path, **overrides) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), report_to="none", **overrides)


def build(argv: list[str]):
    """(model, trainer) before the first step, from the entry point's own parts."""
    parsed = train_module.parse_arguments(argv)
    train_module.check_flags(*parsed)
    train_module.set_seed(parsed[2].seed)
    model = train_module.build_model(*parsed)
    version, path, max_length = parsed[0].version, parsed[0].model_name_or_path, parsed[2].model_max_length
    records, _ = checked_records(version, *parsed[1:])
    eval_records = checked_eval_records(version, *parsed[1:], records)
    settings = train_module.run_settings(*parsed, records, train_module.training_tokenizer(path, max_length, None))
    return model, train_module.build_trainer(model, records, *parsed, eval_records=eval_records, settings=settings)


def fit(argv: list[str]):
    """Trains, writes the final folder and returns the model that was trained."""
    model, trainer = build(argv)
    finish(trainer)
    return model.eval()


def finish(trainer) -> None:
    trainer.train()
    trainer.save_state()
    trainer.save_model()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    """The logits for two prompts with an image each [2, S', C]."""
    side = model.get_vision_tower().config.image_size
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, IMAGE_TOKEN_INDEX, 7, 8, 9], [3, 4, IMAGE_TOKEN_INDEX, 11, 12]])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), images=images).logits.float()


@torch.no_grad()
def greedy_tokens(model) -> list[int]:
    """What the model says to an image and three tokens."""
    side = model.get_vision_tower().config.image_size
    image = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[5, IMAGE_TOKEN_INDEX, 7, 8]])
    return model.eval().generate(ids, images=image, do_sample=False, max_new_tokens=12, min_new_tokens=12)[0].tolist()


def rotary_frequencies(model) -> dict[str, torch.Tensor]:
    """Copies of all buffers with rotary frequencies, of decoder and tower."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def loaded(folder, dtype):
    """The model of a final folder in a type, with the attention of training: other kinds round differently."""
    options = {"device": "cpu", "torch_dtype": dtype, "attn_implementation": SEGMENTS}
    return load_pretrained_model(str(folder), None, "anything", **options)[1]


def load(path, base):
    """The model of a checkpoint folder, on its base if that is given."""
    return load_pretrained_model(str(path), base and str(base), "anything", device="cpu")[1]


def logged(folder: Path, key: str = "loss") -> list[dict]:
    """The lines of a run's log that have `key`."""
    lines = map(json.loads, (folder / LOG_FILE).read_text().splitlines())
    return [line for line in lines if key in line]


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run."""
    return [line["loss"] for line in logged(folder)]


def stopped(whole: Path, step: int, folder: Path) -> None:
    """Copies what a run would have left that was killed some steps after the checkpoint of `step`."""
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    shutil.copy(whole / LOG_FILE, folder)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether the tensors are equal by name, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
