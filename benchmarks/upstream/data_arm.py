"""One side of data_pipeline.py: turns records into tensors, over and over, and prints samples per second.

Runs in its side's own environment and imports nothing of the other side. It reads lines `<kind> <seconds>` and answers
each with one line of JSON. Kinds are `text` (text-only records), `image_text` and `pixels` (the text or the picture of
records with an image) and `image` (such records as a whole).
"""

import copy
import importlib.machinery
import json
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch


def this_tree(inputs: Path, tokenizer_folder: str):
    """For each kind, this tree's function from a record's index to its tensors."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    from llava.data.dataset import LazySupervisedDataset
    from llava.data.records import load_records
    from llava.mm_utils import load_tokenizer, process_images

    tokenizer = load_tokenizer(tokenizer_folder, model_max_length=4096)
    processor = SiglipImageProcessorPil(size={"height": 384, "width": 384})

    def dataset(name):
        records = load_records(str(inputs / name))
        return LazySupervisedDataset(
            records, tokenizer, "qwen_1_5", processor, str(inputs), "square", 729, 4096, label_masking="upstream"
        )

    text, image = dataset("text.json"), dataset("image.json")
    return {
        "text": text.__getitem__,
        "image_text": lambda i: image.tokenize(i)._asdict(),
        "pixels": lambda i: process_images([image.images.open(image.records[i]["image"])], processor, None),
        "image": image.__getitem__,
    }


def llava_next(inputs: Path, tokenizer_folder: str):
    """The same for LLaVA-NeXT's dataset under the `qwen_1_5` template."""
    # LLaVA-NeXT imports these at the top, for video, other towers, DPO and training; these records do not need them.
    for name in ("deepspeed", "open_clip", "decord", "trl", "trl.trainer", "trl.trainer.utils", "av"):
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        module.VideoReader = module.cpu = module.DPOTrainer = module.DPODataCollatorWithPadding = object
        sys.modules.setdefault(name, module)
    from transformers import AutoTokenizer

    from llava import conversation
    from llava.model.multimodal_encoder.siglip_encoder import SigLipImageProcessor
    from llava.train import train

    conversation.default_conversation = conversation.conv_templates["qwen_1_5"]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, model_max_length=4096, padding_side="right")
    # Its Qwen path unpacks these into exactly two names; later Qwen2.5 tokenizers list more.
    tokenizer._additional_special_tokens = ["<|im_start|>", "<|im_end|>"]
    settings = types.SimpleNamespace(
        image_folder=str(inputs), image_processor=SigLipImageProcessor(), image_aspect_ratio="square",
        is_multimodal=True, mm_use_im_start_end=False,
    )  # fmt: skip
    text, image = (
        train.LazySupervisedDataset(str(inputs / name), tokenizer, settings) for name in ("text.json", "image.json")
    )

    def image_text(index):
        sources = copy.deepcopy([image.list_data_dict[index]["conversations"]])
        sample = train.preprocess(train.preprocess_multimodal(sources, settings), tokenizer, has_image=True)
        return {name: sample[name][0] for name in ("input_ids", "labels")}

    def whole(index):
        sample = image._get_item(index)
        return sample | {"images": sample["image"][0][0][None]}

    name = image.list_data_dict[0]["image"]
    return {
        "text": text._get_item,
        "image_text": image_text,
        "pixels": lambda i: image.process_image(name),
        "image": whole,
    }


def rate(function, count: int, seconds: float) -> float:
    """Samples per second over whole passes that take at least `seconds`."""
    passes, start = 0, time.perf_counter()
    while passes == 0 or time.perf_counter() - start < seconds:
        for index in range(count):
            function(index)
        passes += 1
    return passes * count / (time.perf_counter() - start)


def main() -> None:
    arm, tree, inputs, tokenizer_folder, output = sys.argv[1:]
    sys.path[0] = tree
    answers, sys.stdout = sys.stdout, sys.stderr  # upstream prints, and answers must stay alone
    torch.set_num_threads(1)
    functions = (this_tree if arm == "this_tree" else llava_next)(Path(inputs), tokenizer_folder)
    count = len(json.loads((Path(inputs) / "text.json").read_text()))
    samples = {}
    for index in range(count):
        for kind in ("text", "image"):
            sample = functions[kind](index)
            for name in ("input_ids", "labels", "images") if kind == "image" else ("input_ids", "labels"):
                samples[f"{kind}.{index}.{name}"] = np.asarray(sample[name])
    np.savez(output, **samples)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, seconds = line.split()
        print(json.dumps(rate(functions[kind], count, float(seconds))), file=answers, flush=True)


if __name__ == "__main__":
    main()
