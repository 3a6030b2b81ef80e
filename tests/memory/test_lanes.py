"""memory/lanes.py: one contract for every lane."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.errors import DeviceError, StateError
from patrickstar.memory.lanes import InlineLane, Job, Lane, PacedLane, StressedLane, ThreadLane, Workers
from patrickstar.memory.works_under_way import lanes_of
from tests.forked import in_forked_child
from tests.manual_lane import ManualLane, RandomLane

LANES: dict[str, Callable[[], Lane]] = {
    "inline": InlineLane,
    "thread": lambda: ThreadLane("test"),
    "threads": lambda: ThreadLane("test", works=4),
    "paced": lambda: PacedLane("test", bytes_per_second=1e6),
    "stressed": lambda: StressedLane(ThreadLane("test", works=3), Random(0)),
    "manual": ManualLane,
    "random": lambda: RandomLane(Random(0)),
    "random, at once": lambda: RandomLane(Random(0), works=2),
}
BESIDE = ("thread", "threads", "paced", "stressed")
"""Those that do works while the caller goes on."""


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    made = LANES[request.param]()
    yield made
    made.close()


def failing() -> None:
    raise OSError("no")


def test_after_a_wait_the_work_is_done_once(lane: Lane) -> None:
    log = list[str]()
    ticket = lane.issue(lambda: log.append("a"))
    for _ in range(3):
        ticket.wait()
        assert ticket.done
    assert log == ["a"]


def test_a_work_begins_when_all_that_it_comes_after_has_ended(lane: Lane) -> None:
    log = list[str]()
    other = ThreadLane("other", works=2)
    before = [
        other.issue(lambda: (time.sleep(0.02), log.append("before"))[0]),
        lane.issue(lambda: log.append("before")),
    ]
    lane.issue(lambda: log.append("after"), before).wait()
    assert log == ["before", "before", "after"]
    other.close()


def test_issue_does_not_raise_what_the_work_raises_and_wait_does_each_time(lane: Lane) -> None:
    ticket = lane.issue(failing)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            ticket.wait()
        assert ticket.done


def test_a_failure_is_that_of_what_comes_after_it_and_of_nothing_else(lane: Lane) -> None:
    log = list[str]()
    failed = lane.issue(failing)
    after = lane.issue(lambda: log.append("after"), [failed])
    beside = lane.issue(lambda: log.append("beside"))
    beside.wait()
    assert log == ["beside"]
    for ticket in (failed, after):
        with pytest.raises(OSError, match="no"):
            ticket.wait()
    assert log == ["beside"]


def test_somebody_is_called_once_when_a_work_has_ended_well_or_not(lane: Lane) -> None:
    called = list[str]()
    for work in (lambda: None, failing):
        ticket = lane.issue(work)
        ticket.when_settled(lambda: called.append("early"))
        lane.drain()
        ticket.when_settled(lambda: called.append("late"))
    assert called == ["early", "late"] * 2


def test_after_drain_nothing_is_under_way_and_after_close_nothing_is_taken(lane: Lane) -> None:
    log = list[int]()
    tickets = [lane.issue(lambda n=n: log.append(n)) for n in range(5)]  # type: ignore[misc]
    tickets.append(lane.issue(failing, tickets))
    lane.drain()
    assert sorted(log) == list(range(5))
    assert all(ticket.done for ticket in tickets)
    lane.close()
    lane.close()
    with pytest.raises(StateError):
        lane.issue(lambda: log.append(9)).wait()
    assert 9 not in log


@pytest.mark.parametrize("kind", LANES)
@settings(deadline=None, max_examples=20)
@given(graph=st.lists(st.lists(st.integers(0, 30), max_size=3), max_size=12), seed=st.integers(0, 9))
def test_works_of_any_order_end_in_an_order_that_their_tickets_allow(
    kind: str, graph: list[list[int]], seed: int
) -> None:
    lanes, log = [LANES[kind](), LANES["threads" if kind in BESIDE else "random"]()], list[int]()
    tickets = list[Any]()
    before = [{other for other in others if other < number} for number, others in enumerate(graph)]
    for number, others in enumerate(before):
        work = lambda number=number: log.append(number)
        tickets.append(lanes[(number + seed) % 2].issue(work, [tickets[other] for other in others]))
    for number in Random(seed).sample(range(len(tickets)), len(tickets)):
        tickets[number].wait()
    assert sorted(log) == list(range(len(graph)))
    for number, others in enumerate(before):
        assert all(log.index(other) < log.index(number) for other in others)
    for lane in lanes:
        lane.close()


@pytest.mark.parametrize("kind", BESIDE)
def test_a_lane_with_threads_works_while_the_caller_goes_on(kind: str) -> None:
    lane, may_end = LANES[kind](), threading.Event()
    ticket = lane.issue(lambda: may_end.wait(10) or failing())
    assert not ticket.done
    may_end.set()
    ticket.wait()
    lane.close()


def test_several_works_of_a_lane_are_under_way_at_once() -> None:
    lane, together = ThreadLane("test", works=3), threading.Barrier(3)
    for ticket in [lane.issue(lambda: together.wait(10) and None) for _ in range(3)]:
        ticket.wait()
    lane.close()


def test_a_ticket_that_is_kept_keeps_nothing_of_what_comes_after_it() -> None:
    class Uses:
        def __call__(self) -> None:
            pass

    lane, may_end, uses = ThreadLane("test", works=2), threading.Event(), Uses()
    first = lane.issue(lambda: (may_end.wait(60), None)[1])
    second, used = lane.issue(uses, [first]), weakref.ref(uses)
    del uses
    assert used() is not None
    may_end.set()
    second.wait()
    lane.close()
    assert used() is None
    assert first.done


def test_a_work_that_ends_its_thread_is_a_failure_like_any_other() -> None:
    lane = ThreadLane("test")

    def leave() -> None:
        raise SystemExit(3)

    ticket = lane.issue(leave)
    with pytest.raises(DeviceError, match=r"a work of the lane test was ended by SystemExit\(3\)"):
        ticket.wait()
    lane.issue(lambda: None).wait()
    lane.close()


def end_of(thread: threading.Thread) -> None:
    """Has a thread end as soon as it runs any Python."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def join(threads: list[threading.Thread]) -> None:
    """Waits until Python has told what has ended them, while the test is there to hear of it."""
    for thread in threads:
        thread.join(60)


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"patrickstar {name}")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that is what is done to them
@pytest.mark.skipif(
    sys.gettrace() is not None, reason="CPython 3.11 never goes on where it traces and another thread is to end"
)
@pytest.mark.parametrize("works", [1, 2])
def test_a_thread_that_ends_while_it_waits_for_works_is_replaced(works: int) -> None:
    lane = ThreadLane("idle", works=works)
    lane.issue(lambda: None).wait()
    ended = threads_of("idle")
    for thread in ended:
        end_of(thread)
    done = list[int]()
    for ticket in [lane.issue(partial(done.append, number)) for number in range(6)]:
        with suppress(DeviceError):  # of the one that was being done
            ticket.wait()
    assert len(done) >= 6 - works
    lane.close()
    join(ended)
    assert not threads_of("idle")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that is what is done to them
def test_a_work_whose_thread_ends_has_failed_and_the_others_are_done() -> None:
    lane, begun, may_end = ThreadLane("busy"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        while not may_end.wait(0.01):
            pass

    first, second = lane.issue(work), lane.issue(lambda: None)
    assert begun.wait(60)
    ended = threads_of("busy")
    end_of(*ended)
    with pytest.raises(DeviceError, match="the lane busy"):
        first.wait()
    second.wait()
    lane.close()
    join(ended)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that is what is done to them
def test_a_thread_that_ends_between_two_works_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a work was taken, and before it is begun."""
    taking = Workers._next

    def take(self: Workers, me: threading.Thread) -> Job | None:
        taking(self, me)
        raise SystemExit

    monkeypatch.setattr(Workers, "_next", take)
    lane = ThreadLane("between")
    ticket = lane.issue(lambda: None)
    with pytest.raises(DeviceError, match="the thread of the lane between was ended while it was doing this"):
        ticket.wait()
    join(threads_of("between"))
    monkeypatch.undo()
    lane.issue(lambda: None).wait()
    lane.close()


def test_a_program_ends_though_a_lane_is_not_closed_and_what_was_issued_is_done() -> None:
    program = (
        "import time; from patrickstar.memory.lanes import StressedLane, ThreadLane\n"
        "lane = ThreadLane('test'); lane.issue(lambda: time.sleep(0.2) or print('done', flush=True))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "done\n"


def test_where_the_system_gives_no_thread_a_wait_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    lane = ThreadLane("H>K")
    ticket = lane.issue(lambda: None)
    with pytest.raises(Exception, match="the lane H>K does nothing any more: can't start new thread"):
        ticket.wait()


def test_a_forked_child_waits_for_nothing_that_its_parents_threads_do() -> None:
    lane, may_end = ThreadLane("test"), threading.Event()
    ticket = lane.issue(lambda: may_end.wait(10) and None)

    def close() -> str:
        signal.alarm(10)  # a hang is an end too
        lane.close()
        return "closed"

    assert in_forked_child(close) == "closed"
    assert not ticket.done
    may_end.set()
    lane.close()


def test_a_paced_lane_takes_the_time_of_its_link_one_transfer_after_another() -> None:
    lane = PacedLane("test", bytes_per_second=1e6)
    began = time.monotonic()
    tickets = [lane.issue(lambda: None, nbytes=60_000) for _ in range(6)]
    for ticket in tickets:
        ticket.wait()
    assert time.monotonic() - began >= 0.36  # never faster; how much slower is the machine's matter
    lane.close()


def test_both_directions_of_an_emulated_link_are_under_way_at_once() -> None:
    make = lanes_of(bytes_per_second=1e9)
    lanes = [make(Tier.DEVICE, Tier.HOST), make(Tier.HOST, Tier.DEVICE)]
    down, up = threading.Event(), threading.Event()
    met = list[bool]()

    def meet(mine: threading.Event, other: threading.Event) -> None:
        mine.set()
        met.append(other.wait(10))  # it comes only if the other direction begins before this one has ended

    tickets = [lanes[0].issue(lambda: meet(down, up), nbytes=1), lanes[1].issue(lambda: meet(up, down), nbytes=1)]
    for ticket in tickets:
        ticket.wait()
    for lane in lanes:
        lane.close()
    assert met == [True, True]


def test_a_manual_lane_does_nothing_until_told() -> None:
    lane, log = ManualLane(), list[int]()
    tickets = [lane.issue(lambda n=n: log.append(n)) for n in range(3)]  # type: ignore[misc]
    assert (log, lane.pending) == ([], 3)
    assert not any(ticket.done for ticket in tickets)
    lane.complete(2)
    assert (log, lane.pending) == ([0, 1], 1)
    assert [ticket.done for ticket in tickets] == [True, True, False]
    with pytest.raises(AssertionError, match="1 are pending"):
        lane.complete(2)


def test_a_random_lane_of_two_works_does_two_at_once() -> None:
    lane, both = RandomLane(Random(0), works=2), threading.Barrier(2, timeout=10)
    tickets = [lane.issue(lambda: (both.wait(), None)[1]) for _ in range(2)]
    for ticket in tickets:
        ticket.wait()
    lane.close()


def test_a_random_lane_takes_no_order_for_granted() -> None:
    orders = set()
    for seed in range(20):
        lane, log = RandomLane(Random(seed)), list[int]()
        tickets = [lane.issue(lambda n=n: log.append(n)) for n in range(3)]  # type: ignore[misc]
        tickets[0].wait()
        lane.drain()
        orders.add(tuple(log))
    assert len(orders) == 6


def test_each_direction_of_a_link_has_a_lane_of_its_own() -> None:
    make = lanes_of(bytes_per_second=1e9, stress_seed=1)
    pairs = [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE), (Tier.HOST, Tier.DISK), (Tier.HOST, Tier.HOST)]
    lanes = [make(*pair) for pair in pairs]
    log = list[int]()
    late = lanes[0].issue(lambda: log.append(1), nbytes=1)
    lanes[2].issue(lambda: log.append(2), [late])
    for lane in lanes:
        lane.drain()
    for lane in lanes:
        lane.close()
    assert log == [1, 2]
