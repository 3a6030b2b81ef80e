"""Holds what the process really has against what it may have, where the user gave a bound.

The plan counts live bytes and what the allocator is known to keep; this looks at the resident size itself, for what neither foresaw: a
forward that cannot be traced, `generate()`, tensors of the user's, an allocator that keeps more.
"""

from __future__ import annotations

import logging

from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import resident_bytes
from patrickstar.units import MIB, format_bytes

__all__ = ["Pressure"]

_SLACK_BYTES = 32 * MIB  # below the 48 MiB and 1 % that are promised
_log = logging.getLogger("patrickstar")


class Pressure:
    """A bound on the resident size.

    Args:
        limit_bytes: what the process may have resident, all in all.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes + _SLACK_BYTES
        self._said = False

    def excess_bytes(self) -> int:
        """How much more is resident than may be, after the allocator has given back what it keeps; 0 where all is well."""
        if resident_bytes() <= self._limit_bytes:
            return 0
        release_free_memory()
        excess = max(0, resident_bytes() - self._limit_bytes)
        if excess and not self._said:
            self._said = True
            _log.warning(
                "the process holds %s more than host_memory allows and the plan foresaw: chunks are moved out to make room. Tensors that "
                "the program keeps (outputs of a step, copies of weights) count as well",
                format_bytes(excess),
            )
        return excess
