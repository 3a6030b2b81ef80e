"""Without a budget and without a disk: gradients stay the tensors that autograd makes, and everything means what it means in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

import patrickstar
from patrickstar.core.planes import GRAD
from tests.session.builders import MakePair, Pair, assert_same, backward, expect_bits, mlp, seeded, train_step, values


@pytest.fixture
def pair(make_pair: MakePair) -> Iterator[Pair]:
    pair = make_pair(device="cpu")
    yield pair
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_no_gradient_lies_in_a_chunk(pair: Pair) -> None:
    pair.train(2)
    assert all(ref.plane != GRAD for ref in pair.session._parts.executor.store.state.home)
    assert pair.session.stats().planned_steps == 2, pair.session.stats().reason
    assert not sum(pair.session.stats().moved.values())


def test_gradients_count_as_model_data(pair: Pair) -> None:
    pair.each(backward)
    stats = pair.session.stats()
    numel = sum(p.numel() for p in pair.plain.parameters())
    assert stats.model_data["grad"] == 4 * numel
    pair.step()


def test_gradients_are_the_very_tensors_that_p_grad_gives(pair: Pair) -> None:
    pair.each(backward)
    for name, gradient in pair.session.gradients():
        assert gradient is dict(pair.model.named_parameters())[name].grad
    pair.each(lambda model, _: model[2].weight.grad.mul_(2))
    pair.each(lambda model, optimizer: optimizer.step())
    pair.expect_same_gradients()


def test_gradients_from_before_are_added_to(make_pair: MakePair) -> None:
    pair = make_pair(before=lambda model, _: backward(model), device="cpu")
    pair.expect_same_gradients()
    pair.each(train_step, 1)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_tensors_longer_than_a_chunk(make_pair: MakePair) -> None:
    """Each piece is updated from its own piece of the gradient."""
    build = seeded(lambda: nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32)))
    pair = make_pair(build, with_options={"chunk_size": 1024}, device="cpu")
    assert max(run.length for run in pair.session.layout.runs) > 2
    pair.train(3)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_close_leaves_gradients_where_they_are() -> None:
    plain, model = mlp(), mlp()
    session = patrickstar.manage(model, patrickstar.AdamW(model.parameters()), device="cpu")
    backward(plain)
    backward(model)
    gradient = model[0].weight.grad
    session.close()
    assert model[0].weight.grad is gradient
    expect_bits(values(plain), values(model))
    want = {name: p.grad for name, p in plain.named_parameters()}
    expect_bits(want, {name: p.grad for name, p in model.named_parameters()})
