"""Folders as people download them, tiny and random: model, tokenizer and processor files of many families.

The processor's files are written as published folders have them (`preprocessor_config.json`, `processor_config.json`,
`chat_template.jinja`), so that none needs its class to be made, and with it the packages that the class imports.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
import vision_language_models as models
from packaging.version import Version
from tiny_models import byte_tokenizer
from transformers import PreTrainedTokenizerFast
from vision_language_models import IMAGE, TEXT, VISION

SIDE = 16
MEAN = {"image_mean": [0.5] * 3, "image_std": [0.4] * 3}
SQUARE = {"size": {"height": SIDE, "width": SIDE}} | MEAN
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}} | MEAN
CLIP |= {"crop_size": {"height": SIDE, "width": SIDE}}
SIGLIP = {"image_processor_type": "SiglipImageProcessor"} | SQUARE
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "size": {"shortest_edge": 64}} | MEAN
QWEN["size"] |= {"longest_edge": 1024}


@dataclass
class Saved:
    """One family's folder and how an independent run finds what the commands print.

    Attributes:
        model: makes it, with `IMAGE` as the image token's id.
        processor: its class.
        image: `preprocessor_config.json`; without a class, that of the processor's name.
        tokens: the tokenizer's named tokens; the image token gets the id `IMAGE`.
        mark: what the chat template writes for a picture; None where the family has no template.
        settings: `processor_config.json`.
        encoder: a module's path and what its arguments (a dict) and result tell of the encoder's tokens.
        projector: a module's path, whose result is the visual tokens.
        extra: tokens that only have to be there.
        added: layers that get something added to their states on the way in (DeepStack), which are not compared.
    """

    model: Callable[[], torch.nn.Module]
    processor: str
    image: dict[str, Any]
    encoder: tuple[str, Callable]
    projector: str = "model.multi_modal_projector"
    mark: str | None = "<image>"
    tokens: dict[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    settings: dict[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    added: tuple[int, ...] = ()


def tokenizer_of(saved: Saved) -> PreTrainedTokenizerFast:
    """One token per byte; the image token has the id `IMAGE`, the family's others follow."""
    named = saved.tokens
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<unused{i}>" for i in range(IMAGE - len(tokenizer))])
    tokenizer.add_tokens([named["image_token"], *named.values(), *saved.extra], special_tokens=True)
    roles = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **roles, model_specific_special_tokens=named
    )


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with noise on every parameter, so that no two tokens are alike and no part of it is zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def write(saved: Saved, folder) -> torch.nn.Module:
    """Writes the folder; returns the model in it."""
    model = filled(saved.model())
    model.save_pretrained(folder)
    tokenizer_of(saved).save_pretrained(folder)
    image = {"image_processor_type": saved.processor.replace("Processor", "ImageProcessor")} | saved.image
    (folder / "preprocessor_config.json").write_text(json.dumps(image | {"processor_class": saved.processor}))
    (folder / "processor_config.json").write_text(json.dumps(saved.settings | {"processor_class": saved.processor}))
    if saved.mark is not None:
        part = f"{{{{ '{saved.mark}' if part['type'] == 'image' else part['text'] }}}}"
        inner = f"{{% for part in turn['content'] %}}{part}{{% endfor %}}"
        template = f"{{% for turn in messages %}}{{{{ turn['role'] }}}}: {inner}{{% endfor %}}\nassistant:"
        (folder / "chat_template.jinja").write_text(template)
    return model


def llava_next() -> torch.nn.Module:
    return config_of("LlavaNext", text_config=QWEN2, vision_config=CLIP_VISION, image_token_index=IMAGE, **TILES)()


def of(case: Callable) -> Callable[[], torch.nn.Module]:
    return lambda: case().model


def states(layer: int, first: int = 0) -> Callable:
    """The encoder's hidden state `layer`, from token `first` on."""
    return lambda inputs, result: result.hidden_states[layer][:, first:]


def last(inputs: dict, result: Any) -> torch.Tensor:
    return result.last_hidden_state


def config_of(prefix: str, **fields: Any) -> Callable[[], torch.nn.Module]:
    """Makes `<prefix>ForConditionalGeneration` of a config with these fields."""
    return lambda: models.build(prefix, getattr(transformers, f"{prefix}Config")(**fields))


QWEN2 = {"model_type": "qwen2"} | TEXT
GEMMA = {"model_type": "gemma", "head_dim": 8} | TEXT
CLIP_VISION = {"model_type": "clip_vision_model"} | VISION
SIGLIP_VISION = {"model_type": "siglip_vision_model", "vision_use_head": False} | VISION
GRID_VISION = {"depth": 2, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
GRID_VISION |= {"out_hidden_size": 32}
GRID_IDS = {"image_token_id": IMAGE, "video_token_id": 301}
MROPE = {"rope_parameters": models.MROPE}


def idefics2() -> torch.nn.Module:
    perceiver = {"hidden_size": 32, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2}
    perceiver |= {"resampler_head_dim": 8, "num_key_value_heads": 1}
    vision = VISION | {"image_size": 32}
    text = {"model_type": "mistral", "sliding_window": None} | TEXT
    return config_of(
        "Idefics2", text_config=text, vision_config=vision, perceiver_config=perceiver, image_token_id=IMAGE
    )()


def aria() -> torch.nn.Module:
    text = TEXT | {"moe_num_experts": 2, "moe_topk": 1, "moe_num_shared_experts": 1}
    vision = {"model_type": "idefics3_vision"} | VISION | {"image_size": 980, "patch_size": 140}
    queries = {"projector_patch_to_query_dict": {"49": 4}}
    return config_of("Aria", text_config=text, vision_config=vision, image_token_index=IMAGE, **queries)()


def gemma4() -> torch.nn.Module:
    text = TEXT | {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "sliding_window": 64}
    text |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    vision = VISION | {
        "head_dim": 12,
        "num_key_value_heads": 2,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }
    return config_of("Gemma4", text_config=text, vision_config=vision, image_token_id=IMAGE, audio_config=None)()


def qwen2_5_vl() -> torch.nn.Module:
    vision = GRID_VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
    ids = GRID_IDS | {"vision_start_token_id": 302, "vision_end_token_id": 303}
    return config_of("Qwen2_5_VL", text_config=TEXT | MROPE, vision_config=vision, **ids)()


def glm4v() -> torch.nn.Module:
    text = TEXT | {"rope_parameters": models.MROPE | {"partial_rotary_factor": 1.0}}
    vision = GRID_VISION | {"image_size": 16, "attention_bias": False}
    ids = GRID_IDS | {"image_start_token_id": 302, "image_end_token_id": 303}
    return config_of("Glm4v", text_config=text, vision_config=vision, **ids)()


def ovis2() -> torch.nn.Module:
    vision = VISION | {"vocab_size": 40, "num_visual_indicator_tokens": 5, "hidden_stride": 2, "qkv_bias": False}
    ids = {"image_token_id": IMAGE, "visual_indicator_token_ids": [301, 302, 303, 304, 305]}
    return config_of("Ovis2", text_config=QWEN2, vision_config=vision, hidden_size=32, **ids)()


def internvl() -> torch.nn.Module:
    vision = {"model_type": "internvl_vision"} | VISION | {"image_size": [16, 16], "patch_size": [4, 4]}
    return config_of("InternVL", text_config=QWEN2, vision_config=vision, image_token_id=IMAGE, image_seq_length=4)()


def masked(argument: str, padding: bool) -> Callable:
    """A module's first argument without padding, told by `argument`."""
    return lambda inputs, result: next(iter(inputs.values()))[inputs[argument].bool() != padding]


FEATURES = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
GLM_TOKENS = {"image_token": "<|image|>", "video_token": "<|video|>"}
MERGER = {"encoder": ("model.visual", last), "projector": "model.visual.merger"}


def qwen(model: Callable, processor: str, **options: Any) -> Saved:
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    extra = ("<|vision_start|>", "<|vision_end|>")
    return Saved(model, processor, QWEN, tokens=QWEN_TOKENS, mark=mark, extra=extra, **(MERGER | options))


SAVED = {
    "llava": Saved(of(models.llava), "LlavaProcessor", CLIP, ("model.vision_tower", states(-2, 1)), settings=FEATURES),
    "llava_next": Saved(
        llava_next,
        "LlavaNextProcessor",
        CLIP | TILES | {"image_processor_type": "LlavaNextImageProcessor"},
        ("model.vision_tower", states(-2, 1)),
        settings=FEATURES,
    ),
    "qwen2_5_vl": qwen(qwen2_5_vl, "Qwen2_5_VLProcessor"),
    "qwen3_vl": qwen(of(models.qwen3_vl), "Qwen3VLProcessor", added=(1, 2)),
    "glm4v": Saved(
        glm4v,
        "Glm4vProcessor",
        QWEN | {"image_processor_type": "Glm4vImageProcessor"},
        ("model.visual.post_layernorm", lambda inputs, result: result),
        "model.visual.merger",
        "<|image|>",
        GLM_TOKENS,
    ),
    "ovis2": Saved(
        ovis2,
        "Ovis2Processor",
        SQUARE,
        ("model.vision_tower.transformer", lambda inputs, result: result[0]),
        "model.visual_embeddings_table",
        settings={"image_seq_length": 4},
        tokens={"image_token": "<IMG_ATOM>"},
        extra=("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<image>"),
    ),
    "internvl": Saved(
        internvl,
        "InternVLProcessor",
        SQUARE | {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "max_patches": 3},
        ("model.vision_tower", lambda inputs, result: result.last_hidden_state[:, 1:]),
        settings={"image_seq_length": 4},
        mark="<IMG_CONTEXT>",
        tokens={"image_token": "<IMG_CONTEXT>", "video_token": "<video>", "context_image_token": "<IMG_CONTEXT>"}
        | {"start_image_token": "<img>", "end_image_token": "</img>"},
    ),
    "gemma3": Saved(
        of(models.gemma3),
        "Gemma3Processor",
        SQUARE,
        ("model.vision_tower", last),
        settings={"image_seq_length": 4},
        mark="<start_of_image>",
        tokens={"image_token": "<soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "idefics2": Saved(
        idefics2,
        "Idefics2Processor",
        MEAN | {"size": {"shortest_edge": 12, "longest_edge": 32}},
        ("model.connector", masked("attention_mask", False)),
        "model.connector",
        settings={"image_seq_len": 3},
        tokens={"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"},
        extra=("<end_of_utterance>",),
    ),
    "aria": Saved(
        aria,
        "AriaProcessor",
        MEAN | {"max_image_size": 980, "min_image_size": 336},
        ("model.multi_modal_projector", masked("attn_mask", True)),
        settings={"size_conversion": {"980": 4}},
    ),
    "paligemma": Saved(
        config_of(
            "PaliGemma",
            text_config=GEMMA,
            vision_config=SIGLIP_VISION | {"projection_dim": 32},
            image_token_index=IMAGE,
            projection_dim=32,
            hidden_size=32,
        ),
        "PaliGemmaProcessor",
        SIGLIP | {"image_seq_length": 16},
        ("model.vision_tower", last),
        mark=None,
    ),
    "gemma4": Saved(
        gemma4,
        "Gemma4Processor",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        ("model.vision_tower.pooler", masked("padding_positions", True)),
        "model.embed_vision",
        settings={"image_seq_length": 70},
        tokens={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        mark="<|image|>",
    ),
}


if Version(transformers.__version__) < Version("5.23"):
    del SAVED["gemma4"]  # whose own class or processor fails there

# One of each kind: a tower's grid, tiles, squares, pictures of any shape, a resampler, and a projector behind a norm.
USUAL = ("llava", "llava_next", "internvl", "glm4v", "idefics2", "gemma3")
CHOSEN = [name for name in SAVED if name in USUAL or os.environ.get("FAMILIES") == "all"]
