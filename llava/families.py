"""Where a model's parts are: rules that find them by structure, and a table of the families that need more.

Shapes: N tokens of all samples, D LLM hidden size, E vision hidden size.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

PROJECTOR_NAMES = ("mm_projector", "multi_modal_projector", "multimodal_projector", "connector", "merger")
PROJECTOR_NAMES += ("projector", "aligner", "embed_vision")
IMAGE_TOKEN_FIELDS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
FEATURE_LAYER_FIELDS = ("vision_feature_layer", "vision_feature_layers")


@dataclass(frozen=True)
class Family:
    """Module paths and facts that differ from the rules; None where the rules find them."""

    layers: str | None = None  # the ModuleList of decoder layers
    projector: str | None = None  # the module whose output enters the LLM
    features: str | None = None  # `input:` or `output:` of a module, the encoder's tokens; else the projector's input
    tokens: str | None = None  # that module's bool argument [B, N], True at tokens; `~name` if True at padding
    vocabulary: str | None = None  # the module whose `weight` is a visual vocabulary (Ovis)
    image_token_id: int | None = None  # the id at visual positions
    auto_class: str = "AutoModelForImageTextToText"  # the transformers class that loads it
    own_inputs: bool = False  # the model makes its inputs itself, by `preprocess_inputs(messages)`
    prompt: str | None = None  # the text, without a chat template, with `{prompt}` in it
    page_lists: bool = False  # a list of pictures is the pages of one (GOT-OCR2) or refused (Kimi-VL): none is given
    own_code: bool = False  # its repository has its code, written for transformers 4 (`llava.analysis.remote_code`)
    embedding: str | None = None  # the text embedding, where `get_input_embeddings` does not give it
    joins_patches: bool = False  # a row of what `features` names is several of the encoder's tokens side by side


# By model_type.
_GLM = Family(features="output:model.visual.post_layernorm")  # the projector begins with a convolution
_GOT = Family(
    prompt="<|im_start|>user\n<img><imgpad></img>\n{prompt}<|im_end|><|im_start|>assistant\n", page_lists=True
)
FAMILIES = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), _GLM),
    # The projector's attention leaves padded patches out, the encoder computes them.
    "idefics2": Family(tokens="attention_mask"),
    "aria": Family(tokens="~attn_mask"),
    # The vision model ends in a pixel shuffle with an MLP of its own, or in pooling.
    "llama4": Family(features="input:vision_model.vision_adapter"),
    "gemma4": Family(features="input:model.vision_tower.pooler", tokens="~padding_positions"),
    # The vision model ends in a merger with an MLP of its own, and a single linear layer follows.
    "hyperclovax_vision_v2": Family(features="input:model.vision_model.merger"),
    "got_ocr2": _GOT,
    "paligemma": Family(prompt="<image>{prompt}"),
    # The picture becomes weights of a visual vocabulary's rows: the matrix product with it is the projection.
    "ovis2": Family(
        projector="model.visual_embeddings_table",
        features="input:model.vision_tower.head_linear",
        vocabulary="model.visual_embeddings_table",
        joins_patches=True,
    ),
    "internvl": Family(joins_patches=True),
    # Code of their own repositories (--trust-remote-code).
    "ovis2_5": Family(
        layers="llm.model.layers",
        embedding="llm.model.embed_tokens",
        projector="vte",
        features="input:visual_tokenizer.head",
        vocabulary="vte",
        image_token_id=-300,
        auto_class="AutoModelForCausalLM",
        own_inputs=True,
        own_code=True,
        joins_patches=True,
    ),
    "kimi_vl": Family(auto_class="AutoModelForCausalLM", page_lists=True, own_code=True),
}

_CROSS = "its LLM looks at the picture by cross-attention, so no visual token enters it"
_QFORMER = "a Q-Former is between its encoder and its projector"
_NO_PROJECTOR = "it has no projector whose output enters an LLM as visual tokens"
_STREAMS = "the layers of its LLM carry several states per token, so a token has no single norm or direction"
REFUSED = {
    **dict.fromkeys(("mllama", "blip", "idefics", "evolla"), _CROSS),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _QFORMER),
    **dict.fromkeys(("gemma3n", "glm5_next", "qwen4_exp"), _STREAMS),
    **dict.fromkeys(("chameleon", "emu3", "fuyu", "git"), _NO_PROJECTOR),
    "florence2": "it is an encoder-decoder",
    "gemma4_unified": "it has no vision encoder: patches of pixels pass through one linear layer into its projector",
    "phi4_multimodal": "transformers gives it no class that takes pictures by one common interface",
}
"""Families whose visual tokens have no single place or norm, by model_type, with the reason."""
REFUSED_LLMS = dict.fromkeys(("deepseek_v4", "gemma3n_text", "glm5_next_text", "hy_v4", "qwen4_exp_text"), _STREAMS)
"""LLMs that no vision-language model around them can be measured with, by the model_type of `text_config`."""


class Features(NamedTuple):
    """Where the encoder's tokens pass.

    Attributes:
        side: of `module`, "input" or "output".
        tokens: see `Family.tokens`.
        width: E.
        joins_patches: see `Family.joins_patches`.
    """

    side: str
    module: nn.Module
    tokens: str | None = None
    width: int | None = None
    joins_patches: bool = False

    def of(self, args: tuple, kwargs: dict[str, Any], output: Any) -> torch.Tensor:
        """What passes in one call of `module`, without padding: [N, E], or wider rows where patches are joined."""
        arguments = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        rows = output if self.side == "output" else first_tensors(args, kwargs)
        if self.side == "input" and sum(value.is_floating_point() and value.ndim > 2 for value in arguments) > 1:
            raise ValueError(
                f"{type(self.module).__name__} takes tokens of more than one vision encoder; name the one to measure "
                "by --vision-path"
            )
        rows = output_rows(rows)
        mask = kwargs.get(self.tokens.lstrip("~")) if self.tokens else None
        if mask is not None:
            rows = rows[(~mask.bool() if self.tokens.startswith("~") else mask.bool()).flatten()]
        return rows

    def may_join_patches(self, rows: torch.Tensor) -> bool:
        """Whether rows [N, width] are wide enough to hold several patches each, if they are a module's input."""
        is_input = self.side == "input" and self.width is not None
        return is_input and rows.shape[-1] > self.width and rows.shape[-1] % self.width == 0


class Parts(NamedTuple):
    """The parts of one model; None where a plain LLM or a lone encoder has none."""

    embedding: nn.Module | None
    layers: list[nn.Module]
    projector: nn.Module | None
    features: Features | None
    vocabulary: nn.Module | None
    image_token_id: int | None


def family_of(model_type: str, vision: str | None = None, **named: Any) -> Family:
    """The entry of `model_type` in `FAMILIES`, with those fields replaced that the command line names (not None).

    Args:
        vision: path of the module whose output is the encoder's tokens.
    """
    if vision:
        named |= {"features": f"output:{vision}", "tokens": None}
    family = FAMILIES.get(model_type, Family())
    return replace(family, **{k: v for k, v in named.items() if v is not None or (vision and k == "tokens")})


def refuse(fields: dict[str, Any], origin: str, verdict: str = "cannot be measured") -> None:
    """Raises ValueError, with the reason, for a family whose visual tokens have no single place or norm.

    Args:
        fields: of config.json.
        origin: the flag or call that names the model, which begins the message.
        verdict: what the family cannot do.
    """
    model_type, text = fields.get("model_type", ""), fields.get("text_config") or {}
    reason = REFUSED.get(model_type)
    if reason is None and text.get("model_type") in REFUSED_LLMS:
        model_type, reason = f"{model_type} with {text['model_type']}", REFUSED_LLMS[text["model_type"]]
    if reason is None and any(part.get("is_encoder_decoder") for part in (fields, text)):
        reason = "it is an encoder-decoder"
    if reason:
        raise ValueError(f"{origin}: {model_type} {verdict}: {reason}")


def find_parts(model: PreTrainedModel, family: Family, image_token_id: int | None = None) -> Parts:
    """All parts of a vision-language model.

    Args:
        image_token_id: the id at visual positions; None takes the family's or the config's.

    Raises:
        ValueError: a part is not found or ambiguous; says how to name it.
    """
    embedding = _submodule(model, family.embedding, "families.py") if family.embedding else text_embedding(model)
    layers = decoder_layers(model, embedding, family.layers)
    projector = model.get_submodule(projector_path(model, family.projector))
    side, module = "input", projector
    if family.features:
        side, path = family.features.split(":")
        module = _submodule(model, path, "--vision-path")
    features = Features(side, module, family.tokens, encoder_width(model.config), family.joins_patches)
    vocabulary = _submodule(model, family.vocabulary, "families.py") if family.vocabulary else None
    if image_token_id is None:
        image_token_id = family.image_token_id
    if image_token_id is None:
        image_token_id = _image_token_of(model.config)
    return Parts(embedding, layers, projector, features, vocabulary, image_token_id)


def encoder_width(config: PretrainedConfig) -> int | None:
    """Width of one patch's features: E, times the number of encoder layers whose states the model concatenates."""
    vision = getattr(config, "vision_config", None) or getattr(config, "vit_config", None)  # the latter: Ovis 2.5
    # Qwen2-VL calls the encoder's width embed_dim, and the LLM's hidden_size.
    width = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", None)
    places = [part for part in (config, getattr(config, "adapter_config", None)) if part is not None]
    layers = [getattr(part, name, None) for part in places for name in FEATURE_LAYER_FIELDS]
    listed = next((numbers for numbers in layers if isinstance(numbers, list | tuple)), (None,))
    return width * len(listed) if isinstance(width, int) else None


def first_tensors(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | list[torch.Tensor]:
    """A module's first argument: a tensor, or a list with a tensor for each picture (Kimi-VL)."""
    given = (*args, *kwargs.values())
    return next(v for v in given if isinstance(v, torch.Tensor) or (isinstance(v, list) and v))


def is_floating(tensors: torch.Tensor | list[torch.Tensor]) -> bool:
    """Whether a module's first argument holds states, not ids."""
    return (tensors[0] if isinstance(tensors, list) else tensors).is_floating_point()


def output_rows(output: Any) -> torch.Tensor:
    """A module's result as rows [N, width]: the tensor itself, the first of a model output, or a list's one by one."""
    if isinstance(output, list):  # a tensor per picture
        return torch.cat([rows.flatten(0, -2) for rows in output])
    return (output if isinstance(output, torch.Tensor) else output[0]).flatten(0, -2)


def text_embedding(model: PreTrainedModel) -> nn.Module:
    """The text embedding; ValueError where the model's `get_input_embeddings` does not give one."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embedding = None
    weight = getattr(embedding, "weight", None)
    if weight is None or len(getattr(weight, "ds_shape", weight.shape)) != 2:  # ZeRO-3 empties a weight
        raise ValueError(f"{_name(model)}: get_input_embeddings gives no matrix of text embeddings, so none is known")
    return embedding


def decoder_layers(model: nn.Module, embedding: nn.Module, path: str | None = None) -> list[nn.Module]:
    """The LLM's layers: the longest list of modules beside the text embedding.

    Args:
        path: their module's path, which replaces the search.

    Raises:
        ValueError: there is no such list.
    """
    if path:
        return list(_submodule(model, path, "--layers-path"))
    parent = next((m for m in model.modules() if any(child is embedding for child in m.children())), model)
    layers = max((m for m in parent.children() if isinstance(m, nn.ModuleList)), key=len, default=())
    if not len(layers):
        raise ValueError(
            f"{_name(model)}: no decoder layers beside the text embedding; name their list by --layers-path. "
            f"Lists of modules: {_lists(model)}"
        )
    return list(layers)


def projector_path(model: PreTrainedModel, path: str | None, flag: str = "--projector-path") -> str:
    """`path`, or that of the module nearest to the root that has a projector's name.

    Args:
        flag: where the caller's user names the path, for messages.

    Raises:
        ValueError: no such module, or several.
    """
    if path:
        _submodule(model, path, flag)
        return path
    names = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in PROJECTOR_NAMES]
    shallowest = min((name.count(".") for name in names), default=0)
    nearest = [name for name in names if name.count(".") == shallowest]
    if len(nearest) != 1:
        raise ValueError(
            f"{_name(model)}: expected one module called {', '.join(PROJECTOR_NAMES)}; found "
            f"{', '.join(nearest) or 'none'}. Name it by {flag}. Modules: {_outline(model)}"
        )
    return nearest[0]


def _submodule(model: nn.Module, path: str, origin: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{origin} {path}: {_name(model)} has no such module. Modules: {_outline(model)}") from error


def _image_token_of(config: PretrainedConfig) -> int:
    ids = [value for name in IMAGE_TOKEN_FIELDS if isinstance(value := getattr(config, name, None), int)]
    if not ids:
        raise ValueError(
            f"{config.model_type}: config.json has none of {', '.join(IMAGE_TOKEN_FIELDS)}, so visual positions are "
            "unknown; name the id of the image token by --image-token-id"
        )
    return ids[0]


def _name(model: nn.Module) -> str:
    return f"{type(model).__name__} (model_type {getattr(model.config, 'model_type', None)})"


def _outline(model: nn.Module) -> str:
    return ", ".join(name for name, _ in model.named_modules() if name and name.count(".") < 2)


def _lists(model: nn.Module) -> str:
    return ", ".join(f"{n} ({len(m)})" for n, m in model.named_modules() if isinstance(m, nn.ModuleList)) or "none"
