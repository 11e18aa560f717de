"""Gradients above and below the projector's norm: what a small gain takes away, and what compensation gives back.

Paper section 5.1. One of our checkpoints trains on one batch with its projector ending in nothing, in the plain and in
the compensated LayerNorm, with the same weights in all other parts. Gradients are L2 norms over the whole batch; where
each visual token has its own, also over those that are no sinks (see `layer_statistics`) in that arm.

Shapes: B samples, S sequence, N pictures, V visual tokens per picture, D LLM hidden size.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from llava.analysis import inputs, loading, resume
from llava.analysis.commands import OURS, Needs
from llava.analysis.layer_statistics import sink_mask
from llava.analysis.models import NamedModel, required_models
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.probe import Batch, Probe
from llava.analysis.resume import Rows, resumed
from llava.asking import choose_template, is_captioner
from llava.constants import DEFAULT_IMAGE_TOKEN, IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.conversation import Conversation
from llava.data.preprocess import preprocess
from llava.families import Family, find_parts
from llava.model.crops import line_up
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import (
    PAPER_ARMS,
    AlignedLayerNorm,
    end_with_norm,
    mean_text_embedding_norm,
    projector_norm,
)
from llava.utils.presentation import looks

NEEDS = Needs(OURS, flags=("data",))  # it measures one batch: the --samples of the other commands would be too many

ARMS = tuple(PAPER_ARMS)
INPUT, BEFORE, FEATURES = "LLM input", "before the norm", "vision features"


class Arm(NamedTuple):
    """One arm's gradient norms by point, from the LLM's input down to the tower's first layer.

    Attributes:
        name: of `ARMS`.
        norms: over all tokens.
        without_sinks: over the visual tokens that are not sinks, at the points above the tower, where each has its own.
        sinks: how many visual tokens of the batch are sinks.
    """

    name: str
    norms: dict[str, float]
    without_sinks: dict[str, float]
    sinks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    inputs.add_arguments(parser, samples=16)
    resume.add_arguments(parser)
    loading.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes a row per point of the backward pass with a column per arm, and the figure."""
    samples = inputs.choose(args)
    for model in args.models:
        require_ours(model)
    measured = {model.name: measure_gradients(model, samples, args) for model in required_models(args.models)}
    sinks = {model: {name: arm.sinks for name, arm in arms.items()} for model, arms in measured.items()}
    table = [row for model, arms in measured.items() for row in rows(model, arms)]
    write_result(args, table, {"visual sinks in the batch": sinks})
    for model, arms in measured.items():
        print(verdict(model, arms))
    draw(args, measured)


def measure_gradients(named: NamedModel, samples: inputs.Samples, args: argparse.Namespace) -> dict[str, Arm]:
    """Every arm's gradients, continuing from what `--output-dir` has.

    Raises:
        ValueError: not one of our checkpoints, or the samples have no answers.
    """
    require_ours(named)

    def start() -> Callable[[Rows, Sequence[str]], None]:
        tokenizer, model, image_processor = loading.load_ours(named, args)
        model.requires_grad_(False).train()
        template = choose_template(model.config, named.path, args.conv_mode)
        batch, labels = training_batch(samples[:], tokenizer, image_processor, model, template)
        bare, trained = split(model.get_model().mm_projector)

        def add(state: Rows, arms: Sequence[str]) -> None:
            for arm in arms:
                model.get_model().mm_projector = arm_projector(arm, bare, trained, model)
                state.rows.append(gradient_norms(arm, model, batch, labels))

        return add

    state = resumed(Rows(Arm), "gradients", named, samples, start, args, items=ARMS, unit="arm")
    return {arm.name: arm for arm in state.rows}


def require_ours(named: NamedModel) -> None:
    """Raises ValueError where a model is not one of our checkpoints, or has no vision tower."""
    fields = loading.config_fields(named.path)
    if not loading.is_ours(fields):
        raise ValueError(
            f"--model {named.path}: gradients need one of our checkpoints (llava_llama, llava_qwen), found a "
            f"{fields['model_type']}"
        )
    if not fields.get("mm_vision_tower"):
        raise ValueError(f"--model {named.path}: gradients need a vision tower, and its config.json names none")


def training_batch(
    samples: Sequence[inputs.PicturePrompt],
    tokenizer: PreTrainedTokenizerBase,
    image_processor: BaseImageProcessor | None,
    model: LlavaMetaForCausalLM,
    template: Conversation,
) -> tuple[Batch, torch.Tensor]:
    """The samples with their answers as the model takes them in training, and labels [B, text tokens]."""
    ids, labels = [], []
    for sample in samples:
        if sample.answer is None:
            raise ValueError(f"--data {sample.name}: gradients need an answer to learn, and this data has none")
        question = DEFAULT_IMAGE_TOKEN if is_captioner(template) else f"{DEFAULT_IMAGE_TOKEN}\n{sample.prompt}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": sample.answer}]
        example = preprocess(turns, tokenizer, template)
        ids.append(example.input_ids)
        labels.append(example.labels)
    targets = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
    pictures = [sample.image for sample in samples]
    return loading.our_batch(model, ids, pictures, image_processor), targets.to(model.device)


def visual_sinks(model: LlavaMetaForCausalLM, batch: Batch) -> torch.Tensor:
    """Which of the projector's tokens [K * V] of K pictures or crops are sinks; one that enters nowhere is not.

    Raises:
        ValueError: a sample is so long that its picture was cut; or see `projector_rows`.
    """
    seen = Probe("gradients", model, find_parts(model, Family(), IMAGE_TOKEN_INDEX)).run(batch)
    visual = seen.visual.cpu()
    rows = projector_rows(model, batch)
    longest = getattr(model.config, "tokenizer_model_max_length", None)
    if longest is not None and visual[:, longest:].any():
        raise ValueError(
            f"--data: a sample has visual tokens after the model's tokenizer_model_max_length {longest}, where "
            "training cuts it; leave it out"
        )
    sinks = torch.zeros(len(seen.projector_output), dtype=torch.bool)
    sinks[rows[sink_mask(seen)[visual] & (rows >= 0)]] = True
    return sinks


def projector_rows(model: LlavaMetaForCausalLM, batch: Batch) -> torch.Tensor:
    """Which of the projector's tokens each visual token of the batch is; -1 for `image_newline`.

    Raises:
        ValueError: a picture's tokens are means of several, because it had too many.
    """
    rules, passed = model.crop_rules(), batch.inputs
    layout, _ = model.lay_out(
        passed["input_ids"], passed["attention_mask"], None, passed["images"], passed.get("image_sizes")
    )
    for picture in layout.pictures:
        if picture.crops > 1 and rules.patches(picture).shrunk is not None:
            raise ValueError(
                f"gradients: mm_patch_merge_type {rules.merge_type!r} shrinks a picture of {picture.size[0]} x "
                f"{picture.size[1]} pixels, so that its visual tokens are not the projector's; leave larger ones out"
            )
    crops, tokens = sum(picture.crops for picture in layout.pictures), rules.tokens_per_crop
    numbers = torch.arange(crops * tokens).view(crops, tokens, 1)
    newline = torch.tensor([-1]) if rules.has_newline else None
    return line_up(numbers, layout.pictures, rules, newline).flatten()


def split(projector: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The projector without its norm, and the norm, if it has one."""
    norm = projector_norm(projector)
    return (projector, None) if norm is None else (projector[:-1], norm)


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


def gradient_norms(arm: str, model: LlavaMetaForCausalLM, batch: Batch, labels: torch.Tensor) -> Arm:
    """L2 norms of the loss's gradient at each point."""
    decoder, tower = model.get_model(), model.get_vision_tower()
    assert tower is not None  # `training_batch` has made pixels for it
    norm = projector_norm(decoder.mm_projector)
    places = [(INPUT, decoder.mm_projector, "output"), (FEATURES, decoder.mm_projector, "input")]
    places += [] if norm is None else [(BEFORE, norm, "input")]
    places += [(f"tower layer {index}", layer, "output") for index, layer in enumerate(tower.layers)]
    points: dict[str, torch.Tensor] = {}

    def keeper(name: str, side: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor | tuple[torch.Tensor, ...]
        ) -> None:
            points[name] = args[0] if side == "input" else output if torch.is_tensor(output) else output[0]
            points[name].retain_grad()

        return hook

    sinks = visual_sinks(model, batch)
    handles = [module.register_forward_hook(keeper(name, side)) for name, module, side in places]
    tower.patch_embedding().requires_grad_(True)  # the graph begins where the tower does
    try:
        model(**batch.inputs, labels=labels).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    points.setdefault(BEFORE, points[INPUT])
    above = [INPUT, BEFORE, FEATURES]
    gradients = {name: points[name].grad.float().flatten(0, -2).cpu() for name in above}
    order = [*above, *(f"tower layer {index}" for index in reversed(range(len(tower.layers))))]
    norms = {name: points[name].grad.float().norm().item() for name in order}
    of_rows = dict.fromkeys(above, sinks) | {FEATURES: of_patches(sinks, model)}
    without = {name: gradient[~of_rows[name]].norm().item() for name, gradient in gradients.items()}
    model.zero_grad(set_to_none=True)
    return Arm(arm, norms, without, int(sinks.sum()))


def of_patches(tokens: torch.Tensor, model: LlavaMetaForCausalLM) -> torch.Tensor:
    """What is said of each of the projector's tokens [N], for each of the features that it got."""
    tower, side = model.get_model().vision_tower, model.crop_rules().tokens_per_side
    if (merged := tower.num_patches_per_side // side) == 1:
        return tokens
    return tokens.view(-1, side, side).repeat_interleave(merged, 1).repeat_interleave(merged, 2).flatten()


def rows(model: str, arms: dict[str, Arm]) -> list[TableRow]:
    """A row per point: each arm's gradient, its ratio to the gradient at the LLM's input, and the one without sinks."""
    table = []
    for point in arms[ARMS[0]].norms:
        row = {"model": model, "gradient at": point}
        row |= {name: arm.norms[point] for name, arm in arms.items()}
        row |= {f"{name} / {INPUT}": arm.norms[point] / arm.norms[INPUT] for name, arm in arms.items()}
        row |= {f"{name} without sinks": arm.without_sinks.get(point) for name, arm in arms.items()}
        table.append(row)
    return table


def verdict(model: str, arms: dict[str, Arm]) -> str:
    """One sentence: the share of the gradient that each norm lets through, and how many sinks there are."""
    shares = [f"{name} {arms[name].norms[BEFORE] / arms[name].norms[INPUT]:.3g}" for name in ARMS[1:]]
    sinks = ", ".join(f"{name} {arm.sinks}" for name, arm in arms.items())
    return (
        f"{model}: of the gradient at the LLM's input, before the norm remains {', '.join(shares)} (none: 1); "
        f"visual sinks in the batch: {sinks}"
    )


def draw(args: argparse.Namespace, measured: dict[str, dict[str, Arm]]) -> None:
    """A panel per model: the gradient on its way down, a line per arm."""
    size = (max(4.2 * len(measured), 6), 4)
    with figure(args, 1, len(measured), figsize=size, sharey=True, squeeze=False) as (drawn, axes):
        for axis, (model, arms) in zip(axes[0], measured.items(), strict=True):
            for arm, look in looks(ARMS).items():
                values = arms[arm].norms
                axis.plot(range(len(values)), list(values.values()), marker="o", markersize=4, label=arm, **look)
            axis.set_xticks(range(len(values)), list(values), rotation=40, ha="right")
            axis.set(title=model, yscale="log")
        axes[0, 0].set_ylabel("L2 norm of the gradient")
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ARMS))
