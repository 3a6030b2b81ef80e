"""memory/works_under_way.py: who waits for whom, place by place."""

from __future__ import annotations

import pytest
import torch

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.memory.stream_lane import StreamLane
from patrickstar.memory.works_under_way import Readiness
from tests.cuda.schedules import FEW_SCHEDULES, Accelerator, under

CUDA = torch.device("cuda", 0)
PLACE = (PlaneRef(0, WEIGHT), Tier.DEVICE)
OTHER = (PlaneRef(1, GRAD), Tier.DEVICE)


accelerator = under(FEW_SCHEDULES)


@pytest.mark.parametrize("writes", [True, False])
def test_a_kernel_that_writes_waits_for_copies_that_read(writes: bool, accelerator: Accelerator) -> None:
    readiness, lane = Readiness(CUDA), StreamLane("copies", CUDA)
    slot, host = torch.ones(8, device=CUDA), torch.empty(8, pin_memory=True)
    readiness.compute([PLACE])
    ticket = lane.issue(lambda: host.copy_(slot, non_blocking=True), readiness.computed())
    readiness.read(PLACE, ticket)
    readiness.compute([PLACE, OTHER], writes=[PLACE] if writes else [OTHER])
    slot.add_(1)
    slot.record_stream(lane.stream)
    lane.close()
    assert bool(accelerator.races()) == (not writes)
    if writes:
        assert host.sum() == 8


def test_each_stream_waits_once_for_what_was_written(accelerator: Accelerator) -> None:
    readiness, lane, side = Readiness(CUDA), StreamLane("copies", CUDA), torch.Stream(device="cuda")
    slot = torch.empty(8, device=CUDA)
    torch.accelerator.synchronize()
    readiness.written(PLACE, lane.issue(lambda: slot.fill_(3)))
    sums = []
    for _ in range(2):
        for stream in (torch.accelerator.current_stream(), side):
            with stream:
                readiness.compute([PLACE])
                sums.append(slot.sum())
    assert len(readiness.computed()) == 2
    lane.issue(lambda: slot.fill_(5), [*readiness.before_writing(PLACE), *readiness.computed()])
    for stream in (lane.stream, side):
        slot.record_stream(stream)
    torch.accelerator.synchronize()
    assert [float(value) for value in sums] == [24.0] * 4


def test_what_has_been_waited_for_on_the_host_is_forgotten(accelerator: Accelerator) -> None:
    readiness, lane = Readiness(CUDA), StreamLane("copies", CUDA)
    host, source = torch.empty(8, pin_memory=True), torch.ones(8, device=CUDA)
    torch.accelerator.synchronize()
    place = (PlaneRef(0, WEIGHT), Tier.HOST)
    readiness.written(place, lane.issue(lambda: host.copy_(source, non_blocking=True)))
    readiness.wait(place)
    assert host.sum() == 8
    assert readiness.before_writing(place) == []
    source.record_stream(lane.stream)
    lane.close()


def test_without_a_device_there_is_nothing_to_wait_for() -> None:
    readiness = Readiness(None)
    readiness.compute([PLACE], writes=[PLACE])
    assert readiness.computed() == []
