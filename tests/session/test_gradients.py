"""Gradients mean what they mean in PyTorch: read, written, zeroed, clipped, accumulated, or not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import patrickstar
from patrickstar import StateError
from patrickstar.core.planes import GRAD
from tests.composed import Composed
from tests.parity.compare import same_bits
from tests.parity.oracle import clip
from tests.session.builders import (
    EMULATED,
    WIDTH,
    MakePair,
    Pair,
    alike,
    assert_same,
    backward,
    batch,
    finish,
    loss_of,
    mlp,
    seeded,
    store_of,
    train_step,
)


def test_gradients_iterates_over_names_in_registration_order_and_gives_copies(pair: Pair) -> None:
    assert list(pair.session.gradients()) == []
    pair.each(backward)
    pair.expect_same_gradients()
    found = dict(pair.session.gradients())
    assert list(found) == [name for name, _ in pair.plain.named_parameters()]
    torch._foreach_add_(list(found.values()), 7)
    pair.each(lambda model, optimizer: optimizer.step())
    pair.expect_same()


def test_a_step_without_room_for_gradients_of_the_users_own_is_none(make_pair: MakePair) -> None:
    pair = make_pair(**EMULATED)
    for model in (pair.model, pair.plain):
        model[0].weight.grad = torch.full((WIDTH, WIDTH), 0.5)
    views = [layer.weight[:1] for layer in pair.model[2:9:2]]
    with pytest.raises(patrickstar.BudgetError, match="short"):
        pair.session.optimizer.step()
    views.clear()
    pair.each(lambda model, optimizer: optimizer.step())
    pair.expect_same()
    assert pair.session.stats().steps == 1


# reading and writing .grad


def test_a_gradient_of_another_shape_is_refused_as_in_pytorch(pair: Pair) -> None:
    pair.each(backward)
    with pytest.raises(RuntimeError, match="size"):
        pair.model[0].weight.grad = torch.ones(3)
    pair.each(lambda model, optimizer: optimizer.step())
    pair.expect_same()


# zeroing


def test_a_gradient_that_is_held_is_zeroed_in_place_as_in_pytorch(pair: Pair) -> None:
    def hold(model: nn.Module, optimizer: Any) -> tuple[bool, torch.Tensor]:
        backward(model)
        gradient = model[0].weight.grad
        optimizer.zero_grad(set_to_none=False)
        return model[0].weight.grad is gradient, gradient

    (same, want), (still, got) = pair.each(hold)
    assert (same, still) == (True, True)
    assert same_bits(want, got)


def test_only_the_groups_parameters_are_zeroed_by_the_optimizer(make_pair: MakePair) -> None:
    """A gradient that no group holds goes on accumulating, and counts in the norm."""
    pair = make_pair(make_optimizer=lambda model: patrickstar.AdamW([*model.parameters()][2:], lr=1e-2))
    pair.train(3)
    pair.expect_same_gradients()
    assert {name for name, _ in pair.session.gradients()} == {"0.weight", "0.bias"}
    assert same_bits(mlp()[0].weight.detach(), pair.session.state_dict()["0.weight"])
    pair.plain.zero_grad()
    pair.model.zero_grad()
    pair.train_same(1, first=3)


def test_zeros_are_for_the_groups_parameters_only_also_inside_of_a_chunk(make_pair: MakePair) -> None:
    def of_weights(model: nn.Module) -> Any:
        return patrickstar.AdamW([p for p in model.parameters() if p.dim() == 2], lr=1e-2)

    pair = make_pair(make_optimizer=of_weights)
    for number in range(2):
        pair.each(backward, number)
        pair.each(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad(set_to_none=False)))
        pair.expect_same_gradients()
    gradients = dict(pair.session.gradients())
    assert not gradients["2.weight"].any()
    assert gradients["2.bias"].any()
    pair.expect_same()


def test_a_frozen_parameter_and_an_unused_one_have_none(make_pair: MakePair) -> None:
    def partly() -> nn.Module:
        return Composed(lambda model, x: model.layers(x), layers=mlp(), unused=nn.Linear(4, 4))

    def freeze(model: nn.Module, _: Any) -> None:
        model.layers[2].requires_grad_(False)

    pair = make_pair(partly, before=freeze)
    pair.train(2)
    pair.each(backward, 2)
    pair.expect_same_gradients()
    assert not {"layers.2.weight", "unused.weight"} & {name for name, _ in pair.session.gradients()}
    pair.each(lambda model, optimizer: optimizer.step())
    pair.expect_same()


# accumulation and clipping


def test_max_grad_norm_clips_at_every_step(make_pair: MakePair) -> None:
    pair = make_pair(max_grad_norm=1e-3, device="emulated", device_memory=48 * 1024)
    for number in range(2):
        pair.each(backward, number)
        clip({name: p.grad for name, p in pair.plain.named_parameters()}, 1e-3)
        pair.step()
    pair.expect_same()


def test_a_gradient_that_is_not_finite_goes_where_it_goes_in_pytorch(make_pair: MakePair) -> None:
    def spoil(model: nn.Module, optimizer: Any, value: float) -> None:
        x = batch()
        x[0, 0] = value
        finish(model(x).sum(), optimizer)

    for value in (float("nan"), float("inf")):
        pair = make_pair()
        pair.train(1)
        pair.each(spoil, value)
        pair.train_same(1, first=1)
        weights = pair.session.state_dict()
        assert weights["0.weight"].isnan().any() or weights["0.weight"].isinf().any()


def test_a_norm_that_is_not_finite_clips_as_in_pytorch(pair: Pair) -> None:
    pair.each(lambda model, _: (model[:2](batch()) * float("inf")).sum().backward())
    want = nn.utils.clip_grad_norm_(pair.plain.parameters(), 1.0)
    got = pair.session.clip_grad_norm_(1.0)
    assert want.isnan().item() == got.isnan().item()
    pair.expect_same_gradients()


def test_a_gradient_of_negative_zero_stays_negative(trained: Pair) -> None:
    trained.each(lambda model, _: (model[0].weight * torch.tensor(-0.0)).sum().backward())
    trained.expect_same_gradients()
    (gradient,) = dict(trained.session.gradients()).values()
    assert torch.signbit(gradient).all()


# in backward


def test_gradients_are_not_to_be_had_with_in_backward(make_pair: MakePair) -> None:
    pair = make_pair(step="in_backward", device="emulated", device_memory=48 * 1024)
    pair.train(2)
    pair.model(batch(2)).square().mean().backward()
    with pytest.raises(StateError, match="deferred"):
        list(pair.session.gradients())
    with pytest.raises(StateError, match="deferred"):
        pair.session.clip_grad_norm_(1.0)
    with pytest.raises(StateError, match="deferred"):
        pair.model[0].weight.grad.norm()
    pair.each(lambda model, optimizer: None)
    train_step(pair.plain, pair.plain_optimizer, 2)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.train_same(1, first=3)


def test_hyper_parameters_are_read_when_the_backward_begins(make_pair: MakePair) -> None:
    pair = make_pair(step="in_backward", device="emulated", device_memory=48 * 1024)
    loss = loss_of(pair.model)
    for optimizer in (pair.original, pair.plain_optimizer):
        optimizer.param_groups[0]["lr"] = 0.5
    loss.backward()
    pair.original.param_groups[0]["lr"] = 0.0  # too late
    pair.optimizer.step()
    train_step(pair.plain, pair.plain_optimizer)
    pair.expect_same()


def leave_gradients(model: nn.Module, _: Any) -> None:
    F.mse_loss(model(torch.ones(4, WIDTH)), torch.zeros(4, WIDTH)).backward()


@pytest.mark.parametrize("given", ["from before", "assigned", "assigned to one", "assigned before a backward"])
@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_a_gradient_that_no_backward_has_used_is_used_at_the_step(given: str, device: str) -> None:
    tight = {"device": "emulated", "device_memory": 80 * 1024} if device == "emulated" else {"device": "cpu"}
    before = leave_gradients if given == "from before" else None
    pair = Pair(step="in_backward", precision="fp32", before=before, **tight)

    def step(model: nn.Module, optimizer: Any) -> None:
        if given.startswith("assigned"):
            for parameter in list(model.parameters())[: 1 if given == "assigned to one" else None]:
                parameter.grad = torch.ones_like(parameter, memory_format=torch.contiguous_format).detach()
        if given != "assigned":
            # The others' gradients are as they were.
            used = next(iter(model.children())) if given == "from before" else model
            used(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        pair.each(step)
        assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_a_gradient_that_is_assigned_after_the_update_is_refused_with_in_backward(make_pair: MakePair) -> None:
    pair = make_pair(step="in_backward", device="emulated", device_memory=48 * 1024)
    pair.model(torch.ones(4, WIDTH)).square().mean().backward()
    weight = next(pair.model.parameters())
    with pytest.raises(StateError, match="was used and released"):
        weight.grad = torch.ones(weight.shape)


def test_a_step_that_would_use_gradients_again_is_refused_with_in_backward(make_pair: MakePair) -> None:
    """PyTorch steps again with the gradients that are still there, and adds the next ones to them."""
    pair = make_pair(step="in_backward", device="emulated", device_memory=48 * 1024)
    pair.optimizer.step()  # no gradient yet: nothing to do, as in PyTorch
    pair.each(lambda model, optimizer: (loss_of(model).backward(), optimizer.step()))
    with pytest.raises(StateError, match=r"step\(\) again.*zero_grad\(\).*deferred"):
        pair.optimizer.step()
    with pytest.raises(StateError, match=r"a backward after a step.*zero_grad\(\).*deferred"):
        loss_of(pair.model, 1).backward()
    pair.expect_same()


# without a budget and without a disk gradients stay the tensors that autograd makes


@pytest.fixture
def whole(make_pair: MakePair) -> Iterator[Pair]:
    whole = make_pair(device="cpu")
    yield whole
    assert_same(whole.plain, whole.plain_optimizer, whole.session)


@pytest.mark.whole
def test_no_gradient_lies_in_a_chunk_and_all_count_as_model_data(whole: Pair) -> None:
    whole.train(2)
    whole.each(backward, 2)
    state = store_of(whole.session).state
    assert all(state.is_free(ref) for ref in state.home if ref.plane == GRAD)
    stats = whole.session.stats()
    assert stats.planned_steps == 2, stats.reason
    assert not sum(stats.moved.values())
    assert stats.model_data["grad"] == 4 * sum(p.numel() for p in whole.plain.parameters())
    whole.step()


@pytest.mark.whole
def test_gradients_are_the_very_tensors_that_p_grad_gives(whole: Pair) -> None:
    whole.each(backward)
    for name, gradient in whole.session.gradients():
        assert gradient is dict(whole.model.named_parameters())[name].grad
    whole.each(lambda model, _: model[2].weight.grad.mul_(2))
    whole.each(lambda model, optimizer: optimizer.step())
    whole.expect_same_gradients()


@pytest.mark.parametrize("machine", [{"device": "cpu"}, EMULATED], ids=["in tensors", "in chunks"])
def test_gradients_from_before_are_added_to(make_pair: MakePair, machine: dict[str, Any]) -> None:
    pair = make_pair(before=backward, **machine)
    pair.expect_same_gradients()
    pair.train(2, first=1)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_tensors_longer_than_a_chunk(make_pair: MakePair) -> None:
    """Each piece is updated from its own piece of the gradient."""
    build = seeded(lambda: nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32)))
    pair = make_pair(build, with_options={"chunk_size": 1024}, device="cpu")
    assert max(run.length for run in pair.session.layout.runs) > 2
    pair.train(3)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


@pytest.mark.whole
def test_close_leaves_gradients_where_they_are(make_pair: MakePair) -> None:
    pair = make_pair(device="cpu")
    pair.each(backward)
    gradients = [p.grad for p in pair.model.parameters()]
    pair.session.close()
    assert all(p.grad is gradient for p, gradient in zip(pair.model.parameters(), gradients, strict=True))
    assert alike([p.grad for p in pair.plain.parameters()], gradients)
