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

_SLACK_BYTES = 40 * MIB  # of the 48 MiB that are promised
_SLACK_SHARE = 128  # of the 1 % that is promised
_log = logging.getLogger("patrickstar")


class Pressure:
    """A bound on the resident size.

    Args:
        limit_bytes: what the process may have resident, all in all. budget_bytes: the part of it that is the session's budget.
    """

    def __init__(self, limit_bytes: int, budget_bytes: int) -> None:
        self._limit_bytes = limit_bytes + _SLACK_BYTES + budget_bytes // _SLACK_SHARE
        self._said = False

    def excess_bytes(self, growth_bytes: int) -> int:
        """How much more will be resident than may be once the process has grown by so much, with what the allocator keeps given back.

        0 where all is well.
        """
        limit = self._limit_bytes - growth_bytes
        if resident_bytes() <= limit:
            return 0
        release_free_memory()
        excess = max(0, resident_bytes() - limit)
        if excess and not self._said:
            self._said = True
            _log.warning(
                "the process holds %s more than host_memory allows and the plan foresaw: chunks are moved out to make room. Tensors that "
                "the program keeps (outputs of a step, copies of weights) count as well",
                format_bytes(excess),
            )
        return excess
