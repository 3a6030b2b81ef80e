"""Links between tiers: a lane for each, in each direction, one for filling the slots of a tier, and one for the optimizer's updates there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from patrickstar.core.machine import Tier
from patrickstar.memory.lanes import InlineLane, Lane
from patrickstar.memory.stream_lane import StreamLane
from patrickstar.memory.thread_lane import PacedLane, StressedLane, ThreadLane

MakeLane = Callable[[Tier, Tier | None], Lane]
"""Makes the lane from one tier to another; from a tier to itself: that which fills slots there; from a tier to none: that which updates there."""


def lanes_of(
    *, bytes_per_second: float | None = None, stress_seed: int | None = None, device: torch.device | None = None
) -> MakeLane:
    """The lanes of a session: threads for the disk, so that both directions are used at once, and for updates, which an interruption of the
    caller does not leave half done; the rest where it is asked for.

    Args:
        bytes_per_second: of the emulated device's link, in each direction. stress_seed: makes every work of a thread late by chance.
        device: whose streams copy between it and the host, and fill and update what is there. What the host fills it fills beside the caller then.
    """
    random = None if stress_seed is None else Random(stress_seed)  # noqa: S311 - times to be late by

    def make(src: Tier, dst: Tier | None) -> Lane:
        name = f"{src.value} step" if dst is None else f"{src.value}>{dst.value}"
        lane: Lane
        if device is not None and Tier.DEVICE in (src, dst):
            return StreamLane(name, device)
        if bytes_per_second is not None and {src, dst} == {Tier.DEVICE, Tier.HOST}:
            lane = PacedLane(name, bytes_per_second=bytes_per_second)
        elif random is not None:
            lane = ThreadLane(name, works=_STRESSED_WORKS)
        elif Tier.DISK in (src, dst):
            lane = ThreadLane(name, works=DISK_REQUESTS)
        elif dst is None or device is not None:
            lane = ThreadLane(name)
        else:
            lane = InlineLane()
        return lane if random is None else StressedLane(lane, Random(random.random()))  # noqa: S311

    return make


DISK_REQUESTS = 2
"""Under way in each direction at once (`benchmarks/disk.py --depth`): one leaves many disks idle between two, four are no faster than two."""

_STRESSED_WORKS = 3  # at once, so that they overtake each other
