"""The order of calls, which alone says what ranks gather and reduce, and when: all ranks do the same, in the same order.

What is resident, and what Python still holds of a group (Note [Leases] in `memory/leases.py`), differs between ranks, and decides nothing.

(1) What no block owns is gathered when a forward begins, and stays until its backward has ended.
(2) A block is gathered when its call, or its backward, begins, unless it is there; then the one that came next the last time, in a backward if that
    has made something in the forward. Others are let go of.
(3) When the backward of another block begins, the gradients of the last one are sent; those that come later wait for the end of the backward.

The backward of a block begins with the first gradient of something that the block has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

from torch import Tensor

from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Touch
from patrickstar.memory.lanes import Ticket

_WIDENED_APART: Final = 1024  # elements


class Coming(NamedTuple):
    """Weights of a group on their way. `arrives`: where they do, if that is not `whole`, which they are widened into."""

    whole: Tensor
    arrives: Tensor | None
    tickets: Sequence[Ticket]

    def wait(self) -> None:
        """Returns when the weights are there."""
        for ticket in self.tickets:
            ticket.wait()
        if self.arrives is not None:
            _widen(self.whole, self.arrives)


class BlockWeights(NamedTuple):
    """The weights of a block, by group, of which some are on their way.

    `ours`: makes a context for our own operations. `written`: is told of each group that has been written on the current stream.
    """

    by_group: dict[str, Tensor]
    coming: list[Coming]
    ours: Callable[[], AbstractContextManager[None]]
    written: Callable[[str, Tensor], None]

    def wait(self) -> None:
        """Returns when all weights are there."""
        with self.ours():
            for coming in self.coming:
                coming.wait()
            self.coming.clear()
            for group, whole in self.by_group.items():
                self.written(group, whole)


class CallOrder:
    """The order of a model's blocks, and what is gathered and reduced as their calls begin.

    Args:
        names: of parameters, in the order in which a model has them.
        gather: begins to gather a block's weights. send: begins to reduce its gradients that have come. receive: takes this rank's shares of what was
            sent last, if anything was.

    Attributes:
        where: words for the use under way, where it is not one by a forward or a backward: all ranks have it, or none.
        there: the weights that are gathered, by block; "" for what no block owns. blocks: those of the model, in its order.
        heard: the calls since somebody began a list of them; None: there is none.
        next_blocks: the block that comes after another, in forwards and in backwards (True): in the model's order, until calls have shown another.
    """

    def __init__(
        self,
        layout: ShardLayout,
        names: Iterable[str],
        *,
        gather: Callable[[str], BlockWeights],
        send: Callable[[str], None],
        receive: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._gather, self._send, self._receive = gather, send, receive
        self.where = ""
        self.there: dict[str, BlockWeights] = {}
        self.blocks = tuple(dict.fromkeys(block for block in map(layout.block, names) if block))
        self.next_blocks = {(False, one): other for one, other in pairwise(self.blocks)}
        self.next_blocks |= {(True, other): one for one, other in pairwise(self.blocks)}
        self.heard: list[Callable[[], object]] | None = None
        self._last = (False, "")
        self._in_backward = ""
        self._calls: dict[str, set[int]] = {}  # those of the last forward whose backward has not begun

    def use(self, touches: Iterable[Touch]) -> Sequence[Touch]:
        """Has the blocks of these weights there. What a use of them touches then: nothing."""
        blocks = dict.fromkeys(self._layout.block_of(touch.ref.chunk) for touch in touches)
        self._hear(partial(self._use_all, blocks))
        self._use_all(blocks)
        return ()

    def begin_forward(self) -> None:
        """Begins a forward of the model, which gathers the same whatever came before it."""
        self._hear(self.begin_forward)
        self.end_backward()
        if "" in self._layout.chunks_of:
            self._use("")

    def begin_call(self, block: str, *, in_backward: bool) -> None:
        """Begins a call of a block, or its recomputation."""
        self._hear(partial(self.begin_call, block, in_backward=in_backward))
        self._use(block)
        if not in_backward:
            self._begin(block, in_backward=False)

    def await_backward(self, block: str, call: int) -> None:
        """Notes that a call has made what has a backward."""
        self._hear(partial(self.await_backward, block, call))
        self._calls.setdefault(block, set()).add(call)

    def begin_backward(self, block: str, call: int) -> None:
        """Begins the backward of a call of a block."""
        self._hear(partial(self.begin_backward, block, call))
        self._use(block)
        self._calls.get(block, set()).discard(call)
        left, self._in_backward = self._in_backward, block
        if left not in ("", block) and not self._calls.get(left):
            self._receive()
            self._send(left)
        self._begin(block, in_backward=True)

    def end_backward(self) -> None:
        """Ends the backward: all that was sent has come when this returns, and nothing stays gathered."""
        self._receive()
        self.next_blocks.pop(self._last, None)
        self._last, self._in_backward = (False, ""), ""
        self._calls.clear()
        self.forget()

    def forget(self) -> None:
        """Notes that weights have other values, or are not needed."""
        self.there.clear()

    def _hear(self, call: Callable[[], object]) -> None:
        if self.heard is not None:
            self.heard.append(call)

    def _use_all(self, blocks: Iterable[str]) -> None:
        for block in blocks:
            self._use(block)

    def _use(self, block: str) -> None:
        if block not in self.there:
            if block:
                self._keep(block)
            self.there[block] = self._gather(block)
        if self.there[block].coming:
            self.there[block].wait()

    def _begin(self, block: str, *, in_backward: bool) -> None:
        direction, last = self._last
        if (direction, last) == (in_backward, block):
            return
        if direction == in_backward and last:
            self.next_blocks[in_backward, last] = block
        else:
            self.next_blocks.pop(self._last, None)
        self._last = in_backward, block
        self._keep(block)
        ahead = self.next_blocks.get((in_backward, block), block)
        if ahead not in self.there and (not in_backward or self._calls.get(ahead)):
            self.there[ahead] = self._gather(ahead)

    def _keep(self, block: str) -> None:
        self.there = {kept: weights for kept, weights in self.there.items() if kept in ("", block)}


def _widen(whole: Tensor, narrow: Tensor) -> None:
    """Writes 1-D elements of 2 bytes, which are the second half of the bytes of `whole`, as its elements of 4."""
    start, numel = 0, whole.numel()
    while start < numel:
        # The first half of what is left lies before what it is made of.
        stop = start + (numel - start) // 2 if numel - start > _WIDENED_APART else numel
        piece = narrow[start:stop]
        whole[start:stop].copy_(piece if stop < numel else piece.clone())
        start = stop
