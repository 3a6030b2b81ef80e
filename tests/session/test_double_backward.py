"""Losses with a gradient in them: exact like any other, and planned from the second such step on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.composed import Composed
from tests.session.builders import (
    MACHINES,
    SLOT,
    TIGHT,
    WIDTH,
    MakePair,
    Pair,
    assert_same,
    batch,
    finish,
    machine_with,
    mlp,
    seeded,
)

Step = Callable[..., Tensor]

ROOM = 7 * SLOT
"""Bytes for three of the twenty-four slots of model data, beside a graph of gradients: one that kept its weights in use would need six for these."""


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return machine_with(request.param, ROOM, tmp_path / "disk")


def penalised_step(model: nn.Module, optimizer: Any, number: int = 0) -> Tensor:
    """A gradient penalty: on the slope of the output along the input."""
    x = batch(number).requires_grad_()
    value = model(x).square().mean()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return finish(value + slope.square().sum(), optimizer)


def sloped_step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
    """Of an input that wants a gradient, and no penalty."""
    return finish(model(batch(number).requires_grad_()).square().mean(), optimizer)


def penalised_inside(model: Any, optimizer: Any, number: int = 0) -> Tensor:
    """A penalty on the slope along what the first layer gives: no input of the model wants a gradient."""
    seen: list[Tensor] = []
    hook = model[1].register_forward_hook(lambda module, args, out: seen.append(out))
    value = model(batch(number)).square().mean()
    hook.remove()
    (slope,) = torch.autograd.grad(value, seen[-1], create_graph=True)
    seen.clear()
    return finish(value + slope.square().sum(), optimizer)


def recomputed(*, reentrant: bool) -> nn.Module:
    """Recomputes its blocks, in backward."""

    def run(model: Any, x: Tensor) -> Tensor:
        for layer in range(0, 12, 4):
            x = checkpoint(model.layers[layer : layer + 4], x, use_reentrant=reentrant)
        return x

    return Composed(run, layers=mlp())


def counts(pair: Pair) -> tuple[int, int]:
    stats = pair.session.stats()
    return stats.planned_steps, stats.reactive_steps


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
def test_a_gradient_penalty_is_planned_from_its_second_step_on(
    make_pair: MakePair, machine: dict[str, Any], step: str
) -> None:
    pair = make_pair(step=step, **machine)
    pair.train_same(1, by=penalised_step)
    assert counts(pair) == (0, 1)
    assert "create_graph=True" in pair.session.stats().reason
    pair.train_same(1, first=1, by=penalised_step)
    assert counts(pair) == (1, 1), pair.session.stats().reason
    pair.train_same(3, first=2, by=penalised_step)
    assert counts(pair) == (4, 1), pair.session.stats().reason


@pytest.mark.parametrize("in_blocks", [True, False], ids=["blocks are recomputed", "memory has no bound"])
def test_so_it_is_elsewhere(make_pair: MakePair, in_blocks: bool) -> None:
    machine = {"device": "emulated", "device_memory": ROOM} if in_blocks else {"device": "cpu"}
    pair = make_pair(partial(recomputed, reentrant=False) if in_blocks else mlp, **machine)
    pair.train(4, by=penalised_step)
    assert_same(pair.plain, pair.plain_optimizer, pair.session)
    assert counts(pair) == (3, 1), pair.session.stats().reason


def test_a_penalty_inside_of_the_model_is_planned_once_it_is_measured(
    make_pair: MakePair, machine: dict[str, Any]
) -> None:
    """At once where every step is measured; else the second step is, since nothing announces the first."""
    pair = make_pair(**machine)
    pair.train_same(2, by=penalised_inside)
    measured_at_once = machine["device"] != "cpu"
    assert counts(pair) == ((1, 1) if measured_at_once else (0, 2)), pair.session.stats().reason
    if not measured_at_once:
        assert "is being measured" in pair.session.stats().reason
    pair.train_same(3, first=2, by=penalised_inside)
    assert counts(pair) == ((4, 1) if measured_at_once else (3, 2)), pair.session.stats().reason


def test_a_penalty_at_some_steps_leaves_the_plan_of_the_others(moving: Pair) -> None:
    """Lazy regularisation: the step after the first penalty is expected to have one too, and from then on only penalties depart."""
    for number in range(24):
        moving.same(penalised_step if number % 4 == 3 else sloped_step, number)
    moving.expect_same()
    (known,) = moving.session._parts.stretches.known.kinds.values()
    assert known.trace is known.offline, "what was measured of a penalty is no model for a plain step"
    assert counts(moving) == (24 - 6 - 1, 6 + 1), moving.session.stats().reason


def test_penalties_that_begin_and_end_are_followed(make_pair: MakePair) -> None:
    pair = make_pair(device="emulated", device_memory=ROOM)
    pair.train_same(2)
    pair.train_same(4, first=2, by=penalised_step)
    pair.train_same(3, first=6)
    pair.train_same(3, first=9, by=penalised_step)
    planned, reactive = counts(pair)
    assert (planned, reactive) == (11, 1), pair.session.stats().reason


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "recomputed, re-entrant": lambda: recomputed(reentrant=True),
    "recomputed": lambda: recomputed(reentrant=False),
    "plain": mlp,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_backward_that_recomputes_or_keeps_its_graph_differentiates_none(make_pair: MakePair, name: str) -> None:
    def act(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        loss = model(batch(number).requires_grad_()).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    pair = make_pair(seeded(MODELS[name]))
    pair.train_same(3, by=act)
    (known,) = pair.session._parts.stretches.known.kinds.values()
    assert known.twice is None
    assert counts(pair) == (3, 0), pair.session.stats().reason


def test_an_input_that_wants_a_gradient_changes_no_plan(moving: Pair) -> None:
    """Its first step is measured, in case a gradient is differentiated, and follows its plan all the same."""
    moving.train_same(3, by=sloped_step)
    assert counts(moving) == (3, 0), moving.session.stats().reason
    (known,) = moving.session._parts.stretches.known.kinds.values()
    assert known.measured is not None
    assert known.trace is known.offline


class DifferentiatesItself(torch.autograd.Function):
    """Its backward runs the forward again on detached tensors, and asks torch for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            return torch.autograd.grad(x @ weight.t(), (x, weight), gradient)


def by_hand() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
    return Composed(lambda model, x: DifferentiatesItself.apply(x, model.weight), weight=weight)


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
def test_a_backward_that_differentiates_what_it_has_saved(make_pair: MakePair, step: str) -> None:
    build = seeded(lambda: nn.Sequential(*(by_hand() for _ in range(6))))
    make_pair(build, step=step, precision="fp32", device="emulated", device_memory=TIGHT).train_same()
