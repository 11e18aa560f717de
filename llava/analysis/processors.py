"""Makes a transformers model's inputs of pictures and prompts by its saved processor, also without torchvision."""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PretrainedConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.utils import cached_file, is_torchvision_available

from llava.analysis.probe import Batch
from llava.analysis.remote_code import restore_removed_names
from llava.analysis.samples import PicturePrompt
from llava.analysis.seen_area import seen_area
from llava.families import Family

PACKAGES = ("torchvision", "num2words", "timm", "sentencepiece", "tiktoken")
"""Packages that processors of some families need besides transformers' own requirements."""
_VIDEO = "VideoProcessorMixin"  # what transformers calls the class of every video part


def load_processor(path: str, config: PretrainedConfig | None = None, trust: bool = False, auto: Any = None) -> Any:
    """The processor saved with a model; where torchvision is missing, without its video part, which needs it.

    torchvision is not required: PyPI has only its build for CUDA, which cannot be imported next to a CPU build of
    PyTorch. Where it is there, transformers resizes with it, and pixels of some families differ by one of 256 levels.

    Args:
        trust: its repository's code may run.
        auto: the class of transformers that loads it; default `AutoProcessor`.

    Raises:
        ImportError: a package is missing; names it.
        ValueError: the folder has no processor of pictures and text.
    """
    if trust:
        restore_removed_names()
    try:
        kind = None if auto or is_torchvision_available() else _class_of(path, config)
        if kind is not None and "video_processor" in kind.get_attributes():
            processor = _pictures_only(kind).from_pretrained(path)
        else:
            processor = (auto or AutoProcessor).from_pretrained(path, trust_remote_code=trust)
    except (ImportError, ValueError) as error:
        missing = [name for name in PACKAGES if name in str(error).lower() and find_spec(name) is None]
        if missing:
            fits = f" (the build that fits PyTorch {torch.__version__})" if "torchvision" in missing else ""
            needs = f"--model {path}: its processor needs {', '.join(missing)}; install it{fits}"
            raise ImportError(needs) from error
        raise
    if auto is None and not hasattr(processor, "image_processor"):
        raise ValueError(
            f"--model {path}: no processor of pictures and text is saved with it (preprocessor_config.json), found a "
            f"{type(processor).__name__}"
        )
    if auto is None and not getattr(processor, "chat_template", None):
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None)
    return processor


def _class_of(path: str, config: PretrainedConfig | None) -> type | None:
    """The class that the saved files name, or transformers for the model; None where neither does."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if named := _saved(path, name).get("processor_class"):
            return processor_class_from_name(named)
    return PROCESSOR_MAPPING.get(type(config), None)


def _saved(path: str, file_name: str) -> dict[str, Any]:
    file = cached_file(path, file_name, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text()) if file else {}


class VideoSettings(dict):
    """Stands for a processor's video part: its saved settings, some of which a few processors read."""

    model_input_names = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> "VideoSettings":
        """The settings in `processor_config.json` or `video_preprocessor_config.json`."""
        together = _saved(path, "processor_config.json").get("video_processor", {})
        return cls(_saved(path, "video_preprocessor_config.json") | together)


def _pictures_only(kind: type) -> type:
    """A processor class with `VideoSettings` in place of the video part."""

    class PicturesOnly(kind):
        video_processor_class = _VIDEO

        @staticmethod
        def get_possibly_dynamic_module(name: str) -> type:
            return VideoSettings if name == _VIDEO else kind.get_possibly_dynamic_module(name)

    return PicturesOnly


def library_inputs(
    processor: Any, device: torch.device, dtype: torch.dtype | None = None, family: Family | None = None
) -> Callable[[Sequence[PicturePrompt]], Batch]:
    """A function that makes batches with a transformers processor and its chat template.

    Args:
        dtype: the model's, to which pictures are cast; None leaves them as they are.
    """
    family = family or Family()

    def text_of(sample: PicturePrompt) -> str:
        if not family.prompt or processor.chat_template:
            return processor.apply_chat_template(chat(sample), add_generation_prompt=True)
        return family.prompt.format(picture=family.picture if sample.image is not None else "", prompt=sample.prompt)

    def prepare(samples: Sequence[PicturePrompt]) -> Batch:
        texts = [text_of(sample) for sample in samples]
        pictures = [sample.image for sample in samples if sample.image is not None]
        bos = processor.tokenizer.bos_token  # a template that writes it must not get a second one
        options = {"add_special_tokens": not (bos and texts[0].startswith(bos))}
        options |= {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        if "mm_token_type_ids" in processor.model_input_names:  # a few processors make them only when told to
            options["return_mm_token_type_ids"] = True
        if pictures and len(pictures) < len(texts):
            raise ValueError("a batch needs a picture in every sample or in none")
        if pictures:
            options["images"] = pictures if family.page_lists else [[picture] for picture in pictures]
        # A family without a chat template has a processor that wants a picture.
        make = processor if pictures or not family.prompt else processor.tokenizer
        inputs = make(text=texts, **options)
        inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items() if k != "labels"}
        inputs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
        areas = [seen_area(processor.image_processor, picture.size) for picture in pictures]
        return Batch(inputs, inputs["input_ids"], inputs["attention_mask"].bool(), areas)

    return prepare


def chat(sample: PicturePrompt) -> list[dict[str, Any]]:
    """The sample as the one-turn conversation that processors take, with the picture first."""
    content: list[dict[str, Any]] = [{"type": "text", "text": sample.prompt}]
    if sample.image is not None:
        content.insert(0, {"type": "image", "image": sample.image})
    return [{"role": "user", "content": content}]


def own_inputs(model: Any) -> Callable[[Sequence[PicturePrompt]], Batch]:
    """A function that makes batches of one sample with a model's own `preprocess_inputs`."""

    def prepare(samples: Sequence[PicturePrompt]) -> Batch:
        ids, pixels, grids = model.preprocess_inputs(messages=chat(samples[0]), add_generation_prompt=True)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "grid_thws": grids}
        inputs = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return Batch(inputs, inputs["input_ids"], inputs["attention_mask"].bool())

    return prepare
