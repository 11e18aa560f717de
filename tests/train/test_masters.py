"""16-bit weights with fp32 masters: gradients add up in fp32, and no small step is lost."""

import pytest
import torch
from torch import nn
from training import build, flags, run

from llava.train.llava_trainer import LLaVATrainer
from llava.train.optim import MasterWeights, load_masters, updated_parameters


def small(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    model[2].float()  # as the projector, which stays fp32
    return model


def loss_of(model, x):
    return model[2](model[:2](x.to(model[0].weight.dtype)).float()).square().sum()


def with_masters(model, **options):
    masters = MasterWeights(model.parameters())
    optimizer = torch.optim.AdamW(masters.of(model.parameters()), **options)
    optimizer.register_load_state_dict_pre_hook(load_masters)
    masters.attach(optimizer)
    return masters, optimizer


@pytest.mark.numeric
def test_gradients_of_micro_batches_are_added_up_in_fp32():
    model, xs = small(), torch.randn(5, 3, 8)
    masters, optimizer = with_masters(model, lr=0.1)
    expected = torch.zeros(16, 8)
    for x in xs:
        (gradient,) = torch.autograd.grad(loss_of(model, x), model[0].weight)
        expected += gradient.float()
        loss_of(model, x).backward()
    master = masters.masters[model[0].weight]
    assert torch.equal(master.grad, expected)
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    before = master.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, master.bfloat16()) and not torch.equal(master, before)
    assert all(p.grad is None for p in masters.of(model.parameters()))


def test_a_parameter_without_a_gradient_in_a_step_is_left_alone():
    """Its buffer still holds the gradient of the step before."""
    model = small()
    masters, optimizer = with_masters(model, lr=0.1)
    loss_of(model, torch.randn(3, 8)).backward()
    optimizer.step()
    before = [p.detach().clone() for p in masters.masters.values()]
    model[2].weight.sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, masters.masters.values(), strict=True))


@pytest.mark.numeric
def test_steps_that_bf16_cannot_show_are_not_lost():
    model = small()
    start = model[0].weight.detach().clone()
    masters, optimizer = with_masters(model, lr=1e-6)
    for step in range(1, 4):
        loss_of(model, torch.ones(1, 8)).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, start)
        moved = (masters.masters[model[0].weight].detach() - start).abs().max()
        assert moved == pytest.approx(step * 1e-6, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_are_saved_with_optimizer_state_and_load_into_fp32(dtype):
    first = small()
    masters, optimizer = with_masters(first, lr=1e-4)
    loss_of(first, torch.randn(3, 8)).backward()
    optimizer.step()
    second = small(dtype)
    theirs, other = with_masters(second, lr=1e-4)
    other.load_state_dict(optimizer.state_dict())
    ours, found = masters.of(first[0].parameters()), theirs.of(second[0].parameters())
    assert all(b.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(ours, found, strict=True))


def test_weights_of_a_checkpoint_in_fp32_are_not_rounded_to_masters():
    _, other = with_masters(small(torch.float32), lr=1e-4)
    state = other.state_dict()
    del state["masters"]  # several processes have none
    _, optimizer = with_masters(small(), lr=1e-4)
    with pytest.raises(ValueError, match="of several processes without DeepSpeed, whose weights are fp32"):
        optimizer.load_state_dict(state)


def test_trained_weights_but_the_projectors_are_bf16_and_updated_in_fp32(tiny, tmp_path):
    model, trainer = build(flags(tiny, tmp_path, 2, bf16=True))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    projector = {name for name in dtypes if ".mm_projector." in name}
    assert {dtypes[name] for name in projector} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - projector} == {torch.bfloat16}
    optimizer = trainer.create_optimizer()
    updated = updated_parameters(optimizer)
    assert {p.dtype for p in updated} == {torch.float32}
    assert len(updated) == sum(p.requires_grad for p in model.parameters())


def test_a_step_that_is_not_finite_leaves_masters_and_model(tiny, tmp_path, monkeypatch):
    taken = []

    def keep(self, *args, **kwargs):
        taken.append([p.detach().clone() for p in self.model.parameters() if p.dtype == torch.bfloat16])
        loss = training_step(self, *args, **kwargs)
        if len(taken) == 2:
            own, updated = set(self.model.parameters()), updated_parameters(self.optimizer)
            next(p for p in updated if p not in own).grad[0] = torch.nan  # a master's alone
        return loss

    training_step = LLaVATrainer.training_step
    monkeypatch.setattr(LLaVATrainer, "training_step", keep)
    run(tiny, tmp_path / "run", 2, max_steps=3, bf16=True)
    equal = [all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(taken, taken[1:], strict=False)]
    assert equal == [False, True]
