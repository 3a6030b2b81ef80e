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
    """The groups that are there. `gather`: makes the weights of a group, 1-D, chunk after chunk."""

    def __init__(self, layout: ShardLayout, gather: Callable[[str], Tensor]) -> None:
        self._layout = layout
        self._gather = gather
        self.there: dict[str, Tensor] = {}

    def use(self, touches: Iterable[Touch]) -> None:
        """Gathers the groups of these weights, as far as they are not there."""
        wanted = {self._layout.group_of(touch.ref.chunk): self._layout.block_of(touch.ref.chunk) for touch in touches}
        if wanted.keys() <= self.there.keys():
            return
        if blocks := {block for block in wanted.values() if block}:
            self.there = {group: whole for group, whole in self.there.items() if self._block(group) in {"", *blocks}}
        for group in wanted:
            if group not in self.there:
                self.there[group] = self._gather(group)

    def _block(self, group: str) -> str:
        return self._layout.block_of(self._layout.chunks_in[group][0])

    def forget(self) -> None:
        """Notes that weights have other values, or are not needed."""
        self.there.clear()
