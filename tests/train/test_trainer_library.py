"""What `llava/train/llava_trainer.py` relies on inside the library's Trainer is there, in transformers 5.17 to 5.23."""

import inspect

import pytest
from transformers import Trainer

from llava.train.llava_trainer import LLaVATrainer

# The methods that LLaVATrainer replaces, with their parameters.
REPLACED = {
    "get_train_dataloader": "",
    "create_optimizer": "model",
    "get_decay_parameter_names": "model",
    "get_batch_samples": "epoch_iterator num_batches device",
    "training_step": "model inputs num_items_in_batch",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "log": "logs start_time",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "save_model": "output_dir _internal_call",
    "_clip_grad_norm": "model",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "_load_from_checkpoint": "resume_from_checkpoint model",
}
# Those that it calls.
CALLED = {
    "_get_num_items_in_batch": "batch_samples device",
    "_save": "output_dir state_dict",
    "get_optimizer_cls_and_kwargs": "args model",
}


def test_every_replaced_method_of_the_library_is_listed():
    inherited = {name for name in vars(LLaVATrainer) if hasattr(Trainer, name) and not name.startswith("__")}
    assert inherited == REPLACED.keys()


@pytest.mark.parametrize("method", [*REPLACED, *CALLED])
def test_parameters_of_the_library_method(method):
    expected = (REPLACED | CALLED)[method].split()
    parameters = [name for name in inspect.signature(getattr(Trainer, method)).parameters if name != "self"]
    assert [name for name in parameters if name != "kwargs"] == expected
