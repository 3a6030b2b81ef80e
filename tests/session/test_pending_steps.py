"""An optimizer step that was called and is not over: done between the moments of the next forward, once, whole, with the numbers of its call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import BudgetError
from patrickstar.core.machine import Tier
from patrickstar.core.trace import Phase
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.manage import assemble
from tests.lanes import LANES
from tests.manual_lane import ManualLane
from tests.session.builders import (
    EMULATED,
    LAYERS,
    TIGHT,
    Layers,
    MakePair,
    Pair,
    adamw,
    backward,
    batch,
    finish,
    mlp,
    options,
    train_step,
    update_moments,
    values,
)
from tests.session.masters import managed_step


def pending_of(pair: Pair) -> Any:
    return pair.session._parts.executor.pending


def woven_updates(pair: Pair) -> list[int | None]:
    """Of the last training step's trace: the chunk of each update, and None for each moment of the forward."""
    return [moment.updates for moment in pair.session.trace.moments if moment.phase in (Phase.STEP, Phase.FORWARD)]


@pytest.fixture
def pending(make_pair: MakePair, machine: dict[str, Any]) -> Pair:
    """A pair that has trained three steps, of which the last is pending."""
    pair = make_pair(**machine)
    pair.train(3)
    assert len(pending_of(pair).waiting) == LAYERS
    return pair


def test_updates_are_part_of_the_next_forward_in_the_order_in_which_it_needs_them(
    machine: dict[str, Any], make_pair: MakePair
) -> None:
    pair = make_pair(choice=UpdateChoice(tier=lambda chunk: Tier.DEVICE), **machine)
    pair.train(4)
    # Weight and bias of a layer are one chunk, and used in one moment.
    assert woven_updates(pair) == [entry for chunk in range(LAYERS) for entry in (chunk, None)]
    assert (pair.session.stats().planned_steps, pair.session.stats().steps) == (4, 4)
    pair.expect_same()


@pytest.mark.parametrize("zero", ["optimizer", "model", "by hand", "before backward", "never"])
def test_gradients_that_are_let_go_of_are_not_written_back_and_others_stay(zero: str, moving: Pair) -> None:

    def step(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
        loss = model(batch(number)).square().mean()
        if zero == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero == "optimizer":
            optimizer.zero_grad()
        elif zero == "model":
            model.zero_grad()
        elif zero == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        return loss.detach().clone()

    for number in range(5):
        moving.same(step, number)
        assert len(pending_of(moving).waiting) == LAYERS, "nothing has looked at the model"
        assert len(pending_of(moving).frees) == (0 if zero in ("before backward", "never") else LAYERS)
    assert len([entry for entry in woven_updates(moving) if entry is not None]) == LAYERS
    # That gradients go in the middle of a step has to be seen once.
    assert moving.session.stats().planned_steps == (4 if zero == "before backward" else 5), (
        moving.session.stats().reason
    )
    moving.expect_same()


LOOKS: dict[str, Callable[[Pair, Path], Any]] = {
    "a weight": lambda pair, _: pair.session.state_dict()["4.weight"],
    "an evaluation": lambda pair, _: _evaluate(pair),
    "a checkpoint": lambda pair, path: pair.session.save_checkpoint(path / "saved"),
    "a parameter": lambda pair, _: pair.model[2].weight.sum(),
    "a moment": lambda pair, _: pair.optimizer.state[pair.model[2].weight]["exp_avg"].sum(),
    "a part": lambda pair, _: pair.model[2](batch()),
    "its state": lambda pair, _: pair.session.load_state_dict(dict(pair.session.state_dict())),
    "a write": lambda pair, _: pair.session.write("0.bias", pair.session.state_dict()["0.bias"]),
    "no more room": lambda pair, _: _refused(pair),
    "another batch": lambda pair, _: pair.model(batch(3, rows=2)),
}


def _evaluate(pair: Pair) -> None:
    with torch.no_grad():
        assert torch.equal(pair.model(batch(9)), pair.plain(batch(9)))


def _refused(pair: Pair) -> None:
    with pytest.raises(BudgetError):
        pair.model(batch(rows=2000))


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_the_model_updated(look: str, pending: Pair, tmp_path: Path) -> None:
    LOOKS[look](pending, tmp_path)
    pending.expect_same()
    assert pending_of(pending) is None
    pending.train_same(3, first=3)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("lanes", LANES)
def test_an_evaluation_in_inference_mode_finds_the_model_updated(
    lanes: str, kind: str, on_disk: dict[str, Any]
) -> None:
    found = []
    for looks in (False, True):
        model = mlp()
        given = {"compute": kind, "accumulate": 1, "loss_scale": patrickstar.LossScale(initial=2.0, dynamic=False)}
        with assemble(
            model, adamw(model), make_lane=LANES[lanes](1), precision=kind, options=options(**given), **on_disk
        ) as session:
            for number in range(4):
                managed_step(session, model, first=number)
                if looks:
                    with torch.inference_mode():
                        model(batch())
            found.append(values(session))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_error_of_the_user_in_the_middle_of_a_forward_loses_no_update(pending: Pair) -> None:
    def stop(*_: object) -> None:
        raise RuntimeError("the user's")

    for model in (pending.plain, pending.model):
        handle = model[4].register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="the user's"):
            model(batch(3))
        handle.remove()
    assert 0 < len(pending_of(pending).waiting) < LAYERS
    pending.train_same(3, first=3)


@pytest.mark.parametrize("zero", [False, True])
def test_a_forward_that_is_left_half_way_and_a_step_after_it(zero: bool, moving: Pair) -> None:
    moving.train(2)
    for model, optimizer in ((moving.plain, moving.plain_optimizer), (moving.model, moving.optimizer)):
        backward(model, number=2)
        optimizer.step()
        hidden = model[0](batch(3))  # a module alone: a forward that nobody knows
        for layer in model[1:6]:
            hidden = layer(hidden)
        if zero:
            optimizer.zero_grad()
        finish(hidden.square().mean(), optimizer)
    moving.train_same(2, first=4)


@pytest.mark.parametrize("where", ["forward", "state"])
def test_an_update_that_is_under_way_ends_whole_when_the_user_interrupts(
    where: str, pending: Pair, interrupt: Callable[[Pair], Any]
) -> None:
    with interrupt(pending), pytest.raises(KeyboardInterrupt):
        backward(pending.model, number=3) if where == "forward" else pending.session.state_dict()["0.weight"]
    assert not pending.session._parts.executor.store.state.updates
    pending.optimizer.zero_grad()
    pending.train_same(2, first=3)


def test_an_interruption_before_the_lane_knows_of_an_update_leaves_it_pending(
    pending: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = pending.session._parts.executor.store.works
    lane = type(works).lane

    def interrupted(self: Any, src: Any, dst: Any) -> Any:
        if dst is None:
            raise KeyboardInterrupt
        return lane(self, src, dst)

    with monkeypatch.context() as patched:
        patched.setattr(type(works), "lane", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backward(pending.model, number=3)
    assert len(pending_of(pending).waiting) == LAYERS
    pending.train_same(2, first=3)


class Skips(Layers):
    """Layers, of which the user may have one left out."""

    skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = layer(x)
        return x


def test_a_forward_that_goes_another_way_has_what_it_needs_updated(
    machine: dict[str, Any], make_pair: MakePair
) -> None:
    pair = make_pair(Skips, **machine)
    for number in range(8):
        pair.plain.skipped = pair.model.skipped = 4 if number in (3, 6) else None
        pair.same(train_step, number)
    assert pair.session.stats().planned_steps >= 5, pair.session.stats().reason
    pair.expect_same()


def test_an_update_is_waited_for_when_something_needs_it_and_not_before(make_pair: MakePair) -> None:
    where_it_computes = UpdateChoice(tier=lambda chunk: Tier.DEVICE)
    pair = make_pair(make_lane=lambda src, dst: ManualLane(), choice=where_it_computes, **EMULATED)
    pair.train(4)
    begins, ends = update_moments(pair.session.plan)
    assert begins.keys() == ends.keys() == set(range(LAYERS))
    assert all(ends[chunk] == begins[chunk] + 1 for chunk in begins), "the moment after it uses the weight"
    pair.expect_same()


def test_where_an_update_fits_before_the_forward_alone_it_comes_there(make_pair: MakePair) -> None:
    """Activations of many rows leave room for a weight and a gradient, not for the four units of an update."""
    rows = 100
    with pytest.raises(BudgetError) as refusal:
        make_pair(device="emulated", device_memory=TIGHT).model(batch(rows=rows))
    where_it_computes = UpdateChoice(tier=lambda chunk: Tier.DEVICE)
    pair = make_pair(device="emulated", device_memory=refusal.value.smallest_bytes, choice=where_it_computes)
    for number in range(3):
        pair.each(train_step, number, rows=rows)
    assert woven_updates(pair)[:LAYERS] == list(range(LAYERS))
    assert pair.session.stats().planned_steps == 3, pair.session.stats().reason
    pair.expect_same()
