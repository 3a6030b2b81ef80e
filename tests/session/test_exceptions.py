"""A forward, backward or step that raises: the session stays usable, or says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import StateError
from patrickstar.core.machine import Tier
from patrickstar.plan import planner
from patrickstar.plan.actions import Wait
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan
from patrickstar.plan.update_choice import UpdateChoice
from tests.composed import Composed
from tests.forked import in_forked_child
from tests.manual_lane import ManualLane
from tests.session.builders import (
    MACHINES,
    SLOT,
    WIDTH,
    Layers,
    MakePair,
    Pair,
    adamw,
    assert_same,
    backward,
    batch,
    everything,
    expect_bits,
    loss_of,
    machine_with,
    managed,
    mlp,
    options,
    store_of,
    train,
    train_step,
)


def test_a_wrong_plan_is_an_error_where_plans_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours, put in here: it is found before anything of the plan is done."""

    def without_waits(*args: Any, **keywords: Any) -> Plan:
        plan = make_plan(*args, **keywords)
        actions = (tuple(one for one in moment if not isinstance(one, Wait)) for moment in plan.moments)
        return replace(plan, moments=tuple(actions))

    monkeypatch.setattr(planner, "make_plan", without_waits)
    model = mlp()
    with managed(model) as session:
        before = session.stats().moved
        with pytest.raises(AssertionError, match=r"plan of the training step is wrong.*\(1\)"):
            model(batch())
        assert session.stats().moved == before


class Trips(torch.autograd.Function):
    """Raises in backward when it is told to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Trips.armed:
            raise ZeroDivisionError("in backward")
        return gradient


class Fragile(Layers):
    """Raises in the middle of its forward, or of its backward, when it is told to."""

    trips_in_forward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:6](x)
        if self.trips_in_forward:
            raise ZeroDivisionError("in forward")
        x = Trips.apply(x)
        return self.layers[6:](x)


def breaks() -> nn.Module:
    """Two parameters in one chunk, with something between their gradients that can raise."""
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)
    run = lambda model, x: model.rest(model.second(Trips.apply(model.first(x))))
    return Composed(run, first=first, second=second, rest=mlp(2, layers=3))


pytestmark = pytest.mark.usefixtures("disarmed")


def trip_in_forward(model: nn.Module, _: Any, number: int = 9) -> None:
    model.trips_in_forward = True
    try:
        with pytest.raises(ZeroDivisionError):
            backward(model, number=number)
    finally:
        model.trips_in_forward = False


def trip_in_backward(model: nn.Module, _: Any, number: int = 9) -> None:
    loss = loss_of(model, number)
    Trips.armed = True
    try:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    finally:
        Trips.armed = False


def trip_in_the_loss(model: nn.Module, _: Any, number: int = 9) -> None:
    with pytest.raises(RuntimeError):
        (model(batch(number)) @ torch.ones(7, 7)).sum().backward()


def trip_at_the_input(model: nn.Module, _: Any) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(2, 7))


def trip_in_a_hook(model: nn.Module, _: Any) -> None:
    handle = model.layers[4].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()


TRIPS = [trip_in_forward, trip_in_backward, trip_in_the_loss, trip_at_the_input, trip_in_a_hook]


@pytest.mark.parametrize("trip", TRIPS, ids=lambda trip: trip.__name__)
@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("first", [0, 2])
def test_the_session_stays_usable(
    make_pair: MakePair, trip: Callable[..., None], tier: str, first: int, on_disk: dict[str, Any]
) -> None:
    keywords = on_disk if tier == "disk" else {"device": "emulated", "device_memory": 8 * SLOT}
    pair = make_pair(Fragile, **keywords)
    if first:
        pair.train(first)
    pair.each(trip)
    pair.each(lambda model, optimizer: optimizer.zero_grad())
    pair.train_same(3, first=first)
    stats = pair.session.stats()
    assert stats.planned_steps >= first + 2, stats.reason


@pytest.mark.parametrize("trip", [trip_in_forward, trip_in_the_loss], ids=lambda t: t.__name__)
def test_the_session_stays_usable_with_in_backward_as_long_as_no_backward_has_begun(
    make_pair: MakePair, trip: Callable[..., None]
) -> None:
    pair = make_pair(Fragile, step="in_backward", device="emulated", device_memory=8 * SLOT)
    pair.train(1)
    pair.each(trip)
    pair.train_same(2, first=1)


def test_gradients_that_came_before_the_exception_are_there_as_in_pytorch(
    make_pair: MakePair, on_disk: dict[str, Any]
) -> None:
    pair = make_pair(Fragile, **on_disk)
    pair.train(1)
    pair.each(trip_in_backward)
    pair.expect_same_gradients()
    assert len(dict(pair.session.gradients())) == 6
    pair.step()
    pair.train_same(1, first=2)


@pytest.mark.parametrize("build", [Fragile, breaks])
def test_a_session_that_asks_for_a_checkpoint_can_still_be_closed(make_pair: MakePair, build: type[nn.Module]) -> None:
    pair = make_pair(build, step="in_backward", device="emulated", device_memory=8 * SLOT)
    pair.train(1)
    trip_in_backward(pair.model, None)
    pair.session.close()
    assert all(type(p) is nn.Parameter and not p.isnan().any() for p in pair.model.parameters())


def test_a_backward_that_raises_before_the_first_gradient_in_backward_mode_has_updated_nothing(
    make_pair: MakePair,
) -> None:
    class First(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Trips.apply(self.layers(x))

    pair = make_pair(First, step="in_backward", device="emulated", device_memory=8 * SLOT)
    pair.train(1)
    held = everything(pair.session)
    pair.each(trip_in_backward)
    expect_bits(held, everything(pair.session))
    pair.train_same(2, first=1)


def test_a_closure_that_raises_has_updated_nothing(trained: Pair) -> None:
    def refuse() -> float:
        raise ZeroDivisionError

    trained.each(backward, 1)
    with pytest.raises(ZeroDivisionError):
        trained.optimizer.step(refuse)
    trained.step()
    trained.expect_same()


def test_an_exception_in_the_middle_of_a_step_is_not_passed_over(
    pair: Pair, failing_update: Callable[..., Any], tmp_path: Any
) -> None:
    pair.train(2)
    pair.session.save_checkpoint(tmp_path)
    train_step(pair.model, pair.optimizer)
    with failing_update(pair, 3), pytest.raises(MemoryError):
        pair.model(batch())
    for call in (
        lambda: pair.model(batch()),
        lambda: pair.optimizer.step(),
        lambda: pair.session.save_checkpoint(tmp_path / "no"),
    ):
        with pytest.raises(StateError, match="load_checkpoint"):
            call()
    pair.session.load_checkpoint(tmp_path)
    pair.train_same(2, first=2)


class Twice(tuple[Any, ...]):
    """Cannot be made of one iterable, as a tuple can."""

    def __new__(cls, first: Any, second: Any) -> Twice:
        return super().__new__(cls, (first, second))


def test_inputs_that_cannot_be_cast_leave_the_session_usable(disk_pair: Pair) -> None:
    """They are cast when the forward has begun."""
    disk_pair.train(1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        disk_pair.model(Twice(torch.ones(2, 7, dtype=torch.float64), None))
    assert disk_pair.session._parts.executor.pilot.stretch.is_over
    disk_pair.train_same(2, first=1)


def test_an_error_inside_of_manage_keeps_the_optimizers_hooks(tmp_path: Any) -> None:
    model = mlp()
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(patrickstar.BudgetError):
        patrickstar.manage(model, optimizer, options=options(), device="emulated", device_memory=SLOT)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


# updates that are certainly under way when a backward stops half way, also where the host computes

WHERE = {"on the device": UpdateChoice(tier=lambda chunk: Tier.DEVICE), "as planned": None}


@pytest.fixture(params=["cpu", *MACHINES])
def roomier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    nbytes = 8 * SLOT + SLOT * (request.param == "cpu+disk")
    return {"device": "cpu"} if request.param == "cpu" else machine_with(request.param, nbytes, tmp_path / "disk")


@pytest.fixture(params=WHERE)
def stopped(request: pytest.FixtureRequest, roomier: dict[str, Any], make_pair: MakePair, tmp_path: Path) -> Pair:
    """A pair whose backward was stopped by the user's code. Updates that it has begun and not waited for have not been done.

    There is a checkpoint of the step before. Plain PyTorch has updated what had a gradient by then.
    """
    pair = make_pair(
        Fragile, step="in_backward", make_lane=lambda src, dst: ManualLane(), choice=WHERE[request.param], **roomier
    )
    pair.train(2)
    pair.session.save_checkpoint(tmp_path / "saved")
    pair.each(trip_in_backward)
    assert store_of(pair.session).state.updates
    pair.plain_optimizer.step()
    return pair


def test_whoever_reads_finds_the_updates_of_what_has_come(stopped: Pair) -> None:
    expect_bits(dict(stopped.plain.state_dict()), dict(stopped.session.state_dict()))
    assert not store_of(stopped.session).state.updates


def test_close_gives_back_weights_that_are_wholly_updated(stopped: Pair) -> None:
    stopped.session.close()
    for want, got in zip(stopped.plain.parameters(), stopped.model.parameters(), strict=True):
        assert want.equal(got)


def test_training_goes_on_from_a_checkpoint(stopped: Pair, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="load_checkpoint"):
        stopped.model(batch())
    stopped.session.load_checkpoint(tmp_path / "saved")
    assert not store_of(stopped.session).state.updates
    stopped.plain = Fragile()
    stopped.plain_optimizer = adamw(stopped.plain)
    train(stopped.plain, stopped.plain_optimizer, 2)
    stopped.train(2, first=2)
    assert_same(stopped.plain, stopped.plain_optimizer, stopped.session)


def test_a_forked_child_neither_waits_for_its_parents_updates_nor_does_them(stopped: Pair) -> None:
    def use() -> str:
        try:
            dict(stopped.session.state_dict())
        except StateError as error:
            return str(error)
        return "it was used"

    assert f"belongs to process {os.getpid()}" in in_forked_child(use)
    assert store_of(stopped.session).state.updates
    expect_bits(dict(stopped.plain.state_dict()), dict(stopped.session.state_dict()))
