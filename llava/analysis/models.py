"""Loads what `--model` names: our checkpoints and vision-language models of transformers as a probe, and encoders."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoProcessor,
    BaseImageProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    processing_utils,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import get_video_processor_config
from transformers.utils import is_torchvision_available

from llava.analysis.commands import NamedModel
from llava.analysis.probe import Batch, Probe
from llava.analysis.remote_code import load_remote
from llava.analysis.samples import PicturePrompt
from llava.asking import Assistant, is_captioner, load_assistant
from llava.attach import RECORD, load_attached
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.conversation import conv_templates
from llava.families import FAMILIES, Family, family_of, find_parts, output_rows, refuse
from llava.mm_utils import process_images, tokenizer_image_token
from llava.model.language_model.families import LLAVA_CLASSES
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import recorded_base
from llava.model.multimodal_encoder.builder import build_vision_tower, load_image_processor
from llava.model.multimodal_encoder.towers import TOWERS
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.utils import plugins
from llava.utils.commands import DTYPES, add_device_argument

MOONVIT = "moonvit"
"""Not a tower of this tree: its repository has its code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how models are loaded, and where their parts are if the rules do not find them."""
    parser.add_argument("--model-base", help="language model of the stage-1 or LoRA folders among the models")
    template = {"choices": list(conv_templates), "metavar": "TEMPLATE"}
    parser.add_argument("--conv-mode", help="conversation template of our checkpoints", **template)
    add_device_argument(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="precision (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model repository's own code")
    parser.add_argument("--layers-path", help="module path of the LLM's list of layers")
    parser.add_argument("--projector-path", help="module path of the projector")
    parser.add_argument(
        "--vision-path", help="module whose output is the encoder's tokens (default: the projector's input)"
    )
    parser.add_argument("--image-token-id", type=int, help="token id at visual positions")


def load(model: NamedModel, args: argparse.Namespace) -> Probe:
    """The probe of a model that sees pictures, in eval mode.

    Args:
        args: with the flags of `add_arguments`.

    Raises:
        ValueError, OSError: no such model, it has no visual tokens, or a part of it is not found; says how to name it.
    """
    fields = config_fields(model.path, args.trust_remote_code)
    refuse(fields, f"--model {model.path}")
    if is_ours(fields):
        return _load_ours(model, args)
    if not sees(fields, args):
        raise ValueError(
            f"--model {model.path}: has no visual tokens: transformers {transformers.__version__} has no class for "
            f"{fields['model_type']} that sees; if its own code has one, name its projector by --projector-path"
        )
    paths = {"layers": args.layers_path, "projector": args.projector_path, "vision": args.vision_path}
    return _load_library(model, family_of(fields["model_type"], **paths), args)


def config_fields(path: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """The fields of a model's config.json.

    Raises ValueError: there is none.
    """
    message = "it names no model_type"
    try:
        fields = PretrainedConfig.get_config_dict(path, trust_remote_code=trust_remote_code)[0]
    except OSError as error:
        fields, message = {}, str(error).splitlines()[0]
    if "model_type" not in fields:
        raise ValueError(f"--model {path}: no usable config.json ({message}); expected a model's folder or hub id")
    return fields


def is_ours(fields: dict[str, Any]) -> bool:
    """Whether a config is of a LLaVA checkpoint in LLaVA's own format, which this tree's classes load."""
    return fields.get("model_type") in LLAVA_CLASSES or "mm_vision_tower" in fields


def is_encoder(model_type: str) -> bool:
    """Whether a model_type is of an encoder, a plug-in's too; also of one with a text encoder beside it (`clip`)."""
    plugins.load_named()
    return model_type in {MOONVIT, *TOWERS} or f"{model_type}_vision_model" in TOWERS


def sees(fields: dict[str, Any], args: argparse.Namespace) -> bool:
    """Whether a config is of a vision-language model; one of an unknown type is if its projector is named."""
    known = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *FAMILIES}
    return is_ours(fields) or fields.get("model_type") in known or bool(args.projector_path)


def base_of(path: str, args: argparse.Namespace) -> str | None:
    """The language model that a stage-1 or LoRA folder needs beside it; None for a whole checkpoint.

    Raises ValueError: the folder holds a projector alone, and no `--model-base` is given.
    """
    folder = Path(path)
    if not folder.is_dir() or any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    if args.model_base is None and (folder / "adapter_config.json").is_file():
        return recorded_base(path)
    if args.model_base is None and (folder / ADAPTER_FILE).is_file():
        raise ValueError(f"--model {path}: holds a projector alone; name its language model by --model-base")
    return args.model_base


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all special tokens, also of those without a role such as `bos` (`<|vision_start|>`)."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """`device_map` and `dtype` for `from_pretrained`."""
    device = args.device or (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    on_cpu = str(device).startswith("cpu")
    return {"device_map": {"": str(device)}, "dtype": args.dtype or ("float32" if on_cpu else "auto")}


# --- our checkpoints --------------------------------------------------------------------------------------------------


def load_ours(named: NamedModel, args: argparse.Namespace) -> Assistant:
    """One of our checkpoints; its batches are padded on the right."""
    where = placement(args)
    device = where["device_map"][""]
    options = {"device_map": where["device_map"], "device": device, "torch_dtype": where["dtype"]}
    assistant = load_assistant(named.path, base_of(named.path, args), args.conv_mode, **options)
    assistant.model.config.tokenizer_padding_side = "right"
    return assistant


def _load_ours(named: NamedModel, args: argparse.Namespace) -> Probe:
    assistant = load_ours(named, args)
    model, tokenizer = assistant.model, assistant.tokenizer

    def prepare(sample: PicturePrompt) -> Batch:
        return our_batch(model, [our_prompt(sample, assistant)], [sample.image], assistant.image_processor)

    parts = find_parts(model, Family(), IMAGE_TOKEN_INDEX)
    return Probe(named.name, model, parts, prepare, special_ids(tokenizer))


def our_prompt(sample: PicturePrompt, assistant: Assistant) -> torch.Tensor:
    """`input_ids` [S] of a question about a picture, with one placeholder for it; a captioner gets no template."""
    if is_captioner(assistant.template):
        return tokenizer_image_token(DEFAULT_IMAGE_TOKEN + sample.prompt, assistant.tokenizer, return_tensors="pt")
    return assistant.prompt_ids([{"from": "human", "value": f"{DEFAULT_IMAGE_TOKEN}\n{sample.prompt}"}], [sample.image])


def our_batch(
    model: LlavaMetaForCausalLM,
    prompts: list[torch.Tensor],
    pictures: Sequence[Image.Image],
    image_processor: BaseImageProcessor | None,
) -> Batch:
    """A batch of prompts with placeholders; its `input_ids` are laid out as the model lays out the tokens.

    Args:
        prompts: each with at most one placeholder.
        pictures: one per placeholder in reading order.
    """
    device, rules = model.device, model.crop_rules()
    widths = iter([rules.visual_tokens(rules.picture(picture.size)) for picture in pictures])
    expanded = []
    for ids in prompts:
        width = [next(widths) if token == IMAGE_TOKEN_INDEX else 1 for token in ids.tolist()]
        expanded.append(ids.repeat_interleave(torch.tensor(width)))
    ids, mask = padded(prompts)
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "images": None}
    if pictures:
        pixels = process_images(list(pictures), image_processor, model.config)
        inputs["images"] = pixels.to(device) if torch.is_tensor(pixels) else [crops.to(device) for crops in pixels]
        inputs |= {"image_sizes": [picture.size for picture in pictures]} if rules.is_anyres else {}
    spliced, spliced_mask = padded(expanded)
    return Batch(inputs, spliced.to(device), spliced_mask.to(device))


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different length as [B, S] with zeros on the right, and a mask [B, S] bool that is False at the zeros."""
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)


# --- any model of transformers ----------------------------------------------------------------------------------------


def _load_library(named: NamedModel, family: Family, args: argparse.Namespace) -> Probe:
    auto_class, where = getattr(transformers, family.auto_class), placement(args)
    if RECORD in config_fields(named.path, args.trust_remote_code):
        model = load_attached(named.path, **where)
    elif family.own_code:
        requires_trust(named.path, args.trust_remote_code)
        model = load_remote(named.path, auto_class, where["device_map"][""], where["dtype"])
    else:
        model = auto_class.from_pretrained(named.path, trust_remote_code=args.trust_remote_code, **where)
    parts = find_parts(model.eval(), family, args.image_token_id)
    if not any(parameter.any() for parameter in parts.projector.parameters()):
        raise ValueError(
            f"--model {named.path}: every weight of its projector is zero, so visual tokens have no direction"
        )
    if family.own_inputs:
        tokenizer, prepare = model.text_tokenizer, own_inputs(model)
    else:
        processor = load_processor(named.path, args.trust_remote_code)
        if not (getattr(processor, "chat_template", None) or family.prompt):
            raise ValueError(f"--model {named.path}: its processor has no chat template (chat_template.jinja)")
        tokenizer, prepare = processor.tokenizer, library_inputs(processor, model.device, model.dtype, family)
    return Probe(named.name, model, parts, prepare, special_ids(tokenizer))


def requires_trust(path: str, trust_remote_code: bool) -> None:
    """Raises ValueError where the code of a model's repository may not run."""
    if not trust_remote_code:
        code = ", ".join(sorted(file.name for file in Path(path).glob("*.py"))) or "its repository's files"
        raise ValueError(f"--model {path}: needs its own code ({code}); read it, then pass --trust-remote-code")


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
    processor: Any, device: torch.device, dtype: torch.dtype, family: Family
) -> Callable[[PicturePrompt], Batch]:
    """A function that makes batches of one sample with a transformers processor and its chat template.

    Args:
        dtype: the model's, to which pictures are cast.
    """

    def text_of(sample: PicturePrompt) -> str:
        if not family.prompt or processor.chat_template:
            return processor.apply_chat_template(chat(sample), add_generation_prompt=True)
        return family.prompt.format(prompt=sample.prompt)

    def prepare(sample: PicturePrompt) -> Batch:
        text = text_of(sample)
        bos = processor.tokenizer.bos_token  # a template that writes it must not get a second one
        options = {"add_special_tokens": not (bos and text.startswith(bos)), "return_tensors": "pt"}
        if "mm_token_type_ids" in processor.model_input_names:  # a few processors make them only when told to
            options["return_mm_token_type_ids"] = True
        options["images"] = [sample.image] if family.page_lists else [[sample.image]]
        inputs = processor(text=[text], **options)
        inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items() if k != "labels"}
        inputs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
        return Batch(inputs, inputs["input_ids"], inputs["attention_mask"].bool())

    return prepare


def chat(sample: PicturePrompt) -> list[dict[str, Any]]:
    """The sample as the one-turn conversation that processors take, with the picture first."""
    content = [{"type": "image", "image": sample.image}, {"type": "text", "text": sample.prompt}]
    return [{"role": "user", "content": content}]


def own_inputs(model: Any) -> Callable[[PicturePrompt], Batch]:
    """A function that makes batches of one sample with a model's own `preprocess_inputs` (Ovis 2.5)."""

    def prepare(sample: PicturePrompt) -> Batch:
        ids, pixels, grids = model.preprocess_inputs(messages=chat(sample), add_generation_prompt=True)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "grid_thws": grids}
        inputs = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        return Batch(inputs, inputs["input_ids"], inputs["attention_mask"].bool())

    return prepare


# --- encoders alone ---------------------------------------------------------------------------------------------------


def load_encoder(named: NamedModel, args: argparse.Namespace) -> Callable[[PicturePrompt], torch.Tensor]:
    """A function from a sample to an encoder's tokens [N, E] as an LLM would get them (Table 1).

    They are the patches after layer `--vision-layer`; of MoonViT its result.

    Raises ValueError: there is no such encoder, or it has no such layer; its own code may not run.
    """
    where = placement(args)
    device, dtype = where["device_map"][""], where["dtype"]
    if config_fields(named.path)["model_type"] == MOONVIT:
        requires_trust(named.path, args.trust_remote_code)
        model = load_remote(named.path, AutoModel, device, dtype)
        processor = AutoImageProcessor.from_pretrained(named.path, trust_remote_code=True)

        def encode(inputs: dict) -> torch.Tensor:
            pixels, grids = (inputs[name].to(model.device) for name in ("pixel_values", "image_grid_hws"))
            return output_rows(model(pixels.to(model.dtype), grids))
    else:
        fields = SimpleNamespace(mm_vision_tower=named.path, mm_vision_select_layer=args.vision_layer)
        try:
            with torch.device("meta"):
                tower = build_vision_tower(fields)
            tower.load_pretrained(named.path, dtype)
        except ValueError as error:
            words = str(error).replace("--mm_vision_select_layer", "--vision-layer")
            raise ValueError(words.replace("--vision_tower", "--model")) from error
        tower.to(device).eval()
        processor = load_image_processor(named.path, tower)

        def encode(inputs: dict) -> torch.Tensor:
            return tower(inputs["pixel_values"].to(tower.device, tower.dtype)).flatten(0, 1)

    @torch.no_grad()
    def tokens(sample: PicturePrompt) -> torch.Tensor:
        return encode(processor(images=[sample.image], return_tensors="pt"))

    return tokens
