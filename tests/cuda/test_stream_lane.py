"""memory/stream_lane.py: the contract of lanes, and what is a stream's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from patrickstar.errors import DeviceError
from patrickstar.memory.lanes import CompletedTicket, ThreadLane, Ticket
from patrickstar.memory.stream_lane import StreamLane, StreamTicket
from tests.cuda.schedules import FEW_SCHEDULES, Accelerator, under
from tests.memory.test_lanes import (  # noqa: F401
    test_a_failure_is_that_of_what_comes_after_it_and_of_nothing_else,
    test_a_work_begins_when_all_that_it_comes_after_has_ended,
    test_after_drain_nothing_is_under_way_and_after_close_nothing_is_taken,
    test_issue_does_not_raise_what_the_work_raises_and_wait_does_each_time,
    test_somebody_is_called_once_when_a_work_has_ended_well_or_not,
)

CUDA = torch.device("cuda", 0)


accelerator = under(FEW_SCHEDULES)


@pytest.fixture
def lane(accelerator: Accelerator) -> Iterator[StreamLane]:
    made = StreamLane("test", CUDA)
    yield made
    made.close()


@pytest.fixture
def other(accelerator: Accelerator) -> Iterator[StreamLane]:
    made = StreamLane("other", CUDA)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadLane]:
    made = ThreadLane("threads", works=2)
    yield made
    made.close()


def no() -> None:
    raise OSError("no")


def test_after_a_wait_the_host_sees_what_the_device_has_done(lane: StreamLane) -> None:
    target, source = torch.empty(8, pin_memory=True), torch.ones(8, device=CUDA)
    torch.accelerator.synchronize()
    ticket = lane.issue(lambda: target.copy_(source, non_blocking=True))
    source.record_stream(lane.stream)
    for _ in range(2):
        ticket.wait()
        assert ticket.done
    assert target.sum() == 8


def test_what_waits_on_the_device_comes_after_the_work(lane: StreamLane, accelerator: Accelerator) -> None:
    tensor = torch.zeros(8, device=CUDA)
    ticket = lane.issue(lambda: tensor.add_(1), [StreamTicket(torch.accelerator.current_stream())])
    tensor.record_stream(lane.stream)
    accelerator.waits()
    ticket.wait_on_device()
    tensor.add_(1)
    assert not accelerator.waits()  # of the host
    assert tensor.sum().item() == 16


def test_works_of_two_streams_are_ordered_by_what_they_come_after(lane: StreamLane, other: StreamLane) -> None:
    tensor = torch.empty(8, device=CUDA)
    torch.accelerator.synchronize()
    first = lane.issue(lambda: tensor.fill_(1))
    second = other.issue(lambda: tensor.mul_(3), [first])
    lane.issue(lambda: tensor.add_(1), [second]).wait()
    for stream in (lane.stream, other.stream):
        tensor.record_stream(stream)
    assert tensor.sum().item() == 32


def test_a_work_comes_after_one_of_the_host_without_anybody_waiting(lane: StreamLane, threads: ThreadLane) -> None:
    go, source = threading.Event(), torch.zeros(8, pin_memory=True)
    target = torch.empty(8, device=CUDA)
    torch.accelerator.synchronize()

    def write() -> None:
        assert go.wait(10)
        source.fill_(5)

    ticket = lane.issue(lambda: target.copy_(source, non_blocking=True), [threads.issue(write)])
    assert not ticket.done
    go.set()
    ticket.wait_on_device()
    target.record_stream(lane.stream)
    assert target.sum().item() == 40


def test_a_work_of_the_host_comes_after_one_of_the_device(lane: StreamLane, threads: ThreadLane) -> None:
    target, source = torch.zeros(8, pin_memory=True), torch.ones(8, device=CUDA)
    torch.accelerator.synchronize()
    copied = lane.issue(lambda: target.copy_(source, non_blocking=True))
    source.record_stream(lane.stream)
    sums = list[float]()
    threads.issue(lambda: sums.append(float(target.sum())), [copied]).wait()
    assert sums == [8.0]


@pytest.mark.parametrize("where", ["on the device", "on the host", "before"])
def test_a_work_that_comes_after_one_that_failed_is_not_done(
    where: str, lane: StreamLane, other: StreamLane, threads: ThreadLane
) -> None:
    failed: Ticket = CompletedTicket(OSError("no"))
    if where != "before":
        failed = other.issue(no) if where == "on the device" else threads.issue(no)
    done = list[int]()
    ticket = lane.issue(lambda: done.append(1), [failed])
    with pytest.raises(OSError, match="no"):
        ticket.wait()
    assert not done


def test_after_drain_nothing_is_under_way(lane: StreamLane, threads: ThreadLane, accelerator: Accelerator) -> None:
    source = torch.ones(8, device=CUDA)
    target = torch.zeros(8, pin_memory=True)
    torch.accelerator.synchronize()
    ticket = lane.issue(lambda: target.copy_(source, non_blocking=True), [threads.issue(lambda: time.sleep(0.02))])
    lane.drain()
    assert ticket.done
    assert target.sum() == 8
    source.record_stream(lane.stream)


def test_a_work_has_not_ended_before_the_device_has_done_it(accelerator: Accelerator) -> None:
    accelerator.configure(0.0)
    lane, tensor = StreamLane("test", CUDA), torch.zeros(8, device=CUDA)
    torch.accelerator.synchronize()
    if hasattr(torch._C, "_cuda_sleep"):  # a GPU is soon done
        lane.issue(lambda: torch.cuda._sleep(1 << 28))
    for _ in range(9):
        ticket = lane.issue(lambda: tensor.add_(1))
    assert not ticket.done
    ticket.wait()
    assert ticket.done
    lane.close()
    tensor.record_stream(lane.stream)


def test_a_failure_of_the_device_shows_at_the_wait(lane: StreamLane, accelerator: Accelerator) -> None:
    tensor = torch.zeros(8, device=CUDA)
    torch.accelerator.synchronize()
    accelerator.fail("aten::add")
    ticket = lane.issue(lambda: tensor.add_(1))
    for _ in range(2):
        with pytest.raises(DeviceError, match="illegal memory access"):
            ticket.wait()
    accelerator.finish()


@pytest.mark.parametrize("drops", ["the wait of the work", "the wait of the reader", "nothing"])
def test_a_wait_that_is_left_out_is_reported(drops: str, lane: StreamLane, accelerator: Accelerator) -> None:
    tensor = torch.ones(8, device=CUDA)
    before = [] if drops == "the wait of the work" else [StreamTicket(torch.accelerator.current_stream())]
    ticket = lane.issue(lambda: tensor.add_(1), before)
    if drops != "the wait of the reader":
        ticket.wait_on_device()
    tensor.sum()
    tensor.record_stream(lane.stream)
    assert bool(accelerator.races()) == (drops != "nothing")


def test_many_threads_issue_at_once(lane: StreamLane) -> None:
    counts = torch.zeros(4, device=CUDA)
    torch.accelerator.synchronize()

    def issue(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(20):
                lane.issue(lambda: counts[number : number + 1].add_(1))

        return run

    callers = [threading.Thread(target=issue(number)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    lane.drain()
    counts.record_stream(lane.stream)
    assert counts.tolist() == [20, 20, 20, 20]
