"""No bit depends on when transfers and fillings end, nor on the order in which they do, as far as tickets leave these open."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from patrickstar.core.machine import Tier
from patrickstar.memory import arena, store, works_under_way
from patrickstar.memory.lanes import Lane, Task, ThreadLane, Ticket
from patrickstar.plan import residency
from patrickstar.plan.actions import Issue
from patrickstar.plan.residency import Residency
from patrickstar.step import late_planes
from patrickstar.units import MIB
from tests.lanes import LANES
from tests.manual_lane import ManualLane
from tests.session.builders import EMULATED, MACHINES, MakePair, Pair, backward


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("when", LANES)
def test_no_bit_depends_on_when_works_end(when: str, machine: str, make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(make_lane=LANES[when](0), **MACHINES[machine](tmp_path / "disk"))
    pair.train_same(2)
    pair.train_same(1, first=2)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("when", ["in a random order", "late by chance"])
def test_no_bit_depends_on_any_seed(when: str, machine: str, seed: int, make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(make_lane=LANES[when](seed), **MACHINES[machine](tmp_path / "disk"))
    pair.train_same(2)


def test_an_emulated_link_takes_its_time_and_changes_no_bit(make_pair: MakePair) -> None:
    pair = make_pair(with_options={"emulated_link": "4MiB/s"}, **EMULATED)
    began = time.monotonic()
    pair.train(2)
    elapsed = time.monotonic() - began
    moved = pair.session.stats().moved
    assert elapsed >= max(moved["H>D"], moved["D>H"]) / (4 * MIB)
    pair.expect_same()


def test_late_transfers_change_no_bit(machine: dict[str, Any], make_pair: MakePair) -> None:
    pair = make_pair(with_options={"stress_seed": 3}, **machine)
    pair.train_same(2)


def test_close_ends_what_is_under_way(make_pair: MakePair, on_disk: dict[str, Any]) -> None:
    lanes = list[ManualLane]()

    def make(src: Tier, dst: Tier) -> Lane:
        lanes.append(ManualLane())
        return lanes[-1]

    pair = make_pair(make_lane=make, **on_disk)
    pair.train(1)
    log = list[str]()
    lanes[0].issue(lambda: log.append("done"))
    pair.session.close()
    assert log == ["done"]
    assert not any(lane.pending for lane in lanes)


class Interrupted(ThreadLane):
    """A lane of whose waits one is interrupted by the user before the work has ended."""

    waits = 0
    at: frozenset[int] = frozenset()

    def issue(self, work: Task, after: Collection[Ticket] = (), *, nbytes: int = 0) -> Ticket:
        return InterruptedTicket(super().issue(lambda: (time.sleep(1e-3), work())[0], after, nbytes=nbytes))


class InterruptedTicket:
    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.when_settled = ticket.when_settled

    @property
    def done(self) -> bool:
        return self.ticket.done

    def wait(self) -> None:
        if threading.current_thread() is threading.main_thread():
            Interrupted.waits += 1
            if Interrupted.waits in Interrupted.at:
                raise KeyboardInterrupt
        self.ticket.wait()

    wait_until_settled = wait_on_device = wait


def interruptible(src: Tier, dst: Tier) -> Lane:
    return Interrupted("test", works=2)


@pytest.fixture
def interrupted() -> Iterator[type[Interrupted]]:
    Interrupted.at = frozenset()
    yield Interrupted
    Interrupted.at = frozenset()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("at", [1, 2, 5, 9, 14, (3, 4)], ids=str)
@pytest.mark.parametrize("prefetch", [0, None])
def test_a_forward_or_backward_that_is_interrupted_while_it_waits_can_be_done_again(
    prefetch: int | None,
    at: int | tuple[int, ...],
    machine: str,
    interrupted: type[Interrupted],
    make_pair: MakePair,
    tmp_path: Path,
) -> None:
    pair = make_pair(
        make_lane=interruptible, with_options={"prefetch": prefetch}, **MACHINES[machine](tmp_path / "disk")
    )
    pair.train(2)
    interrupted.waits, interrupted.at = 0, frozenset(at if isinstance(at, tuple) else [at])
    with pytest.raises(KeyboardInterrupt):
        backward(pair.model, number=2)
    # With transfers that outlast moments, or a second interruption, what is under way ends with the next use.
    assert prefetch is None or isinstance(at, tuple) or not pair.session._parts.executor.store.state.in_flight
    pair.optimizer.zero_grad()
    pair.train_same(2, first=2)


def test_after_an_interruption_steps_are_planned_again(
    interrupted: type[Interrupted], make_pair: MakePair, on_disk: dict[str, Any]
) -> None:
    """torch calls no hook of a module when a forward is interrupted: nobody says that it has ended."""
    pair = make_pair(make_lane=interruptible, **on_disk)
    pair.train(2)
    interrupted.waits, interrupted.at = 0, frozenset({9})
    with pytest.raises(KeyboardInterrupt):
        backward(pair.model, number=2)
    pair.optimizer.zero_grad()
    stretches, seen = pair.session._parts.stretches, list[object]()
    for number in range(2, 6):
        pair.train(1, first=number)
        seen.append(stretches.training)  # kept: of one that is gone, the next may have the address
    assert len(set(map(id, seen))) == 4, "each forward is one of its own"
    assert not stretches.training.reason
    pair.expect_same()


@pytest.mark.parametrize("number", [1, 4, 11])
def test_an_interruption_between_a_wait_and_its_note_is_settled(
    number: int, moving: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving.train(2)
    finish, waits = residency.finish, list[Sequence[Issue]]()

    def interrupted(state: Residency, works: Sequence[Issue]) -> None:
        waits.append(works)
        if len(waits) == number:
            raise KeyboardInterrupt
        finish(state, works)

    monkeypatch.setattr(residency, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backward(moving.model, number=2)
    assert not moving.session._parts.executor.store.state.in_flight
    moving.optimizer.zero_grad()
    moving.train_same(2, first=2)


FILES = {module.__file__ for module in (arena, residency, store, works_under_way)}
HOMES = {late_planes.__file__}  # of gradients, for a backward
STEPS = {"deferred": ("deferred", FILES), "in_backward": ("in_backward", FILES), "homes": ("in_backward", HOMES)}


class Lines:
    """Counts lines of these files, and interrupts at one of them."""

    def __init__(self, files: Collection[str | None], interrupted: int | None = None) -> None:
        self._files, self.count = files, 0
        self._interrupted = interrupted

    @contextmanager
    def counting(self) -> Any:
        before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGINT, handler)

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._interrupted:
                signal.raise_signal(signal.SIGINT)
        return self._line


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 12))])
@pytest.mark.parametrize(("step", "files"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("machine", ["cpu+disk", "emulated"])
def test_an_interruption_at_any_line_loses_nothing(
    machine: str, step: str, files: Collection[str], seed: int, make_pair: MakePair, tmp_path: Path
) -> None:
    random, interrupted = Random(seed), 0
    memory = {"precision": "fp32", "step": step, **MACHINES[machine](tmp_path / "disk")}
    lines, total = Lines(files), 0
    for trial in range(7):  # the first one counts
        pair = make_pair(**memory)
        pair.train(2)
        pair.session.save_checkpoint(tmp_path / f"{trial}")
        is_whole = False
        try:
            with lines.counting():
                backward(pair.model, number=2)
        except KeyboardInterrupt:
            interrupted += 1
            is_whole = step == "deferred"  # or some parameters may have been updated
        if not is_whole:
            pair.session.load_checkpoint(tmp_path / f"{trial}")
        pair.optimizer.zero_grad()
        pair.train_same(2, first=2)
        pair.session.close()
        total = total or lines.count
        lines = Lines(files, random.randrange(total) + 1)
    assert interrupted, "nothing was interrupted"
