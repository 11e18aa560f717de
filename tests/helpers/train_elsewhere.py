"""Runs a recipe of examples/ in another trainer's environment and compares what was trained with what was saved.

  python train_elsewhere.py JOB.json, with {"argv": [file or module, flags], "model", "picture", "text", "output"}

Writes `result.json` next to the job: the change of the gain, and whether state and greedy answers of the trained model
equal those of `load_attached`.
"""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import torch
from PIL import Image
from transformers import AutoProcessor, Trainer

import llava
from llava.analysis.models import load_processor
from llava.attach import RECORD, attached_norms, load_attached


def answer(model, inputs) -> list[int]:
    return model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)[0].tolist()


def main() -> None:
    job_file = Path(sys.argv[1])
    job, trainers, init = json.loads(job_file.read_text()), [], Trainer.__init__

    def remember(trainer, *args, **kwargs):
        trainers.append(trainer)
        init(trainer, *args, **kwargs)

    remember.__wrapped__ = init  # trainers look at its parameters
    Trainer.__init__ = remember
    processor = load_processor(job["model"])
    # Both of the library's own would need torchvision, for videos.
    processor.save_pretrained = lambda *_, **__: []
    AutoProcessor.from_pretrained = lambda *_, **__: processor
    # PyPI's torchaudio needs a CUDA build of torch. LLaMA-Factory imports it, but uses it only for audio.
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.argv = job["argv"]
    if job["argv"][0].endswith(".py"):
        runpy.run_path(job["argv"][0], run_name="__main__")
    else:
        runpy.run_module(job["argv"][0], run_name="__main__", alter_sys=True)
    trained = trainers[-1].accelerator.unwrap_model(trainers[-1].model)
    loaded = load_attached(job["output"], dtype=trained.dtype)
    pictures = [[Image.open(job["picture"])]] if job.get("nested") else [Image.open(job["picture"])]
    inputs = processor(images=pictures, text=[job["text"]], return_tensors="pt")
    start = loaded.config.to_dict()[RECORD]["mm_projector_norm_init_gain"]
    states = [model.state_dict() for model in (trained, loaded)]
    result = {
        "gain changed": float((attached_norms(loaded)[0].weight.detach().float() - start).abs().max()) / start,
        "states equal": states[0].keys() == states[1].keys()
        and all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()),
        "answers": [answer(model, inputs) for model in (trained, loaded)],
        "steps": trainers[-1].state.global_step,
        "llava": llava.__file__,
        "loss": [entry["loss"] for entry in trainers[-1].state.log_history if "loss" in entry],
    }
    (job_file.parent / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
