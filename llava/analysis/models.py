"""Loads what `--model` names as a probe: our checkpoints, and vision-language models of transformers."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from llava.analysis.commands import NamedModel
from llava.analysis.probe import Batch, Probe
from llava.analysis.processors import library_inputs, load_processor, own_inputs
from llava.analysis.remote_code import load_remote, requires_trust
from llava.analysis.samples import PicturePrompt
from llava.analysis.seen_area import WHOLE, seen_area
from llava.asking import choose_template, is_captioner
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.conversation import Conversation, get_template
from llava.data.preprocess import generation_ids
from llava.families import FAMILIES, Family, family_of, find_parts, refuse
from llava.mm_utils import load_tokenizer, process_images, tokenizer_image_token
from llava.model.builder import load_pretrained_model
from llava.model.language_model.families import LLAVA_CLASSES
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import recorded_base
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.utils.code_folders import refuse_shared_variable
from llava.utils.commands import DTYPES, add_device_argument
from llava.utils.pixels import upright

OUR_TYPES = tuple(LLAVA_CLASSES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how models are loaded, and where their parts are if the rules do not find them."""
    parser.add_argument("--model-base", help="language model of the stage-1 or LoRA folders among the models")
    parser.add_argument("--conv-mode", metavar="TEMPLATE", help="conversation template of our checkpoints")
    add_device_argument(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="precision (default: the checkpoint's; float32 on a CPU)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model repository's own code")
    parser.add_argument("--layers-path", help="module path of the LLM's list of layers")
    parser.add_argument("--projector-path", help="module path of the projector")
    parser.add_argument(
        "--vision-path", help="module whose output is the encoder's tokens (default: the projector's input)"
    )
    parser.add_argument("--image-token-id", type=int, help="token id at visual positions")


def check(model: NamedModel, args: argparse.Namespace) -> None:
    """Refuses a model that cannot be measured, as far as its config tells.

    Raises:
        ValueError: no config, a family that has no visual tokens, a missing `--model-base`, or code that may not run.
    """
    fields = config_fields(model.path, args.trust_remote_code)
    refuse(fields, f"--model {model.path}")
    base_of(model.path, args)
    if family_of(fields["model_type"]).own_code:
        requires_trust(model.path, args.trust_remote_code)
    if sees(fields, args) or args.command == "interface-norms":  # which reads encoders and language models too
        return
    reason = "a language model without a vision encoder has no visual tokens"
    if "vision_config" in fields:
        reason = (
            f"transformers {transformers.__version__} has no image-text-to-text class for {fields['model_type']}; if "
        )
        reason += "its own code has one, name its projector by --projector-path"
    raise ValueError(f"--model {model.path}: {reason}")


def load(model: NamedModel, args: argparse.Namespace) -> Probe:
    """The probe of a model that sees pictures, in eval mode.

    Args:
        args: with the flags of `add_arguments`.

    Raises:
        ValueError, OSError: no such model, or a part of it is not found; says how to name it.
    """
    fields = config_fields(model.path, args.trust_remote_code)
    if is_ours(fields):
        return _load_ours(model, args)
    paths = {"layers": args.layers_path, "projector": args.projector_path, "vision": args.vision_path}
    return _load_library(model, family_of(fields["model_type"], **paths), args)


def config_fields(path: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """The fields of a model's config.json.

    Raises ValueError: there is none; or code may run, and others can write where it is loaded from.
    """
    if trust_remote_code:
        refuse_shared_variable("HF_MODULES_CACHE")
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
    return fields.get("model_type") in OUR_TYPES or "mm_vision_tower" in fields


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


def load_ours(
    named: NamedModel, args: argparse.Namespace
) -> tuple[PreTrainedTokenizerBase, LlavaMetaForCausalLM, BaseImageProcessor | None]:
    """Tokenizer, model and image processor of one of our checkpoints; batches are padded on the right."""
    where = placement(args)
    tokenizer, model, image_processor, _ = load_pretrained_model(
        named.path,
        base_of(named.path, args),
        named.name,
        device_map=where["device_map"],
        device=where["device_map"][""],
        torch_dtype=where["dtype"],
    )
    model.config.tokenizer_padding_side = "right"
    return tokenizer, model, image_processor


def _load_ours(named: NamedModel, args: argparse.Namespace) -> Probe:
    tokenizer, model, image_processor = load_ours(named, args)
    template = choose_template(model.config, named.path, args.conv_mode)
    parts = find_parts(model, Family(), IMAGE_TOKEN_INDEX)

    def prepare(samples: Sequence[PicturePrompt]) -> Batch:
        prompts = [our_prompt(sample, tokenizer, template, model.config) for sample in samples]
        pictures = [sample.image for sample in samples if sample.image is not None]
        return our_batch(model, prompts, pictures, image_processor)

    return Probe(named.name, model, parts, prepare, special_ids(tokenizer), lambda i: str(tokenizer.decode([i])))


def our_prompt(
    sample: PicturePrompt, tokenizer: PreTrainedTokenizerBase, template: str | Conversation, config: PretrainedConfig
) -> torch.Tensor:
    """`input_ids` [S] of a question about a picture, with one placeholder for it; a captioner gets no template."""
    template = get_template(template) if isinstance(template, str) else template
    if is_captioner(template):
        start = DEFAULT_IMAGE_TOKEN if sample.image is not None else ""
        return tokenizer_image_token(start + sample.prompt, tokenizer, return_tensors="pt")
    text = f"{DEFAULT_IMAGE_TOKEN}\n{sample.prompt}" if sample.image is not None else sample.prompt
    tags = getattr(config, "mm_use_im_start_end", False)
    return generation_ids([{"from": "human", "value": text}], tokenizer, template, mm_use_im_start_end=tags)


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
    pictures = [upright(picture, getattr(model.config, "image_orientation", "stored")) for picture in pictures]
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
    pads = rules.aspect_ratio == "pad"
    areas = [WHOLE if rules.is_anyres else seen_area(image_processor, picture.size, pads) for picture in pictures]
    return Batch(inputs, spliced.to(device), spliced_mask.to(device), areas)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different length as [B, S] with zeros on the right, and a mask [B, S] bool that is False at the zeros."""
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)


# --- any model of transformers ----------------------------------------------------------------------------------------


def _load_library(named: NamedModel, family: Family, args: argparse.Namespace) -> Probe:
    auto_class, where = getattr(transformers, family.auto_class), placement(args)
    if family.own_code:
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
        tokenizer = model.text_tokenizer if hasattr(model, "text_tokenizer") else load_tokenizer(named.path)
        prepare = own_inputs(model)
    else:
        processor = load_processor(named.path, model.config, args.trust_remote_code)
        if not (getattr(processor, "chat_template", None) or family.prompt):
            raise ValueError(f"--model {named.path}: its processor has no chat template (chat_template.jinja)")
        tokenizer, prepare = processor.tokenizer, library_inputs(processor, model.device, model.dtype, family)
    text = lambda i: tokenizer.decode([i])  # noqa: E731
    return Probe(named.name, model, parts, prepare, special_ids(tokenizer), text, family.one_by_one)
