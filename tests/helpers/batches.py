"""Batches for the tiny models, and the loss and gradients that a model has on them."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from tiny_models import V

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.dataset import DataCollatorForSupervisedDataset
from llava.model.attention import SEGMENTS
from llava.model.llava_arch import LlavaMetaForCausalLM

IMG = IMAGE_TOKEN_INDEX
BACKENDS = [SEGMENTS, "sdpa", "eager"]  # those that run without a GPU
BATCHES = {
    "image_first_middle_last": [[IMG, 5, 6], [7, IMG, 8, 9], [10, 11, 12, IMG]],
    "several_images": [[IMG, IMG, 5], [6, IMG, 7, IMG, 8], [9, 10]],
    "text_only": [[5, 6, 7], [8]],
    "image_alone": [[IMG], [IMG, IMG]],
}


def pictures(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def batch(samples: list[list[int]]) -> dict:
    """A right-padded batch; every second token is a target."""
    longest = max(map(len, samples))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in samples])
    mask = torch.tensor([[True] * len(s) + [False] * (longest - len(s)) for s in samples])
    labels = torch.where(mask & (ids != IMG) & (torch.arange(longest) % 2 == 1), ids, IGNORE_INDEX)
    images = pictures(int((ids == IMG).sum()))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "images": images if len(images) else None}


def collated(samples: list[list[int]], max_length: int | None = None, padding_free: bool = True) -> dict:
    """What the trainer's collator makes of token ids; every second token is a target."""
    items = []
    for sample in samples:
        ids = torch.tensor(sample)
        item = {
            "input_ids": ids,
            "labels": torch.where(torch.arange(len(ids)) % 2 == 1, ids, -100).where(ids != IMG, -100),
        }
        items.append(item | ({"images": pictures(sample.count(IMG))} if IMG in sample else {}))
    return DataCollatorForSupervisedDataset(0, V, max_length, padding_free)(items)


def loss_and_gradients(model: LlavaMetaForCausalLM, padding_free: bool, backend: str, **inputs) -> tuple:
    model.zero_grad()
    model.padding_free = padding_free
    model.config._attn_implementation = backend
    loss = model(**inputs, num_items_in_batch=10).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def summed(model: LlavaMetaForCausalLM, batches: Iterable[dict], padding_free: bool, backend: str) -> tuple:
    """The loss and gradients of several batches, which add up."""
    total, sums = 0.0, {}
    for inputs in batches:
        loss, gradients = loss_and_gradients(model, padding_free, backend, **inputs)
        total += loss
        for name, gradient in gradients.items():
            sums[name] = sums.get(name, 0) + gradient
    return total, sums


def trained_on(
    model: LlavaMetaForCausalLM, trainer, groups: list[list[dict]], padding_free: bool, backend: str
) -> tuple:
    """The loss and gradients of groups of a trainer's samples, each group collated to a batch."""
    trainer.data_collator.padding_free = padding_free
    collated = (trainer.data_collator(items) for items in groups)
    batches = ({name: value for name, value in batch.items() if name != "indices"} for batch in collated)
    return summed(model.train(), batches, padding_free, backend)


def assert_layouts_agree(alone: tuple, together: Callable[[bool, str], tuple]) -> None:
    """Padded, and packed on every backend, samples have the loss and gradients that they have alone.

    Args:
        together: loss and gradients by whether padding is left out and by backend.
    """
    expected_loss, expected = alone
    for padding_free, backend in [(False, "sdpa"), *((True, backend) for backend in BACKENDS)]:
        loss, gradients = together(padding_free, backend)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5, msg=f"{backend} {name}")


def one_by_one(model: LlavaMetaForCausalLM, inputs: dict) -> tuple:
    """Each sample in its own batch, without padding; losses and gradients add up."""
    return summed(model, each_alone(inputs), False, "eager")


def each_alone(inputs: dict) -> Iterator[dict]:
    """A batch for each sample of a padded batch, without padding."""
    taken = 0
    for ids, mask, labels in zip(inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True):
        count = int((ids == IMG).sum())
        images = inputs["images"][taken : taken + count] if count else None
        taken += count
        yield {"input_ids": ids[None, mask], "labels": labels[None, mask], "images": images}
