"""memory/lanes.py and testing/manual_lane.py: one contract for every lane."""

from __future__ import annotations

import pytest

from patrickstar.memory.lanes import CompletedTicket, InlineLane
from patrickstar.testing.manual_lane import ManualLane

LANES = pytest.mark.parametrize("lane_type", [InlineLane, ManualLane])


def failing() -> None:
    raise OSError("no")


@LANES
def test_after_a_wait_the_work_is_done(lane_type):
    lane, log = lane_type(), []
    ticket = lane.issue(lambda: log.append("a"))
    ticket.wait()
    assert ticket.done
    assert log == ["a"]


@LANES
def test_work_is_done_once_in_the_order_of_issue(lane_type):
    lane, log = lane_type(), []
    tickets = [lane.issue(lambda i=i: log.append(i)) for i in range(4)]
    tickets[2].wait()
    assert log[:3] == [0, 1, 2]
    for ticket in reversed(tickets):
        ticket.wait()
        ticket.wait()
    assert log == [0, 1, 2, 3]


@LANES
def test_issue_does_not_raise_what_the_work_raises_and_wait_does_each_time(lane_type):
    lane = lane_type()
    ticket = lane.issue(failing)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            ticket.wait()
        assert ticket.done


@LANES
def test_a_failure_stays_with_its_own_ticket(lane_type):
    lane, log = lane_type(), []
    failed = lane.issue(failing)
    after = lane.issue(lambda: log.append("after"))
    after.wait()
    assert log == ["after"]
    with pytest.raises(OSError, match="no"):
        failed.wait()


def test_a_completed_ticket_is_done():
    ticket = CompletedTicket()
    ticket.wait()
    assert ticket.done


def test_a_manual_lane_does_nothing_until_told():
    lane, log = ManualLane(), []
    tickets = [lane.issue(lambda i=i: log.append(i)) for i in range(3)]
    assert (log, lane.pending) == ([], 3)
    assert not any(ticket.done for ticket in tickets)
    lane.complete(2)
    assert (log, lane.pending) == ([0, 1], 1)
    assert [ticket.done for ticket in tickets] == [True, True, False]
    with pytest.raises(AssertionError, match="1 are pending"):
        lane.complete(2)
