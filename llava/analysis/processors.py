"""Makes a transformers model's inputs of pictures and prompts by its saved processor, also without torchvision."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoProcessor, processing_utils
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.video_processing_auto import get_video_processor_config
from transformers.utils import is_torchvision_available

from llava.analysis.probe import Area, Batch
from llava.analysis.samples import PicturePrompt
from llava.families import Family


class VideoSettings(ImageProcessingMixin):
    """Replaces a processor's video part, which needs torchvision: its saved settings; a few processors read them.

    PyPI has only torchvision's build for CUDA, which cannot be imported next to a CPU build of PyTorch.
    """

    model_input_names = ()

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> "VideoSettings":
        """Of a folder or hub id."""
        return cls(**get_video_processor_config(path))


def load_processor(path: str, trust: bool = False) -> Any:
    """The processor saved with a model; its video part is `VideoSettings` where torchvision is missing.

    Where torchvision is there, transformers resizes with it, and pixels of some families differ by one of 256 levels.

    Args:
        trust: its repository's code may run.

    Raises:
        ImportError: a package is missing; names it.
        ValueError: the folder has no processor of pictures and text.
    """
    stand_in = {} if is_torchvision_available() else {"video_processor": (__name__, VideoSettings.__name__)}
    kind = {"video_processor": ImageProcessingMixin.__name__} if stand_in else {}
    loaders = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING._MAPPING_NAMES
    with patch.dict(loaders, stand_in), patch.dict(processing_utils.MODALITY_TO_BASE_CLASS_MAPPING, kind):
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust)
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"--model {path}: no processor of pictures and text is saved with it (preprocessor_config.json), found a "
            f"{type(processor).__name__}"
        )
    if not getattr(processor, "chat_template", None):
        processor.chat_template = getattr(processor.tokenizer, "chat_template", None)
    return processor


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


def seen_area(image_processor: Any, size: tuple[int, int], pads: bool = False) -> Area:
    """The area of a picture of width and height `size` that the encoder's grid of patches covers.

    Args:
        image_processor: of transformers, which may pad the picture, and take a crop of its middle.
        pads: the picture is padded to a square before the processor gets it.
    """
    if pads or (getattr(image_processor, "do_pad", False) and hasattr(image_processor, "pad_to_square")):
        seen = (max(size), max(size))
    else:
        seen = size
    if getattr(image_processor, "do_center_crop", False):
        crop, scaled = image_processor.crop_size, image_processor.size
        short = scaled.get("shortest_edge")
        across, along = [short / min(seen)] * 2 if short else (scaled["width"] / seen[0], scaled["height"] / seen[1])
        seen = crop["width"] / across, crop["height"] / along
    left, top = ((1 - part / length) / 2 for part, length in zip(seen, size, strict=True))
    return left, top, 1 - left, 1 - top


def chat(sample: PicturePrompt) -> list[dict[str, Any]]:
    """The sample as the one-turn conversation that processors take, with the picture first."""
    content: list[dict[str, Any]] = [{"type": "text", "text": sample.prompt}]
    if sample.image is not None:
        content.insert(0, {"type": "image", "image": sample.image})
    return [{"role": "user", "content": content}]
