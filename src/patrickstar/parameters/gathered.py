"""Groups of weights that are gathered over ranks: which are there is a function of calls alone, so that all ranks gather the same, in the same order.

What no block owns stays from its first use in a step on; of blocks the last one stays, until another is used. Whether anything still holds what was
gathered (Note [Leases] in `memory/leases.py`) depends on when Python lets go of it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Touch


class Gathered:
    """The groups that are there.

    Args:
        gather: makes the weights of a group, 1-D, chunk after chunk.
    Attributes:
        where: words for the use under way, where it is not one by a forward or a backward: all ranks have it, or none.
    """

    def __init__(self, layout: ShardLayout, gather: Callable[[str], Tensor]) -> None:
        self._layout = layout
        self._gather = gather
        self.there: dict[str, Tensor] = {}
        self.where = ""

    def use(self, touches: Iterable[Touch]) -> None:
        """Gathers the groups of these weights, as far as they are not there."""
        for group in dict.fromkeys(self._layout.block_of(touch.ref.chunk) for touch in touches):
            if group in self.there:
                continue
            if group:
                self.there = {other: whole for other, whole in self.there.items() if not other}
            self.there[group] = self._gather(group)

    def forget(self) -> None:
        """Notes that weights have other values, or are not needed."""
        self.there.clear()
