"""Transfers that are under way across moments: they end well or badly, are interrupted by what users do, and no bit depends on them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import BudgetError, DeviceError, StateError
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, PlaneRef
from patrickstar.memory.lanes import Lane, Task, ThreadLane, Ticket
from patrickstar.plan.actions import Issue, Wait, is_copy
from patrickstar.plan.plan import Plan
from tests.faults import FaultyIO
from tests.forked import in_forked_child
from tests.manual_lane import ManualLane
from tests.session.builders import (
    LAYERS,
    MACHINES,
    ROOMY,
    WIDTH,
    Layers,
    MakePair,
    Pair,
    backward,
    batch,
    store_of,
    values,
)
from tests.session.test_disk_tier import FAULTS, arm


def distances(plan: Plan) -> list[int]:
    """Moments between the issue of each transfer and its wait, or the beginning of the update that comes after it, or the end."""
    issued: dict[Any, int] = {}
    found = []
    for index, actions in enumerate(plan.moments):
        for action in actions:
            if is_copy(action):
                issued[action.of, action.work.tier] = index
            elif isinstance(action, Wait) and (action.of, action.work.tier) in issued:
                found.append(index - issued.pop((action.of, action.work.tier)))
            elif (
                isinstance(action, Issue)
                and (arriving := (PlaneRef(action.of.chunk, GRAD), action.work.tier)) in issued
            ):
                found.append(index - issued.pop(arriving))
    return found + [len(plan.moments) - index for index in issued.values()]


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("prefetch", [0, 1, 4, None])
def test_transfers_begin_as_early_as_they_may_and_change_no_bit(
    prefetch: int | None, step: str, machine: dict[str, Any], make_pair: MakePair
) -> None:
    pair = make_pair(with_options={"prefetch": prefetch}, step=step, **machine)
    pair.train(4)
    early = max(distances(pair.session.plan))
    assert early == 0 if prefetch == 0 else 0 < early <= (prefetch or 99)
    assert pair.session.stats().planned_steps == 4, pair.session.stats().reason
    pair.expect_same()


# Where the host computes, an update is over with the moment that needs it.
UNDER_WAY = [*((machine, "transfers") for machine in MACHINES), ("emulated", "updates")]


@pytest.fixture
def under_way(make_pair: MakePair, tmp_path: Path) -> Callable[[str, str], Pair]:
    """A pair that has trained, and whose next forward has stopped half way: nobody has waited for transfers, or updates, that it has issued."""

    def halted(machine: str, at: int) -> Pair:
        pair = make_pair(build=Halting, make_lane=lambda src, dst: ManualLane(), **MACHINES[machine](tmp_path / "disk"))
        pair.train(2)
        for model in (pair.plain, pair.model):
            model.halts_at = at
            with pytest.raises(Halted):
                model(batch(2))
            model.halts_at = None
        return pair

    def make(machine: str, what: str) -> Pair:
        if what == "transfers":
            pair = halted(machine, 2 * LAYERS - 4)
            assert store_of(pair.session).state.in_flight
            return pair
        for at in range(1, 2 * LAYERS):
            pair = halted(machine, at)
            if store_of(pair.session).state.updates:
                return pair
            pair.session.close()
        raise AssertionError("no update outlasts a moment")

    return make


class Halted(Exception):
    """What the user's code raised."""


class Halting(Layers):
    """A model whose forward can be stopped by an exception, where several units have left and others are on their way."""

    halts_at: int | None = None

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            if number == self.halts_at:
                raise Halted
            x = layer(x)
        return x


def save_and_load(pair: Pair, directory: Path) -> None:
    pair.session.save_checkpoint(directory)
    pair.expect_same()
    pair.session.load_checkpoint(directory)


def be_refused(pair: Pair, _: Path) -> None:
    with pytest.raises(BudgetError):
        pair.model(batch(0, rows=4096))


@pytest.mark.parametrize(
    "act", [lambda pair, _: None, save_and_load, be_refused], ids=["nothing", "saved and loaded", "refused"]
)
@pytest.mark.parametrize(("machine", "what"), UNDER_WAY)
def test_what_is_under_way_is_used_by_the_next_step_whatever_is_done_before(
    machine: str, what: str, act: Callable[[Pair, Path], None], under_way: Callable[[str, str], Pair], tmp_path: Path
) -> None:
    pair = under_way(machine, what)
    act(pair, tmp_path / "saved")
    pair.train_same(2, first=2)


@pytest.mark.parametrize(("machine", "what"), UNDER_WAY)
def test_close_waits_for_what_is_under_way_and_gives_everything_back(
    machine: str, what: str, under_way: Callable[[str, str], Pair]
) -> None:
    pair = under_way(machine, what)
    want = values(pair.plain)
    pair.session.close()
    for name, value in pair.model.state_dict().items():
        assert value.is_meta or value.equal(want[name])


@pytest.mark.parametrize(("machine", "what"), UNDER_WAY)
def test_a_forked_child_does_not_wait_for_its_parents_transfers(
    machine: str, what: str, under_way: Callable[[str, str], Pair]
) -> None:
    pair = under_way(machine, what)

    def use() -> str:
        try:
            pair.model(batch())
        except StateError as error:
            return str(error)
        return "it was used"

    assert f"belongs to process {os.getpid()}" in in_forked_child(use)
    pair.train_same(1, first=2)


def test_a_change_by_hand_of_what_is_being_written_back_is_not_lost(
    make_pair: MakePair, on_disk: dict[str, Any]
) -> None:
    pair = make_pair(make_lane=lambda src, dst: ManualLane(), **on_disk)
    pair.train(2)
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        backward(model, number=2)
        optimizer.step()
        for layer in model[::2]:
            layer.weight.data.mul_(0.5)
        optimizer.zero_grad()
    pair.train_same(2, first=3)


@pytest.mark.parametrize(("call", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value) or "short")
def test_a_transfer_that_fails_moments_later_names_what_issued_it_and_can_be_done_again(
    call: str, number: int | None, make_pair: MakePair, faulty: FaultyIO, on_disk: dict[str, Any]
) -> None:
    failed = early = 0
    for after in range(0, 12, 2):
        pair = make_pair(**on_disk)
        pair.train(2)
        arm(faulty, call, number, after=after)
        try:
            backward(pair.model, number=2)
        except DeviceError as failure:
            message = str(failure)
            found = re.search(
                r"this was c\d+\.\w+ on its way from the (host|disk) to the (host|disk), issued at (.+)", message
            )
            assert found, message
            assert re.match(r"(forward|backward|step) \d\.weight|the start of the training step", found[3]), message
            assert number is None or os.strerror(number) in message
            failed += 1
            assert isinstance(failure.__cause__, DeviceError)
            noticed = re.search(r"a transfer at (.+) was not done", pair.session._parts.executor.pilot.stretch.reason)
            assert noticed
            early += noticed[1] != found[3]
            assert not store_of(pair.session).state.in_flight
        assert faulty.hit
        faulty.faults.clear()
        pair.optimizer.zero_grad()
        pair.train_same(2, first=2)
        pair.session.close()
    assert failed, "no transfer has failed"
    assert early or call == "preadv", "no write-back was early"


class EndsThread(ThreadLane):
    """A lane of which one work ends its thread, or raises what nobody expects."""

    error: type[BaseException] | None = None

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        error, EndsThread.error = EndsThread.error, None

        def end() -> None:
            assert error is not None
            raise error

        return super().issue(work if error is None else end, after, nbytes=nbytes)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError, OSError])
@pytest.mark.parametrize("machine", ["cpu+disk", "emulated"])
def test_a_thread_that_ends_or_fails_in_any_way_is_a_failed_transfer(
    machine: str, error: type[BaseException], make_pair: MakePair, tmp_path: Path
) -> None:
    failed = 0
    pair = make_pair(make_lane=lambda src, dst: EndsThread(f"{src} to {dst}"), **MACHINES[machine](tmp_path / "disk"))
    pair.train(2)
    for number in range(2, 5):
        EndsThread.error = error
        try:
            backward(pair.model, number=number)
        except DeviceError as failure:
            assert re.search(r"this was c\d+\.\w+ on its way from the \w+ to the \w+, issued at .", str(failure))
            failed += 1
        EndsThread.error = None
        pair.optimizer.zero_grad()
        pair.train_same(1, first=number)
    assert failed, "no transfer has failed"
    pair.session.close()


def test_slots_whose_pages_come_with_a_transfer_count_until_it_has_ended(
    make_pair: MakePair, on_disk: dict[str, Any]
) -> None:
    lanes: list[ManualLane] = []

    def make(src: Tier, dst: Tier) -> Lane:
        lanes.append(ManualLane())
        return lanes[-1]

    pair = make_pair(make_lane=make, **on_disk)
    pair.train(1)
    store = store_of(pair.session)
    store.units.limit_slots = 0
    state = store.state
    ref = next(ref for ref in sorted(state.home) if ref not in state.taken[Tier.HOST] and not state.is_free(ref))
    store.units.arenas[Tier.HOST].trim(0)
    store.units.committed_slots = store.units.arenas[Tier.HOST].committed_slots
    store.units.limit_slots = 99
    store.carry_out([Issue.copy(ref, Tier.DISK, Tier.HOST, 1)])
    slot_bytes = state.slot_bytes
    assert store.works.arriving_slots == 1
    assert store.works.arriving_bytes() == slot_bytes
    store.units.arenas[Tier.HOST].buffer(store.units._at[Tier.HOST][ref])[: slot_bytes // 2] = bytes(slot_bytes // 2)
    assert store.works.arriving_slots == 1
    assert store.works.arriving_bytes() == slot_bytes // 2  # half of it has come, and is resident
    for lane in lanes:
        lane.drain()
    assert store.works.arriving_slots == 0
    assert store.works.arriving_bytes() == 0
    store.carry_out([Wait.copy(ref, Tier.HOST)])
    assert store.works.arriving_slots == 0


class Skipping(nn.Module):
    """A model of layers of one moment each, whose forward goes on without a layer that fails: the next moment is the one that comes next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(44, 44, bias=False) for _ in range(LAYERS))
        self.skipped = 0

    def forward(self, x: Any) -> Any:
        x = nn.functional.pad(x, (0, 12))
        for layer in self.layers:
            try:
                x = layer(x)
            except DeviceError:
                self.skipped += 1
        return x


def test_a_forward_goes_on_where_one_of_its_transfers_has_failed(
    make_pair: MakePair, faulty: FaultyIO, on_disk: dict[str, Any]
) -> None:
    skipped = 0
    for after in range(10):
        pair = make_pair(build=Skipping, **on_disk)
        pair.train(2)
        arm(faulty, "preadv", 5, after=after)
        with suppress(DeviceError):  # as the forward begins
            pair.model(batch(2))
        faulty.faults.clear()
        skipped += pair.model.skipped
        pair.train_same(1, first=2)
        pair.session.close()
    assert skipped, "no layer has failed"


@pytest.mark.parametrize("is_updated", [False, True], ids=["before its update", "after its update"])
def test_a_forked_child_is_given_no_slot(is_updated: bool, make_pair: MakePair) -> None:
    """Its parent goes on moving and writing them."""
    pair = make_pair(**ROOMY)
    pair.train(2)  # so that slots have been wrapped before
    if is_updated:
        with torch.no_grad():
            pair.model(batch())

    def use() -> str:
        with pytest.raises(patrickstar.StateError) as refusal:
            pair.model(torch.ones(1, WIDTH))
        return str(refusal.value)

    assert f"belongs to process {os.getpid()}" in in_forked_child(use)
    pair.train(1, first=2)
