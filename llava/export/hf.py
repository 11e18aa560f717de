"""Writes a checkpoint as a folder of Hugging Face's LLaVA classes: model, tokenizer, processor and chat template.

Without a norm it is a stock LlavaForConditionalGeneration wherever that class computes the same, and with pictures
in crops a LlavaNextForConditionalGeneration; else the folder brings its own code, see `llava.export.remote_code`, and
is loaded with trust_remote_code=True. What was written is loaded again and compared before the folder gets its name.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    BaseImageProcessor,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from llava.anyres import CropRules, has_newline, is_anyres
from llava.asking import choose_template, is_captioner
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.conversation import Conversation, answer_end, conv_templates
from llava.data.turns import moves_pictures
from llava.export import remote_code
from llava.export.card import part_of
from llava.export.chat_template import chat_template
from llava.export.modeling_llava_norm import LlavaNormConfig, LlavaNormForConditionalGeneration
from llava.mm_utils import (
    ADDED_BY_EXPORT,
    encode_chunk,
    follow_umask,
    load_tokenizer,
    process_images,
    save_tokenizer,
    tokenizer_image_token,
)
from llava.model.builder import load_as_stored, read_config
from llava.model.context import context_length
from llava.model.decoding import token_ids_alone, unused
from llava.model.hf_folder import CARRIED, NEXT, ROWS, STOCK, WITH_NORM, hf_names
from llava.model.language_model.families import decoder_of
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.multimodal_encoder.towers import Siglip2VisionTower, VisionTower
from llava.model.multimodal_projector.builder import PROJECTOR_TYPES, find_projector
from llava.utils.commands import DTYPES, add_plugin_argument
from llava.utils.plugins import registered

logger = logging.getLogger(__name__)

NEEDS_TRUST = (
    "gelu, and layers that the library's own LLaVA classes lack: load this folder by AutoModelForImageTextToText with "
    "trust_remote_code=True"
)
"""The activation that classes without our code look up, and do not find."""
CLASSES = {
    STOCK: (LlavaConfig, LlavaForConditionalGeneration),
    NEXT: (LlavaNextConfig, LlavaNextForConditionalGeneration),
    WITH_NORM: (LlavaNormConfig, LlavaNormForConditionalGeneration),
}
"""Config and model of each `model_type` that is written."""
TOLERANCE = 1e-5
"""Largest difference of a logit after the round trip, in units of the largest logit, or of 1 if that is smaller."""
_PREFIXED = ("clip_vision_model", "siglip_vision_model", "siglip2_vision_model")
"""Towers whose parameters have `vision_model.` before their names in files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_plugin_argument(parser)
    parser.add_argument("--model-path", required=True, help="checkpoint folder or hub id")
    template = "conversation template (default: the one that the checkpoint was trained with)"
    parser.add_argument("--conv-mode", choices=list(conv_templates), metavar="TEMPLATE", help=template)
    parser.add_argument("--output-dir", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the written weights (default: the checkpoint's)")


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    export(args.model_path, args.output_dir, args.dtype, args.conv_mode)


def export(model_path: str, output_dir: Path, dtype: str | None = None, conv_mode: str | None = None) -> None:
    """Writes the folder, which appears only when it is complete and computes what the checkpoint does.

    The comparison is made in fp32 and takes four bytes of memory per weight.

    Raises:
        ValueError: there is no whole checkpoint, it has a part that the format has no place for, or `output_dir` holds
            something else.
        RuntimeError: the folder computes something else; nothing is left of it.
    """
    config = exportable_config(model_path)
    template = answering_template(config, model_path, conv_mode)
    image_first = moves_pictures(config)
    if not getattr(config, "mm_conv_version", None):
        config.mm_label_masking = "upstream" if image_first else "assistant"  # which the name of a template would hide
    config.mm_conv_version = conv_mode or config.mm_conv_version
    with new_folder(output_dir) as folder:
        model = load_as_stored(model_path, config, dtype).eval()
        tokenizer = load_tokenizer(model_path)
        image_token = add_image_token(tokenizer)
        fields = config_fields(model, image_token, max(model.config.vocab_size, image_token + 1))
        tokenizer.model_max_length = context_length(model.config)
        jinja = chat_template(template, tokenizer, fields["model_type"] != NEXT, image_first)
        write_tokenizer(tokenizer, folder, jinja)
        image_processor = load_image_processor(model_path, model.get_vision_tower())
        write_processor(image_processor, fields, model.crop_rules(), folder)
        write_model(model, fields, folder)
        generation_config(model, tokenizer, template).save_pretrained(folder)
        if fields["model_type"] == WITH_NORM:
            (folder / f"{remote_code.NAME}.py").write_text(remote_code.code())
        if note := unused(model_path, model.file_decoding):
            logger.warning("%s; pass them to generate", note)
        check_written(folder, model, tokenizer, image_processor)
    logger.info("%s written: %s in %s", output_dir.absolute(), fields["architectures"][0], fields["dtype"])
    if fields["model_type"] == NEXT:
        logger.warning("one picture per prompt: transformers' LLaVA-NeXT cuts each of several (docs/export.md)")


@contextlib.contextmanager
def new_folder(output_dir: Path) -> Iterator[Path]:
    """Yields a folder beside `output_dir` to write into, which takes the name `output_dir` when it is complete.

    Raises:
        ValueError: `output_dir` is not empty, or another export writes it.
        OSError: the disk is full.
    """
    target = output_dir.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"--output-dir {output_dir}: already there and not an empty folder; give another one")
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"{partial}: left by an export that was killed, or written by one now; remove it") from None
    try:
        yield partial
        partial.replace(target)
    except Exception as error:  # safetensors has an error of its own for it
        if "No space left" not in str(error):
            raise
        raise OSError(
            f"--output-dir {output_dir}: its disk is full; make room, nothing of the export is left"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.no_grad()
def check_written(
    folder: Path,
    model: LlavaMetaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    image_processor: BaseImageProcessor | None,
) -> None:
    """Loads what was written, and compares pixels and logits of a prompt with a picture; turns `model` to fp32.

    Raises:
        RuntimeError: they differ.
    """
    side = model.crop_rules().crop_side
    noise = torch.randint(256, (side, 2 * side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    picture = Image.fromarray(noise.numpy())
    ids = tokenizer_image_token("A picture: <image>\nWhat is in it?", tokenizer)
    pixels = process_images([picture], image_processor, model.config)
    rows = model.config.vocab_size
    expected = model.float()(input_ids=torch.tensor([ids]), images=pixels, image_sizes=[picture.size]).logits
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True, backend="pil")
    inputs = processor(images=picture, text=DEFAULT_IMAGE_TOKEN, return_tensors="pt")
    visual = [token for token in inputs.pop("input_ids")[0].tolist() if token == processor.image_token_id]
    inputs.pop("attention_mask")
    prompt = [token for i in ids for token in (visual if i == IMAGE_TOKEN_INDEX else [i])]
    if not torch.equal(inputs["pixel_values"].flatten(), torch.as_tensor(pixels).flatten()):
        raise RuntimeError(f"{folder}: its processor makes other pixels than the checkpoint's; report this")
    theirs = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    found = theirs(input_ids=torch.tensor([prompt]), **inputs).logits[..., :rows]
    difference = (found - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{folder}: its logits differ from the checkpoint's by {difference:.1e}, expected at most {TOLERANCE}; "
            "use the checkpoint as it is, and report this"
        )


# --- what is refused --------------------------------------------------------------------------------------------------


def exportable_config(model_path: str) -> PretrainedConfig:
    """The checkpoint's config; raises ValueError where `export` does."""
    if (part := part_of(Path(model_path))) != "whole":
        merge = f"merge it first: python -m llava.model.merge_lora --model-path {model_path} --save-model-path FOLDER"
        faults = {"lora": f"a LoRA folder; {merge}", "projector": "a stage-1 folder, which has a projector alone"}
        raise ValueError(f"--model-path {model_path}: {faults[part]}; expected a whole checkpoint")
    config = read_config(model_path)
    if not (getattr(config, "mm_vision_tower", None) or getattr(config, "mm_vision_config", None)):
        raise ValueError(
            f"--model-path {model_path}: a language model without a vision tower; expected a LLaVA checkpoint"
        )
    tower = (getattr(config, "mm_vision_config", None) or {}).get("model_type")
    norm = getattr(config, "mm_projector_norm", None)
    if own := {f"norm {norm}", f"tower {tower}", f"decoder {config.model_type}"} & registered:
        raise ValueError(
            f"--model-path {model_path}: its {', '.join(sorted(own))} is code of your own, which this format cannot "
            "carry; share the checkpoint as it is, with the file for --plugin"
        )
    projector_depth(config, model_path)
    return config


def answering_template(config: PretrainedConfig, model_path: str, conv_mode: str | None) -> Conversation:
    """The template of `--conv-mode`, or else the checkpoint's; raises ValueError for a checkpoint of stage 1."""
    template = choose_template(config, model_path, conv_mode)
    recorded = getattr(config, "mm_conv_version", None) or conv_mode
    if is_captioner(template) or is_captioner(choose_template(config, model_path, recorded)):
        raise ValueError(
            f"--model-path {model_path}: of stage 1 (template plain), which answers no questions; export stage 2"
        )
    return template


def projector_depth(config: PretrainedConfig, model_path: str = "") -> int:
    """Number of linear layers in the checkpoint's projector, with a GELU between each two.

    Raises:
        ValueError: the exported classes have no such projector.
    """
    row, number = find_projector(config.mm_projector_type)
    depths = {"identity": 0, "linear": 1, "mlpNx_gelu": number}
    name = next(name for name, known in PROJECTOR_TYPES.items() if known is row)
    if name not in depths:
        raise ValueError(
            f"--model-path {model_path}: mm_projector_type={config.mm_projector_type}, which the exported classes do "
            f"not have (they have {', '.join(depths)}); use the checkpoint as it is, by llava.model.builder"
        )
    return depths[name]


def model_type_of(config: PretrainedConfig, tower: VisionTower, depth: int) -> str:
    """The type in `CLASSES` that computes what the checkpoint does; `depth` is the projector's.

    Raises:
        ValueError: no class cuts pictures, or arranges their tokens, as the checkpoint does.
    """
    norm = getattr(config, "mm_projector_norm", "none")
    aspect, merge = getattr(config, "image_aspect_ratio", None), getattr(config, "mm_patch_merge_type", None)
    suffices = (
        (norm, depth) == ("none", 2)
        and not isinstance(tower, Siglip2VisionTower)  # NaFlex takes patches and not pixels
        and getattr(config, "logits_scaling", 1) == 1  # Granite's, which its head applies and not its decoder
    )
    if not (is_anyres(aspect) or has_newline(merge)):
        return STOCK if suffices else WITH_NORM
    if suffices and (aspect, merge) == ("anyres", "spatial_unpad"):
        return NEXT
    raise ValueError(
        f"the checkpoint has image_aspect_ratio={aspect}, mm_patch_merge_type={merge}, mm_projector_norm={norm}: crops "
        "are exported as transformers' LLaVA-NeXT alone, which has anyres with spatial_unpad, two projector layers and "
        "no norm; use the checkpoint as it is, by llava.model.builder"
    )


# --- model ------------------------------------------------------------------------------------------------------------


def config_fields(model: LlavaMetaForCausalLM, image_token: int, rows: int) -> dict[str, Any]:
    """`config.json` of the exported folder; the text embedding has `rows` rows, that of `<image>` included."""
    config, tower = model.config, model.get_vision_tower()
    assert tower is not None  # `exportable_config` refuses models without one
    family = decoder_of(config)
    ours = config.to_diff_dict()  # with the fields that transformers 4 reads
    carried = {k: v for k, v in ours.items() if k.startswith(CARRIED)}
    text = {k: v for k, v in ours.items() if k not in carried}
    text |= {"model_type": family.config.model_type, "architectures": [family.causal_lm.__name__], "vocab_size": rows}
    has_class_token = tower.num_prefix_tokens > 0
    dtype = str(model.dtype).removeprefix("torch.")
    depth = projector_depth(config)
    model_type = model_type_of(config, tower, depth)
    fields = {
        "architectures": [CLASSES[model_type][-1].__name__],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "text_config": text | {"dtype": dtype, "torch_dtype": dtype},
        "vision_config": {k: v for k, v in tower.config.to_dict().items() if k != "_name_or_path"},
        "vision_feature_layer": tower.num_layers_used - tower.config.num_hidden_layers - 1,
        "vision_feature_select_strategy": "default" if has_class_token and tower.select_feature == "patch" else "full",
        "image_token_index": image_token,
        "image_seq_length": tower.num_tokens,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": config.pad_token_id,
        ROWS: config.vocab_size,
        **carried,
    }
    if model_type == NEXT:
        fields["image_grid_pinpoints"] = [[height, width] for width, height in model.crop_rules().grids]
    if model_type == WITH_NORM:
        fields |= {"projector_depth": depth, "auto_map": remote_code.AUTO_MAP, "projector_hidden_act": NEEDS_TRUST}
    return fields


def write_model(model: LlavaMetaForCausalLM, fields: dict[str, Any], folder: Path) -> None:
    """Writes weights and `config.json`; checks that tensors and places in the class match one to one."""
    config_class, model_class = CLASSES[fields["model_type"]]
    tensors = model.state_dict()
    names = hf_names(tensors, model.config)
    tensors = {theirs: tensors[ours] for ours, theirs in names.items()}
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = with_rows(tensors[name], fields["text_config"]["vocab_size"])
    with torch.device("meta"):
        theirs = model_class(config_class.from_dict(fields))
    theirs.load_state_dict(tensors, strict=True, assign=True)
    if fields["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    tensors = {file_name(name, fields): tensor.contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    follow_umask(folder)
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def file_name(name: str, fields: dict[str, Any]) -> str:
    """A parameter's name in the weight files; in a stock folder that of published ones, which all versions read.

    For a class that comes with its folder, the library renames only the vision tower's parameters.
    """
    if fields["vision_config"]["model_type"] in _PREFIXED and name.startswith("model.vision_tower."):
        name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if fields["model_type"] == WITH_NORM:
        return name
    renamed = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}
    prefix = next(prefix for prefix in renamed if name.startswith(prefix))
    return renamed[prefix] + name.removeprefix(prefix)


def with_rows(embedding: torch.Tensor, rows: int) -> torch.Tensor:
    """`embedding` with its mean as further rows, up to `rows`.

    As a row of the head the mean gives the mean logit: it is never the largest, and its probability is below one over
    the number of tokens.
    """
    missing = rows - len(embedding)
    if not missing:
        return embedding
    mean = embedding.mean(dim=0, dtype=torch.float32).to(embedding.dtype)
    return torch.cat([embedding, mean.expand(missing, -1)])


def generation_config(
    model: LlavaMetaForCausalLM, tokenizer: PreTrainedTokenizerBase, template: Conversation
) -> GenerationConfig:
    """The checkpoint's token ids alone, which also stop at the token that closes an answer of the template."""
    settings = token_ids_alone({}, model.generation_config)
    end = answer_end(template)
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    ids = list(encode_chunk(end, tokenizer)[0])
    if len(ids) == 1:
        ends = [*ends, *ids]
    else:
        logger.warning("the template ends answers with %r, several tokens: pass it to generate as stop_strings", end)
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    settings.eos_token_id = ends[0] if len(ends) == 1 else ends
    settings.pad_token_id = tokenizer.pad_token_id
    return settings


# --- tokenizer and processor ------------------------------------------------------------------------------------------


def add_image_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of `<image>`, which is added where the tokenizer has no such token."""
    if DEFAULT_IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_tokens([AddedToken(DEFAULT_IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True)
        tokenizer.init_kwargs[ADDED_BY_EXPORT] = [DEFAULT_IMAGE_TOKEN]
    return tokenizer.convert_tokens_to_ids(DEFAULT_IMAGE_TOKEN)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, template: str) -> None:
    """The tokenizer with its chat template, which pads on the left as generation needs it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # only `init_kwargs` are saved
    tokenizer.chat_template = template
    save_tokenizer(tokenizer, folder)


def write_processor(image_processor: Any, fields: dict[str, Any], rules: CropRules, folder: Path) -> None:
    """The files of the processor whose pixels and visual tokens are the checkpoint's.

    Raises:
        ValueError: transformers' image processor of LLaVA-NeXT would make other crops of pictures.
    """
    crops = bool(getattr(image_processor, "do_center_crop", False))
    names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_resize", "resample", "size")
    settings = {name: plain(getattr(image_processor, name)) for name in names}
    settings |= {
        # LLaVA's own pads pictures to a square first. Both have `crop_size`, which LlavaProcessor reads in any case.
        "image_processor_type": "LlavaImageProcessor" if rules.aspect_ratio == "pad" else "CLIPImageProcessor",
        "do_pad": rules.aspect_ratio == "pad",
        "do_convert_rgb": True,
        "do_center_crop": crops,
        "crop_size": plain(image_processor.crop_size) if crops else settings["size"],
        "processor_class": "LlavaNextProcessor" if rules.is_anyres else "LlavaProcessor",
    }
    settings |= next_settings(settings, rules) if rules.is_anyres else {}
    strategy, patch = fields["vision_feature_select_strategy"], fields["vision_config"]["patch_size"]
    more = fields["image_seq_length"] - (settings["crop_size"]["height"] // patch) ** 2
    processor = {
        "image_token": DEFAULT_IMAGE_TOKEN,
        "patch_size": patch,
        "num_additional_image_tokens": more + (strategy == "default"),
        "vision_feature_select_strategy": strategy,
        "processor_class": settings["processor_class"],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def next_settings(settings: dict[str, Any], rules: CropRules) -> dict[str, Any]:
    """What a `LlavaNextImageProcessor` has instead, whose grids are heights and widths.

    Raises:
        ValueError: crops are resized before they are cut to the tower's size, which it does in another order.
    """
    side = settings["crop_size"]["height"]
    if not settings["do_resize"] or set(settings["size"].values()) != {side}:
        raise ValueError(
            f"image_aspect_ratio={rules.aspect_ratio} with an image processor of size {settings['size']} that crops to "
            f"{side}: transformers' image processor of LLaVA-NeXT makes other pixels; use the checkpoint as it is"
        )
    # Crops have the tower's size already, so that only the scaling into a grid is left, which is bicubic here.
    return {
        "image_processor_type": "LlavaNextImageProcessor",
        "do_pad": True,
        "resample": int(Image.Resampling.BICUBIC),
        "image_grid_pinpoints": [[height, width] for width, height in rules.grids],
    }


def plain(value: Any) -> Any:
    """A size as the dictionary that files hold; anything else as it is."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
