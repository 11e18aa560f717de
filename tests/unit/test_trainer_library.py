"""What `llava/train/llava_trainer.py` relies on inside the library's Trainer is there, in transformers 5.17 to 5.23."""

import ast
import inspect
import textwrap

import pytest
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

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
# Where the library calls these and others, in this order and no more often.
CALLS = {
    "train": ["self._load_from_checkpoint(resume_from_checkpoint)"],
    "_inner_training_loop": [
        "self.get_train_dataloader()",
        "self._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, "
        "trial)",
        "self._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)",
        "self.callback_handler.on_train_begin(args, self.state, self.control)",
        "self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)",
        "self._finalize_training(trial, num_train_samples, start_time)",
    ],
    "_prepare_for_training": [
        "self._wrap_model(self.model_wrapped)",
        "self.create_scheduler(num_training_steps=max_steps)",
        "self._load_optimizer_and_scheduler(resume_from_checkpoint)",
    ],
    "_run_epoch": [
        "self.get_batch_samples(epoch_iterator, num_batches, self.args.device)",
        "self.callback_handler.on_step_begin(self.args, self.state, self.control)",
        "self.training_step(model, inputs, num_items_in_batch)",
        "self.floating_point_ops(inputs)",
        "self._track_num_input_tokens(inputs)",
        "self._clip_grad_norm(model)",
        "self._get_grad_norm(model, grad_norm=grad_norm)",
        "self.optimizer.step()",
        "self.lr_scheduler.step()",
        "self.callback_handler.on_step_end(self.args, self.state, self.control)",
    ],
    "training_step": [
        "self._prepare_inputs(inputs)",
        "self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)",
        "self.accelerator.backward(loss, **kwargs)",
    ],
    "_clip_grad_norm": ["self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)"],
    "_maybe_log_save_evaluate": [
        "self.log(logs, start_time)",
        "self._evaluate(trial, ignore_keys_for_eval)",
        "self._determine_best_metric(metrics=metrics, trial=trial)",
        "self._save_checkpoint(model, trial)",
        "self.callback_handler.on_save(self.args, self.state, self.control)",
    ],
    "_evaluate": ["self.evaluate(ignore_keys=ignore_keys_for_eval)"],
    "_save_checkpoint": [
        "self.save_model(output_dir, _internal_call=True)",
        "self._save_optimizer_and_scheduler(output_dir)",
        "self._save_rng_state(output_dir)",
        "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
    ],
    "_finalize_training": [
        "self.log(metrics)",
        "self.callback_handler.on_train_end(self.args, self.state, self.control)",
    ],
}
# Conditions and values that LLaVATrainer sets or reads.
PHRASES = {
    "_run_epoch": [
        "if self.args.max_grad_norm > 0:",
        "if not self.accelerator.optimizer_step_was_skipped:",
        "self.current_gradient_accumulation_steps = len(batch_samples)",
        "if self.args.logging_nan_inf_filter and",
        "self._tr_loss += tr_loss_step",
        "epoch_iterator = iter(train_dataloader)",
    ],
    "training_step": ["loss = loss / self.current_gradient_accumulation_steps", "return loss.detach()"],
    "_get_grad_norm": ["if grad_norm is None:", "return grad_norm"],
    "_finalize_training": [
        "if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:",
        "self.args.save_total_limit == 1",
    ],
    "_determine_best_metric": ["if self.args.metric_for_best_model is not None:"],
    "_save_checkpoint": [
        "checkpoint_folder = f'{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}'",
        "save_total_limit=self.args.save_total_limit",
        "self.state.best_model_checkpoint = best_checkpoint_dir",
    ],
    "_init_training_state": ["return (epochs_trained, steps_trained_in_current_epoch)"],
    "floating_point_ops": [" in inputs and hasattr(self.model, 'num_parameters')", "inputs[main_input].numel()"],
}


def tree_of(method: str) -> ast.AST:
    """The syntax tree of a method of the library's Trainer."""
    return ast.parse(textwrap.dedent(inspect.getsource(getattr(Trainer, method))))


def test_every_replaced_method_of_the_library_is_listed():
    inherited = {name for name in vars(LLaVATrainer) if hasattr(Trainer, name) and not name.startswith("__")}
    assert inherited == REPLACED.keys()


@pytest.mark.parametrize("method", [*REPLACED, *CALLED])
def test_parameters_of_the_library_method(method):
    expected = (REPLACED | CALLED)[method].split()
    parameters = [name for name in inspect.signature(getattr(Trainer, method)).parameters if name != "self"]
    assert [name for name in parameters if name != "kwargs"] == expected


@pytest.mark.parametrize("method", [name for name in REPLACED if name != "compute_loss"])
def test_replacing_method_has_the_parameters_of_the_library_method(method):
    ours, theirs = (list(inspect.signature(getattr(cls, method)).parameters) for cls in (LLaVATrainer, Trainer))
    assert ours == theirs


@pytest.mark.parametrize("caller", CALLS)
def test_calls_inside_the_library_method(caller):
    calls = [node for node in ast.walk(tree_of(caller)) if isinstance(node, ast.Call)]
    names = {call.split("(")[0] for call in CALLS[caller]}
    calls = sorted((node for node in calls if ast.unparse(node.func) in names), key=lambda node: node.lineno)
    assert [ast.unparse(node) for node in calls] == CALLS[caller]


@pytest.mark.parametrize("method", PHRASES)
def test_phrases_inside_the_library_method(method):
    source = ast.unparse(tree_of(method))
    assert [phrase for phrase in PHRASES[method] if phrase not in source] == []


def test_callbacks_are_called_in_the_order_of_their_list():
    assert "for callback in self.callbacks:" in inspect.getsource(CallbackHandler.call_event)
