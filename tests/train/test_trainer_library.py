"""What `llava/train/llava_trainer.py` relies on inside the library's Trainer is there, in transformers 5.17 to 5.23."""

import inspect

import pytest
from transformers import Trainer

from llava.train.llava_trainer import LLaVATrainer

REPLACED = [name for name in vars(LLaVATrainer) if hasattr(Trainer, name) and not name.startswith("__")]
# Methods of the library that are called.
CALLED = {
    "_get_num_items_in_batch": ["batch_samples", "device"],
    "_save": ["output_dir", "state_dict"],
    "get_optimizer_cls_and_kwargs": ["args", "model"],
}


def parameters(trainer: type, method: str) -> list[str]:
    every = inspect.signature(getattr(trainer, method)).parameters.values()
    return [p.name for p in every if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def test_at_most_twelve_methods_are_replaced_three_of_them_private():
    assert len(REPLACED) <= 12 and sum(name.startswith("_") for name in REPLACED) <= 3


@pytest.mark.parametrize("method", [*REPLACED, *CALLED])
def test_parameters_of_the_library_method(method):
    expected = CALLED.get(method) or parameters(LLaVATrainer, method)
    found = parameters(Trainer, method)
    assert found[: len(expected)] == expected if method == "compute_loss" else found == expected
