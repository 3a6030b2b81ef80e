"""The owner of a twin's bytes, which are none: what a step asks for is written down."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from patrickstar.core.planes import GRAD, GradientUse, PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Phase, Touch
from patrickstar.memory.leases import CopyKey, Leases, WeightKey
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.blocks import NotInBlocksError
from patrickstar.parameters.bound import Owner
from patrickstar.parameters.call_order import CallOrder
from patrickstar.parameters.exchange import BackwardSums, Exchange, Nobody, Travel
from patrickstar.plan.touches import Touches
from patrickstar.torch_private import at_end_of_backward, backward_id, inside_backward_node
from patrickstar.tracing.live_bytes import LiveBytes, TraceRecorder


class CannotTrace(Exception):  # noqa: N818  (a reason, not an error: the step runs without a forecast)
    """The reason why a step cannot be traced without running it."""


class Twin(Owner):
    """A session that owns no bytes: writes down what a step asks for. There is nothing to settle, to write back or to let go of.

    Attributes:
        binding: of the twin's parameters, given once it is made. touches: what events touch.
        meter: of non-model bytes. recorder: of what is asked for. in_blocks: whether blocks are bound.
        over_ranks: what is exchanged with other ranks, where there are several.
        changes_copies: whether a weight that computes in another type than it is kept in has been changed.
    """

    binding: Binding

    def __init__(
        self, touches: Touches, dtypes: Mapping[str, torch.dtype], *, device: torch.device, on_device: bool
    ) -> None:
        self.touches = touches
        self._dtypes = dtypes
        self._device = device
        self.leases = Leases(self._slot)
        self.meter = LiveBytes(self.leases.is_counted, on_device=on_device)
        self.recorder = TraceRecorder(self.meter)
        self._sums = BackwardSums()
        self._backwards: set[int] = set()
        self.in_blocks = False
        self._updated: set[str] = set()
        self._last: Sequence[Touch] = ()  # of the last moment
        self.changes_copies = False
        self.over_ranks: Exchange | None = None

    def order_over_ranks(self, next_blocks: Mapping[tuple[bool, str], str], travel: Travel) -> CallOrder | None:
        """The order that is told of calls, where there are several ranks. `next_blocks`: as far as calls have shown."""
        if isinstance(self.touches.layout, ShardLayout):
            layout = self.touches.layout
            self.over_ranks = Exchange(layout, self.binding.by_name, Nobody(layout.size), travel, self.moment)
            self.over_ranks.binding, self.over_ranks.take = self.binding, self._take
            self.over_ranks.order.next_blocks |= next_blocks
            self._sums = self.over_ranks.came
        return None if self.over_ranks is None else self.over_ranks.order

    def use(self, label: str, touches: Sequence[Touch]) -> None:
        if backward_id() != -1:
            if label in self._updated:
                raise NotInBlocksError(f"{label} is used after its gradient has come")
            self._notice_backward()
        own = touches if self.over_ranks is None else self.over_ranks.order.use(touches)
        self.moment(self._phase(), label, own)

    def unpack(self, label: str, touches: Sequence[Touch]) -> None:
        own = touches if self.over_ranks is None else self.over_ranks.order.use(touches)
        self.moment(Phase.BACKWARD, label, own)

    def moment(self, phase: Phase, label: str, touches: Sequence[Touch]) -> None:
        self.recorder.moment(phase, label, touches, self.leases.held())
        self._last = touches

    def make_copy(self, key: CopyKey) -> Tensor:
        assert isinstance(key, str)
        if self.over_ranks is not None:
            return self.over_ranks.make(key)
        bound = self.binding.records[key]
        return torch.empty(bound.shape_only.numel(), dtype=bound.shape_only.dtype, device=self._device)

    def _slot(self, key: PlaneRef) -> Tensor:
        layout = self.touches.layout
        # A unit's tensors are of one type.
        dtype = self._dtypes.get(layout.run_of(key.chunk).tensors[0], torch.float32)
        self.meter.counts = False
        try:
            return torch.empty(layout.slots(key) * layout.chunk_numel, dtype=dtype, device=self._device)
        finally:
            self.meter.counts = True

    def _notice_backward(self) -> None:
        if backward_id() not in self._backwards:
            self._backwards.add(backward_id())
            at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        if not inside_backward_node():  # not one of those inside of it, where blocks are recomputed
            if self.over_ranks is not None:
                self.over_ranks.end_backward()
            for name, gradient in self._sums.take().items():
                self._add(name, gradient)

    def changed(self, key: WeightKey) -> None:
        if isinstance(key, PlaneRef):
            self.moment(self._phase(), self.touches.layout.run_of(key.chunk).tensors[0], [Touch(key, True)])
        else:
            self.changes_copies = True
            self.carry(key)

    def carry(self, name: str) -> None:
        """Writes down that a change of a parameter in place is carried to its master."""
        for _, touches in self.touches.master(name):
            self.moment(self._phase(), name, touches)

    def _phase(self) -> Phase:
        return Phase.FORWARD if backward_id() == -1 else Phase.RECOMPUTE

    def escaped(self, key: WeightKey) -> None:  # noqa: ARG002
        raise CannotTrace("the forward hands out a parameter's memory (numpy(), data_ptr())")

    def gradient(self, name: str, gradient: Tensor | None) -> None:
        self._notice_backward()
        assert gradient is not None  # nobody has any of their own there
        if self.in_blocks and self.touches.updates_at_once(name):  # where uses are not counted
            if name in self._updated:
                raise NotInBlocksError(f"the gradient of {name} comes in parts")
            self._updated.add(name)
            self.binding.changes.outdate([name])
        if self.over_ranks is not None or self.touches.adds_up(name, str(gradient.dtype).removeprefix("torch.")):
            self._sums.add(name, gradient)
        else:
            in_block = self.touches.gradients is GradientUse.CHUNK and bool(self.binding.access.open)
            self._add(name, gradient, in_block=in_block)

    def _add(self, name: str, gradient: Tensor, *, in_block: bool = False) -> None:
        flat = self.binding.records[name].flat(gradient)  # noqa: F841  (where it is a copy, it lives as long as a real one)
        for _, touches in self.touches.gradient(name):
            if not in_block or touches != self._last:
                self.moment(Phase.BACKWARD, name, touches)

    def _take(self, names: Collection[str], shares: Iterable[tuple[int, Tensor]]) -> None:
        """Writes down what is touched where this rank's shares of gradients are added."""
        wanted = set(names)
        for chunk, _ in shares:
            label = next((piece.name for piece in self.touches.layout.tensors_in(chunk) if piece.name in wanted), None)
            if label is not None:
                self.moment(Phase.BACKWARD, label, [Touch(PlaneRef(chunk, GRAD), True)])

    def has_gradient(self, name: str) -> bool:  # noqa: ARG002
        raise CannotTrace("the forward reads gradients")
