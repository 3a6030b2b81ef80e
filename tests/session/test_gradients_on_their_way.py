"""Gradients that begin to go to their updates on the host before the step is called: whatever is done in between, no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD
from tests.session.builders import CHUNK, LAYERS, SLOT, MakePair, Pair, backward, loss_of
from tests.session.test_host_updates import ON_HOST

Loop = Callable[[nn.Module, Any, int], object]

ROOM = (2 * LAYERS + 2) * SLOT + 16384
"""For weights and gradients, and not for the states."""


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    """A pair that has trained, with gradients that will be used on the host."""
    made = make_pair(choice=ON_HOST, device="emulated", device_memory=ROOM)
    made.train(3)
    return made


def on_their_way(pair: Pair) -> int:
    flights = pair.session._parts.executor.store.state.in_flight
    assert set(flights.values()) <= {(Tier.DEVICE, Tier.HOST)}
    assert {ref.plane for ref in flights} <= {GRAD}
    return len(flights)


def bytes_down(pair: Pair, steps: int, loop: Loop, *, first: int) -> float:
    """Bytes that go down a step, in chunks."""
    before = pair.session.stats().moved["D>H"]
    for number in range(first, first + steps):
        pair.each(loop, number)
    return (pair.session.stats().moved["D>H"] - before) / (steps * 4 * CHUNK)


def test_gradients_are_on_their_way_when_the_backward_ends(pair: Pair) -> None:
    pair.each(backward, 3)
    assert on_their_way(pair) == LAYERS - 1  # the first layer's is complete when the backward is over
    pair.step()
    pair.train(2, first=4)
    assert pair.session.stats().planned_steps == 6, pair.session.stats().reason
    pair.expect_same()


def accumulating(count: int) -> Loop:
    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        for micro in range(count):
            (loss_of(model, number + 10 * micro) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_gradient_goes_down_once_a_step_when_all_of_it_has_been_added_up(count: int, make_pair: MakePair) -> None:
    pair = make_pair(choice=ON_HOST, device="emulated", device_memory=ROOM, with_options={"accumulate": count})
    for number in range(3):
        pair.each(accumulating(count), number)
    assert bytes_down(pair, 3, accumulating(count), first=3) == LAYERS
    pair.expect_same()


def halve_by_hand(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def look(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def evaluate(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        loss_of(model, 7)


def once_more(model: nn.Module, optimizer: Any) -> None:
    backward(model, optimizer, 8)


def forget(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model, optimizer, 9)


def forget_some(model: nn.Module, optimizer: Any) -> None:
    model[2].weight.grad = None
    model[2].bias.grad = None


def fail(model: nn.Module, optimizer: Any) -> None:
    with suppress(RuntimeError):
        loss_of(model, 5, rows=3).view(7)


@pytest.mark.parametrize("act", [halve_by_hand, look, evaluate, once_more, forget, forget_some, fail])
def test_whatever_is_done_before_the_step_has_the_values_that_it_would_have(
    act: Callable[[nn.Module, Any], object], pair: Pair
) -> None:
    pair.each(backward, 3)
    assert on_their_way(pair)
    pair.each(act)
    pair.expect_same_gradients()
    pair.step()
    pair.train_same(2, first=4)


def test_a_checkpoint_with_gradients_on_their_way_is_that_of_before_the_step(pair: Pair, tmp_path: Any) -> None:
    pair.each(backward, 3)
    assert on_their_way(pair)
    pair.session.save_checkpoint(tmp_path / "saved")
    pair.step()
    pair.train_same(2, first=4)
    pair.session.load_checkpoint(tmp_path / "saved")


def test_close_with_gradients_on_their_way_leaves_the_weights(pair: Pair) -> None:
    pair.each(backward, 3)
    assert on_their_way(pair)
    pair.session.close()
    for name, weight in pair.plain.state_dict().items():
        assert pair.model.state_dict()[name].equal(weight)
