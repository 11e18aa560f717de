"""Gradients above and below the projector's norm: what a small gain takes away, and what compensation gives back.

Paper section 5.1. One of our checkpoints trains on one batch with its projector ending in nothing, in the plain and in
the compensated LayerNorm, with the same weights in all other parts. Gradients are L2 norms over the whole batch.

Shapes: B samples, S sequence.
"""

import argparse
import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

from llava.analysis import measure, models, samples
from llava.analysis.commands import NamedModel
from llava.analysis.output import TableRow, draw_rows, write_result
from llava.analysis.probe import Batch
from llava.asking import Assistant, is_captioner
from llava.constants import DEFAULT_IMAGE_TOKEN, IGNORE_INDEX
from llava.data.preprocess import preprocess
from llava.data.turns import moves_pictures
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import (
    PAPER_ARMS,
    AlignedLayerNorm,
    end_with_norm,
    mean_text_embedding_norm,
    projector_norm,
)

ARMS = tuple(PAPER_ARMS)
INPUT, BEFORE, FEATURES = "LLM input", "before the norm", "vision features"

Arms = dict[str, dict[str, float]]
"""By arm, the gradient's norm by point, from the LLM's input down to the tower's first layer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser, default=16)


def run(args: argparse.Namespace) -> None:
    """Writes a row per point of the backward pass with a column per arm, and the figure."""
    checkpoints, drawn = measure.begin(args)
    measured = {model.name: measure_gradients(model, drawn, args) for model in checkpoints}
    table = [row for model, arms in measured.items() for row in rows(model, arms)]
    write_result(args, table)
    points = [row | {"norm": arm, "gradient": row[arm]} for row in table for arm in ARMS]
    axes = {"ylabel": "L2 norm of the gradient", "xlabel": "on the way down", "yscale": "log"}
    draw_rows(args, points, "gradient at", {"gradient": axes}, "norm", "model", sharey=True)


def measure_gradients(named: NamedModel, drawn: samples.Samples, args: argparse.Namespace) -> Arms:
    """Every arm's gradients. Raises ValueError: the samples have no answers, or the model no vision tower."""
    assistant = models.load_ours(named, args)
    model = assistant.model
    if model.get_vision_tower() is None:
        raise ValueError(f"--model {named.path}: gradients needs one of our checkpoints with a vision tower")
    model.requires_grad_(False)
    batch, labels = training_batch(drawn, assistant)
    bare = model.get_model().mm_projector
    trained = projector_norm(bare)
    bare = bare if trained is None else bare[:-1]
    arms = {}
    for arm in ARMS:
        model.get_model().mm_projector = arm_projector(arm, bare, trained, model)
        arms[arm] = gradient_norms(model, batch, labels)
    return arms


def training_batch(examples: Sequence[samples.PicturePrompt], assistant: Assistant) -> tuple[Batch, torch.Tensor]:
    """The samples with their answers as the model takes them in training, and labels [B, text tokens]."""
    ids, labels = [], []
    masking = "upstream" if moves_pictures(assistant.model.config) else "assistant"
    for sample in examples:
        if sample.answer is None:
            raise ValueError(f"--data {sample.name}: gradients need an answer to learn, and this data has none")
        captions = is_captioner(assistant.template)
        question = DEFAULT_IMAGE_TOKEN if captions else f"{DEFAULT_IMAGE_TOKEN}\n{sample.prompt}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": sample.answer}]
        example = preprocess(turns, assistant.tokenizer, assistant.template, label_masking=masking)
        ids.append(example.input_ids)
        labels.append(example.labels)
    targets = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
    batch = models.our_batch(assistant.model, ids, [s.image for s in examples], assistant.image_processor)
    return batch, targets.to(assistant.model.device)


def arm_projector(arm: str, bare: nn.Module, trained: nn.Module | None, model: LlavaMetaForCausalLM) -> nn.Module:
    """`bare` ending in the norm `arm`, with the gain and bias of `trained`, or else aligned to the text embeddings."""
    config = copy.deepcopy(model.config)
    config.mm_projector_norm = arm
    if not isinstance(trained, AlignedLayerNorm):  # another arm's gain has no meaning in a LayerNorm
        trained = None
        config.mm_projector_norm_target = mean_text_embedding_norm(model.get_model().embed_tokens)
    projector = end_with_norm(bare, config).to(model.device, model.dtype).train()
    if arm != "none" and trained is not None:
        projector_norm(projector).load_state_dict(trained.state_dict())
    return projector


def gradient_norms(model: LlavaMetaForCausalLM, batch: Batch, labels: torch.Tensor) -> dict[str, float]:
    """L2 norms of the loss's gradient at each point."""
    decoder, tower = model.get_model(), model.get_vision_tower()
    assert tower is not None  # `training_batch` has made pixels for it
    norm = projector_norm(decoder.mm_projector)
    places = [(INPUT, decoder.mm_projector, "output"), (BEFORE, norm or decoder.mm_projector, "input")]
    places += [(FEATURES, decoder.mm_projector, "input")]
    places += [(f"tower layer {index}", tower.layers[index], "output") for index in reversed(range(len(tower.layers)))]
    norms = dict.fromkeys(name for name, _, _ in places)

    def keeper(name: str, side: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor | tuple) -> None:
            passing = args[0] if side == "input" else output if torch.is_tensor(output) else output[0]
            passing.register_hook(lambda gradient: norms.update({name: gradient.float().norm().item()}))

        return hook

    handles = [module.register_forward_hook(keeper(name, side)) for name, module, side in places]
    tower.patch_embedding().requires_grad_(True)  # the graph begins where the tower does
    try:
        model(**batch.inputs, labels=labels).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    if norm is None:
        norms[BEFORE] = norms[INPUT]
    model.zero_grad(set_to_none=True)
    return norms


def rows(model: str, arms: Arms) -> list[TableRow]:
    """A row per point: each arm's gradient, and its ratio to the gradient at the LLM's input."""
    table = []
    for point in arms[ARMS[0]]:
        row = {"model": model, "gradient at": point} | {name: norms[point] for name, norms in arms.items()}
        table.append(row | {f"{name} / {INPUT}": norms[point] / norms[INPUT] for name, norms in arms.items()})
    return table
