"""Holds what the process really has against what it may have, where the user gave a bound.

The plan counts live bytes and what the allocator is known to keep; this looks at the resident size itself, for what neither foresaw: a
forward that cannot be traced, `generate()`, tensors of the user's, an allocator that keeps more.
"""

from __future__ import annotations

import logging

from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import resident_bytes
from patrickstar.units import MIB, format_bytes

__all__ = ["EARLY_BYTES", "Pressure"]

_SLACK_BYTES = 40 * MIB  # of the 48 MiB of fixed costs
_SLACK_SHARE = 128  # of the 1 % of them
# Above what chunks and activations may take: from here on the allocator is asked for what it keeps.
EARLY_BYTES = 16 * MIB
_STEP_BYTES = 16 * MIB  # of growth, with what is to come, for which it is asked again
_log = logging.getLogger("patrickstar")


class Pressure:
    """A bound on the resident size.

    Args:
        limit_bytes: what the process may have resident but for its fixed costs. budget_bytes: the part of it that chunks and activations may take.
    """

    def __init__(self, limit_bytes: int, budget_bytes: int) -> None:
        self._early_bytes = limit_bytes + EARLY_BYTES
        self._limit_bytes = limit_bytes + _SLACK_BYTES + budget_bytes // _SLACK_SHARE
        self._said = False
        self._least_bytes = 0  # resident since the allocator was last asked

    def is_exceeded_by(self, growth_bytes: int) -> bool:
        """Tells whether the process would be too large once it has grown by so much, as far as one can tell without giving anything back."""
        return resident_bytes() + growth_bytes > self._limit_bytes

    def excess_bytes(self, growth_bytes: int) -> int:
        """Bytes that will be resident beyond what may be once the process has grown by so much, with what the allocator keeps given back.

        0 where all is well.
        """
        resident = resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        if resident + growth_bytes <= self._early_bytes:
            return 0
        # A heap with holes from before, as building a model leaves them, keeps what is freed into them whatever its thresholds.
        if resident + growth_bytes > min(self._limit_bytes, self._least_bytes + _STEP_BYTES):
            release_free_memory()
            resident = self._least_bytes = resident_bytes()
        excess = max(0, resident + growth_bytes - self._limit_bytes)
        if excess and not self._said:
            self._said = True
            _log.warning(
                "the process holds %s more than host_memory allows and the plan has: chunks are evicted to make room. Tensors that "
                "the program keeps (outputs of a step, copies of weights) count as well",
                format_bytes(excess),
            )
        return excess
