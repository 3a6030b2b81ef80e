"""Updates on the host, below a device: the gradient goes down and the weight comes up, and nothing else; no bit depends on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, GRAD, STEP, WEIGHT, PlaneRef
from patrickstar.plan.actions import Issue, is_copy
from patrickstar.plan.plan import Snapshot
from patrickstar.plan.residency import Residency
from patrickstar.plan.update_choice import UpdateChoice, choose_tiers
from patrickstar.session.manage import assemble
from tests.lanes import LANES
from tests.parity.oracle import global_norm
from tests.plan.builders import layout_of
from tests.plan.test_weave import updates_of
from tests.session.builders import (
    CHUNK,
    LAYERS,
    MACHINES,
    SLOT,
    TIGHT,
    MakePair,
    Pair,
    adamw,
    backward,
    loss_of,
    mlp,
    options,
    store_of,
    train,
    train_step,
)
from tests.session.masters import managed_step

ON_HOST = UpdateChoice(tier=lambda chunk: Tier.HOST)
ON_DEVICE = UpdateChoice(tier=lambda chunk: Tier.DEVICE)
IN_TURN = UpdateChoice(tier=lambda chunk: (Tier.HOST, Tier.DEVICE)[chunk % 2])


def tiers_of(session: patrickstar.Session) -> Counter[Tier]:
    """Updates of the last training step by tier."""
    return Counter(
        action.work.tier for action in session.plan.actions() if isinstance(action, Issue) and action.of.plane == STEP
    )


@pytest.mark.parametrize("machine", ["emulated", "emulated+disk"])
@pytest.mark.parametrize("choice", [ON_HOST, ON_DEVICE, IN_TURN], ids=["host", "device", "in turn"])
@pytest.mark.parametrize("prefetch", [0, 2, None])
def test_no_bit_depends_on_where_a_chunk_is_updated(
    prefetch: int | None, choice: UpdateChoice, machine: str, make_pair: MakePair, tmp_path: Path
) -> None:
    memory = MACHINES[machine](tmp_path / "disk") | ({"host_memory": 20 * SLOT} if "disk" in machine else {})
    pair = make_pair(choice=choice, with_options={"prefetch": prefetch}, **memory)
    pair.train(5)
    assert tiers_of(pair.session)[Tier.HOST] == {ON_HOST: LAYERS, ON_DEVICE: 0, IN_TURN: LAYERS // 2}[choice]
    assert pair.session.stats().planned_steps == 5, pair.session.stats().reason
    pair.expect_same()


@pytest.mark.parametrize("choice", [ON_HOST, ON_DEVICE, IN_TURN], ids=["host", "device", "in turn"])
@pytest.mark.parametrize("prefetch", [0, 2, None])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("slots", [9, 12, 20])
def test_no_bit_depends_on_where_a_backward_updates_a_chunk(
    slots: int, lanes: str, prefetch: int | None, choice: UpdateChoice, make_pair: MakePair
) -> None:
    pair = make_pair(
        step="in_backward",
        precision="fp32",
        choice=choice,
        make_lane=LANES[lanes](1),
        with_options={"prefetch": prefetch},
        device="emulated",
        device_memory=slots * SLOT,
    )
    pair.train(5)
    on_host = tiers_of(pair.session)[Tier.HOST]
    assert on_host == {ON_HOST: LAYERS, ON_DEVICE: 0, IN_TURN: LAYERS // 2}[choice]
    assert pair.session.stats().planned_steps == 5, pair.session.stats().reason
    pair.expect_same()
    assert not [ref for ref in store_of(pair.session).state.home if ref.plane == GRAD], "no gradient has a home"


@pytest.mark.parametrize("room", [0, 2, LAYERS])
def test_a_backward_updates_as_many_chunks_on_the_host_as_that_has_room_for_gradients(
    room: int, make_pair: MakePair
) -> None:
    """Twelve bytes a parameter are enough, and more of the host is used where it is."""
    whole = 3 * LAYERS * SLOT
    pair = make_pair(
        step="in_backward", precision="fp32", device="emulated", device_memory=9 * SLOT, host_memory=whole + room * SLOT
    )
    pair.train(4)
    assert tiers_of(pair.session)[Tier.HOST] == room
    assert pair.session.stats().peak["host"] == whole + room * SLOT
    pair.expect_same()


@pytest.mark.parametrize(
    ("kind", "step"),
    [*((kind, "deferred") for kind in ("bf16", "fp16", "fp32")), ("bf16", "in_backward"), ("fp32", "in_backward")],
)
@pytest.mark.parametrize("tight", [True, False])
def test_the_gradient_goes_down_and_the_weight_comes_up_and_nothing_else_does(
    tight: bool, kind: str, step: str
) -> None:
    """Per element and step 2 bytes down and 2 up where an element has two, and the weight again where backward needs it and it has gone."""
    model, itemsize = mlp(layers=10), 4 if kind == "fp32" else 2
    # A backward leaves room for an update of its own beside gradients that wait.
    slots = (8 if step == "deferred" else 10) if tight else 40
    session = assemble(
        model,
        adamw(model),
        choice=ON_HOST,
        precision=kind,
        step=step,
        device="emulated",
        device_memory=slots * CHUNK * itemsize + 4096,
        options=options(compute=kind, accumulate=1, loss_scale=patrickstar.LossScale(initial=2.0, dynamic=False)),
    )
    with session:
        for number in range(4):
            managed_step(session, model, first=number)
        before = session.stats().moved
        managed_step(session, model, first=4)
        moved = {link: nbytes - before[link] for link, nbytes in session.stats().moved.items()}
        plan, chunks = session.plan, session.layout.n_chunks
    copies = [action for action in plan.actions() if is_copy(action)]
    up = Counter(action.of for action in copies if action.work.tier is Tier.DEVICE)
    assert up.keys() == {PlaneRef(chunk, WEIGHT) for chunk in range(chunks)}
    assert [action.of.plane for action in copies if action.work.tier is Tier.HOST] == [GRAD] * chunks
    again = sum(up.values()) - chunks
    assert (again > 0) is tight
    assert moved["D>H"] == itemsize * chunks * CHUNK
    assert moved["H>D"] == itemsize * (chunks + again) * CHUNK
    assert moved["H>K"] == moved["K>H"] == 0


def test_the_norm_is_read_where_gradients_are_and_fetches_none(make_pair: MakePair) -> None:
    memory = {"device": "emulated", "device_memory": 8 * SLOT + 4096}

    def bytes_up(max_norm: float | None) -> int:
        pair = make_pair(choice=ON_HOST, max_grad_norm=max_norm, with_options={"accumulate": 1}, **memory)
        train(pair.model, pair.optimizer, 3)
        before = pair.session.stats().moved["H>D"]
        train_step(pair.model, pair.optimizer, 3)
        return pair.session.stats().moved["H>D"] - before

    assert bytes_up(1e-3) == bytes_up(None)
    pair = make_pair(choice=ON_HOST, **memory)
    pair.train(3)
    pair.each(backward, 3)
    norm = global_norm({name: p.grad for name, p in pair.plain.named_parameters() if p.grad is not None})
    assert pair.session.clip_grad_norm_(math.inf).equal(norm)


def test_a_weight_that_somebody_holds_is_updated_where_it_is_held(make_pair: MakePair) -> None:
    pair = make_pair(choice=ON_HOST, device="emulated", device_memory=TIGHT + SLOT)
    pair.train(2)
    views = [model[4].weight.data.view(-1) for model in (pair.plain, pair.model)]
    pair.train(3, first=2)
    assert views[0].equal(views[1].clone())
    pair.expect_same()


def test_what_the_device_alone_has_comes_down_first(make_pair: MakePair) -> None:
    """The states were made there, and have never been anywhere else."""
    pair = make_pair(choice=ON_DEVICE, device="emulated", device_memory=26 * SLOT + 16384)
    pair.train(2)
    state = pair.session._parts.executor.store.state
    assert any(state.is_dirty(ref, Tier.DEVICE) for ref in state.home if ref.plane == EXP_AVG)
    pair.session._parts.stretches.planner.choice = ON_HOST
    pair.train(2, first=2)
    assert tiers_of(pair.session)[Tier.HOST] == LAYERS
    pair.expect_same()


def test_below_a_device_with_room_for_some_states_their_chunks_are_updated_there(make_pair: MakePair) -> None:
    """Weights and gradients take twelve slots; of states, two chunks' worth finds room beside them."""
    pair = make_pair(device="emulated", device_memory=(2 * LAYERS + 2 * 2) * SLOT + 16384)
    pair.train(4)
    assert tiers_of(pair.session) == {Tier.DEVICE: 2, Tier.HOST: LAYERS - 2}
    pair.expect_same()


def test_the_rule_gives_the_device_what_finds_room_and_the_host_what_it_can_do() -> None:
    layout = layout_of(1, 1, 1)
    refs = list(layout.units(("weight", "grad", "exp_avg", "exp_avg_sq")))
    updates = updates_of(layout)

    def tiers(
        device: int, host: int, home: Tier = Tier.HOST, peak: int = 0, choice: UpdateChoice | None = None
    ) -> dict[int, Tier]:
        homes = dict.fromkeys(refs, home)
        state = Residency.of(Snapshot(Tier.DEVICE, 64, homes, dict.fromkeys(refs, 1), newest={}, taken={}))
        machine = Machine(Tier.DEVICE, {Tier.DEVICE: device * 64, Tier.HOST: host * 64, Tier.DISK: 99 * 64})
        return dict(
            choose_tiers(updates, state, machine=machine, peak_bytes=peak * 64, choice=choice or UpdateChoice())
        )

    everywhere = dict.fromkeys(range(3), Tier.HOST)
    assert tiers(device=12, host=12) == {}
    assert tiers(device=12, host=12, peak=1) == {2: Tier.HOST}
    assert tiers(device=8, host=12) == {1: Tier.HOST, 2: Tier.HOST}
    assert tiers(device=5, host=12) == everywhere
    assert tiers(device=5, host=4, home=Tier.DISK) == everywhere
    assert tiers(device=5, host=3, home=Tier.DISK) == {}
    assert tiers(device=5, host=12, home=Tier.DEVICE) == {}
    assert tiers(device=5, host=12, choice=UpdateChoice(apart=True)) == {}
    assert tiers(device=12, host=12, choice=ON_HOST) == everywhere


# gradients that begin to go to their updates before the step is called

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


def fail(model: nn.Module, _: Any) -> None:
    with suppress(RuntimeError):
        loss_of(model, 5, rows=3).view(7)


ACTS: dict[str, Callable[[nn.Module, Any], object]] = {
    "halved by hand": lambda model, _: [parameter.grad.mul_(0.5) for parameter in model.parameters()],
    "looked at": lambda model, _: [parameter.grad.clone() for parameter in model.parameters()],
    "an evaluation": torch.no_grad()(lambda model, _: loss_of(model, 7)),
    "once more": lambda model, optimizer: backward(model, optimizer, 8),
    "forgotten": lambda model, optimizer: (optimizer.zero_grad(), backward(model, optimizer, 9)),
    "forgotten in part": lambda model, _: [setattr(parameter, "grad", None) for parameter in model[2].parameters()],
    "a failure": fail,
}


@pytest.mark.parametrize("act", ACTS)
def test_whatever_is_done_before_the_step_has_the_values_that_it_would_have(act: str, pair: Pair) -> None:
    pair.each(backward, 3)
    assert on_their_way(pair)
    pair.each(ACTS[act])
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
    pair.close()
