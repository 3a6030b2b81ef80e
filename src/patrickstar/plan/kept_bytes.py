"""Bytes that an allocator keeps: on a device, memory that activations have had at some moment is not there for slots at another.

torch's allocator keeps what it has taken from the driver. Slots could only get it by emptying that cache, and the host would wait for the device
twice a step. So slots have what the largest moment leaves, all the time; where a moment needs more, as little is kept as lets it pass.
"""

from __future__ import annotations

from dataclasses import replace

from patrickstar.core.trace import Trace
from patrickstar.plan.fit import slots_needed
from patrickstar.plan.residency import Residency

__all__ = ["with_kept_bytes"]


def with_kept_bytes(trace: Trace, *, kept_bytes: int, budget_bytes: int, start: Residency) -> Trace:
    """The trace with so many non-model bytes at every moment, as far as what a moment needs in slots leaves them. No moment has less than it had.

    Args:
        kept_bytes: the most non-model bytes of any moment of any stretch. budget_bytes: of the compute tier.
        start: where units are; sizes and homes are what counts.
    """
    moments = []
    for moment, slots in zip(trace.moments, slots_needed(trace, start=start), strict=True):
        kept = min(kept_bytes, budget_bytes - slots * start.slot_bytes)
        moments.append(replace(moment, nonmodel_bytes=max(moment.nonmodel_bytes, kept)))
    return Trace(tuple(moments))
