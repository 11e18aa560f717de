"""Where a model's parts are: rules that find them by structure, and the families that structure does not tell.

Shapes: D LLM hidden size, E vision hidden size.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

PROJECTOR_NAMES = (
    "mm_projector",
    "multi_modal_projector",
    "multimodal_projector",
    "connector",
    "merger",
    "projector",
    "aligner",
    "embed_vision",
)
VISION_NAMES = ("vision_tower", "vision_model", "visual", "vision_encoder", "image_tower", "visual_tokenizer")
IMAGE_TOKEN_FIELDS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


@dataclass(frozen=True)
class Family:
    """Module paths and facts that differ from the rules; None where the rules find them.

    Attributes:
        layers: the ModuleList of decoder layers.
        projector: the module whose output enters the LLM.
        vision: the vision encoder.
        features: the module whose `input:` or `output:` is the encoder's tokens; default the projector's input.
        vocabulary: the module whose `weight` is a visual vocabulary (Ovis).
        image_token_id: the id at visual positions.
        auto_class: the transformers class that loads it.
        own_inputs: the model makes its inputs itself, by `preprocess_inputs(messages)`.
    """

    layers: str | None = None
    projector: str | None = None
    vision: str | None = None
    features: str | None = None
    vocabulary: str | None = None
    image_token_id: int | None = None
    auto_class: str = "AutoModelForImageTextToText"
    own_inputs: bool = False


# By model_type.
_GLM = Family(features="output:model.visual.post_layernorm")  # the projector begins with a convolution
FAMILIES = {
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm46v": _GLM,
    # The picture becomes weights of a visual vocabulary's rows: the matrix product with it is the projection.
    "ovis2": Family(
        projector="model.visual_embeddings_table",
        features="input:model.vision_tower.head_linear",
        vocabulary="model.visual_embeddings_table",
    ),
    # Code of their own repositories (--trust-remote-code).
    "ovis2_5": Family(
        layers="llm.model.layers",
        projector="vte",
        vision="visual_tokenizer.vit",
        features="input:visual_tokenizer.head",
        vocabulary="vte",
        image_token_id=-300,
        auto_class="AutoModelForCausalLM",
        own_inputs=True,
    ),
    "kimi_vl": Family(auto_class="AutoModelForCausalLM"),
}


class Parts(NamedTuple):
    """The parts of one model; None where a plain LLM or a lone encoder has none."""

    embedding: nn.Module | None
    layers: list[nn.Module]
    projector: nn.Module | None
    vision: nn.Module | None
    features: tuple[str, nn.Module] | None  # ("input" or "output", module)
    vocabulary: nn.Module | None
    image_token_id: int | None


def family_of(model_type: str, **named: Any) -> Family:
    """The table's entry of `model_type`, with what the command line names (None: nothing) in its place."""
    return replace(FAMILIES.get(model_type, Family()), **{k: v for k, v in named.items() if v is not None})


def find_parts(model: nn.Module, family: Family, image_token_id: int | None = None) -> Parts:
    """All parts of a vision-language model.

    Args:
        image_token_id: what is at visual positions; None takes the family's or the config's.

    Raises:
        ValueError: a part is not found or ambiguous; says how to name it.
    """
    embedding = text_embedding(model)
    layers = decoder_layers(model, embedding, family.layers)
    projector = _named(model, "--projector-path", family.projector, PROJECTOR_NAMES)
    vision = _named(model, "--vision-path", family.vision, VISION_NAMES)
    features = ("input", projector)
    if family.features:
        side, path = family.features.split(":")
        features = (side, _submodule(model, path, "families.py"))
    vocabulary = _submodule(model, family.vocabulary, "families.py") if family.vocabulary else None
    if image_token_id is None:
        image_token_id = family.image_token_id
    if image_token_id is None:
        image_token_id = _image_token_of(model.config)
    return Parts(embedding, layers, projector, vision, features, vocabulary, image_token_id)


def text_embedding(model: nn.Module) -> nn.Module:
    """The text embedding.

    Raises:
        ValueError: the model's `get_input_embeddings` does not give one.
    """
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embedding = None
    if embedding is None or getattr(embedding, "weight", None) is None or embedding.weight.ndim != 2:
        raise ValueError(f"{_name(model)}: get_input_embeddings gives no matrix of text embeddings, so none is known")
    return embedding


def decoder_layers(model: nn.Module, embedding: nn.Module, path: str | None = None) -> list[nn.Module]:
    """The LLM's layers: the longest list of modules beside the text embedding.

    Args:
        path: where they are, instead.

    Raises:
        ValueError: there is none.
    """
    if path:
        return list(_submodule(model, path, "--layers-path"))
    parent = next((m for m in model.modules() if any(child is embedding for child in m.children())), model)
    found = max((m for m in parent.children() if isinstance(m, nn.ModuleList)), key=len, default=())
    if not len(found):
        raise ValueError(
            f"{_name(model)}: no decoder layers beside the text embedding; name their list by --layers-path. "
            f"Lists of modules: {_lists(model)}"
        )
    return list(found)


def _named(model: nn.Module, flag: str, path: str | None, names: tuple[str, ...]) -> nn.Module:
    """The module at `path`, or the one nearest to the root that has one of `names`."""
    if path:
        return _submodule(model, path, flag)
    found = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in names]
    shallowest = min((name.count(".") for name in found), default=0)
    nearest = [name for name in found if name.count(".") == shallowest]
    if len(nearest) != 1:
        raise ValueError(
            f"{_name(model)}: expected one module called {', '.join(names)}; found {', '.join(nearest) or 'none'}. "
            f"Name it by {flag}. Modules: {_outline(model)}"
        )
    return model.get_submodule(nearest[0])


def _submodule(model: nn.Module, path: str, origin: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{origin} {path}: {_name(model)} has no such module. Modules: {_outline(model)}") from error


def _image_token_of(config: Any) -> int:
    found = [value for name in IMAGE_TOKEN_FIELDS if isinstance(value := getattr(config, name, None), int)]
    if not found:
        raise ValueError(
            f"{config.model_type}: config.json has none of {', '.join(IMAGE_TOKEN_FIELDS)}, so visual positions are "
            "unknown; name the id of the image token by --image-token-id"
        )
    return found[0]


def _name(model: nn.Module) -> str:
    return f"{type(model).__name__} (model_type {getattr(model.config, 'model_type', None)})"


def _outline(model: nn.Module) -> str:
    return ", ".join(name for name, _ in model.named_modules() if name and name.count(".") < 2)


def _lists(model: nn.Module) -> str:
    return ", ".join(f"{n} ({len(m)})" for n, m in model.named_modules() if isinstance(m, nn.ModuleList)) or "none"
