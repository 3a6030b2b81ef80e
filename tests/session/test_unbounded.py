"""Without a budget and without a disk: gradients stay the tensors that autograd makes, and everything means what it means in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.core.planes import GRAD
from tests.parity.compare import same_bits
from tests.session.builders import MakePair, Pair, assert_same, backward, batch, expect_bits, mlp, train_step, values


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


def test_accumulated_and_clipped(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: Any, clip: Callable[[], Any]) -> torch.Tensor:
        for number in range(3):
            backward(model, number=number)
        norm: torch.Tensor = clip()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for _ in range(2):
        state = torch.get_rng_state()
        want = step(
            pair.plain,
            pair.plain_optimizer,
            lambda: patrickstar_clip(pair.plain, 0.01),
        )
        torch.set_rng_state(state)
        got = step(pair.model, pair.optimizer, lambda: pair.session.clip_grad_norm_(0.01))
        assert same_bits(want, got)


def patrickstar_clip(model: nn.Module, max_norm: float) -> torch.Tensor:
    """As the definition of the norm says, on ordinary gradients."""
    from patrickstar.optim.norm import GlobalNorm, clip_factor

    norm = GlobalNorm()
    for p in model.parameters():
        assert p.grad is not None
        norm.add_tensor(p.grad)
    factor = clip_factor(max_norm, norm.result())
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(factor)
    return norm.result()


def test_torchs_own_clipping_works(pair: Pair) -> None:
    def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
        backward(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    pair.same(step)


@pytest.mark.parametrize(
    "zero",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: None,
        lambda model, optimizer: setattr(model[0].weight, "grad", None),
    ],
    ids=["none", "zeros", "model", "model zeros", "never", "one"],
)
def test_zeroing(pair: Pair, zero: Callable[[Any, Any], Any]) -> None:
    for number in range(3):
        pair.each(lambda model, optimizer, number=number: (backward(model, number=number), optimizer.step()))
        pair.each(zero)
    pair.expect_same_gradients()


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


def test_strided_gradients(make_pair: MakePair) -> None:
    def build() -> nn.Module:
        model = mlp()
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
        return model

    pair = make_pair(build, device="cpu")
    pair.train(2)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_tensors_longer_than_a_chunk(make_pair: MakePair) -> None:
    """Each piece is updated from its own piece of the gradient."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32))

    pair = make_pair(build, with_options={"chunk_size": 1024}, device="cpu")
    assert max(run.length for run in pair.session.layout.runs) > 2
    pair.train(3)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)


def test_a_checkpoint_and_what_close_gives_back(pair: Pair, tmp_path: Path) -> None:
    pair.train(2)
    pair.session.save_checkpoint(tmp_path)
    with torch.no_grad():
        pair.model[0].weight.zero_()
    pair.session.load_checkpoint(tmp_path)
    pair.train(1, first=2)
    pair.each(backward, 3)


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
    expect_bits(want, {name: p.grad for name, p in model.named_parameters()})  # type: ignore[arg-type]


def test_what_departs_from_the_trace_is_said(pair: Pair) -> None:
    pair.train(1)
    pair.each(lambda model, _: model[:3](batch()).sum().backward())
    pair.step()
    pair.train(1, first=1)
