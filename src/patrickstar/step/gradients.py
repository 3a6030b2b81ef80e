"""Gradients in the `grad` plane: how gradients arrive, add up, are read, written and let go.

Within one backward call autograd adds in the parameter's type; over several calls gradients add up here, in fp32, as `.grad` does. The first one is
copied, not added to zeros: -0.0 stays -0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from patrickstar.core.layout import Layout
from patrickstar.core.planes import GRAD, GradientUse, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.memory.leases import AssembledKey
from patrickstar.optim.masters import blocks, scaled_blocks
from patrickstar.optim.passes import Passes
from patrickstar.parameters.assembled import AssembledTensors
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.touches import gradient_parts
from patrickstar.step.executor import Executor
from patrickstar.step.gathering import Gathering
from patrickstar.step.late_planes import LatePlanes
from patrickstar.step.overflow import Overflow
from patrickstar.step.values import put_together
from patrickstar.torch_private import NotInference, Plain, no_gradients


@dataclass(eq=False)
class Gradients:
    """The gradients in the plane: which parameters have one, and the bytes of each.

    Attributes:
        views: is told of gradients that change or are let go. passes: by type of device.
        names: the parameters with a gradient in the plane, by name. incomplete: parameters of whose tiles only some have one so far, with
            these tiles. whole: parameters whose gradient is of a backward that has ended.
        factors: what a gradient in the plane is still to be multiplied with, oldest first (0-dim fp32), by name: done when the gradient is next used,
            in fp32 whatever the plane is of.
        overflow: the parameters whose gradients have arrived with an Inf or NaN, where `finds_overflow`.
    """

    layout: Layout
    executor: Executor
    dtype_of: Callable[[PlaneRef], torch.dtype]
    late_planes: LatePlanes
    views: AssembledTensors
    passes: Mapping[str, Passes]
    finds_overflow: bool = False
    gathering: Gathering | None = None

    names: set[str] = field(default_factory=set)
    incomplete: dict[str, set[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    factors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    overflow: Overflow = field(default_factory=Overflow)

    def add(self, bound: BoundParameter, gradient: Tensor, *, in_block: bool = False) -> None:
        """Takes a gradient that has arrived, of a parameter or of a tile, chunk by chunk. `in_block`: see Note [Blocks] in `parameters/blocks.py`."""
        if bound.tiles:
            for tile in bound.tiles:
                self.add(tile, tile.of(gradient))
            return
        name = bound.owner
        is_update = self.late_planes.gradients is GradientUse.UPDATE
        if is_update or self.layout.has_frozen or name in self.whole or name in self.factors:
            self._make_ready(name, bound)
        is_there = name in self.names or bound.name in self.incomplete.get(name, ())
        with NotInference(), Plain():  # as in `quiet`, but for a call or two
            no_gradients()
            flat = bound.flat(gradient)
            for part, touches in bound.arrivals:
                (unit,) = self.executor.use(Phase.BACKWARD, bound.name, touches, goes_on=in_block)
                target = unit[part.start : part.stop]
                piece = flat[part.tensor_start : part.tensor_start + target.numel()]
                passes = self.passes[target.device.type]
                if self.finds_overflow:  # as in `_put`, but for a call
                    with self.executor.apart(), self.overflow.look(name, target.device) as is_finite:
                        passes.put(target, piece, adds=is_there, is_finite=is_finite)
                else:
                    passes.put(target, piece, adds=is_there)
        if bound.name == name:
            self.names.add(name)
        elif name not in self.names:
            self.incomplete.setdefault(name, set()).add(bound.name)
            if self.incomplete[name].issuperset(self.layout.leaves(name)):
                self.names.add(name)
                del self.incomplete[name]
        if self.views.tensors:
            self.views.changed(AssembledKey(name, GRAD))

    def add_shares(self, rows_of: Mapping[str, Sequence[int]], shares: Iterable[tuple[int, Tensor]]) -> None:
        """Takes this rank's shares of gradients, by chunk, a row for each of several. `rows_of`: which are added, in order, by parameter."""
        before = set(self.names)
        for name in rows_of:
            self.late_planes.thaw(name)
        with NotInference(), Plain():
            no_gradients()
            for chunk, rows in shares:
                pieces = [piece for piece in self.layout.tensors_in(chunk) if piece.name in rows_of]
                if pieces:
                    touches = (Touch(PlaneRef(chunk, GRAD), True),)
                    (unit,) = self.executor.use(Phase.BACKWARD, pieces[0].name, touches)
                    for name, start, stop, _ in pieces:
                        for number, row in enumerate(rows_of[name]):
                            self._put(name, unit[start:stop], rows[row, start:stop], adds=number > 0 or name in before)
        self.names |= rows_of.keys()
        self.whole |= rows_of.keys()

    def _put(self, name: str, target: Tensor, piece: Tensor, *, adds: bool) -> None:
        passes = self.passes[target.device.type]
        if self.finds_overflow:
            with self.executor.apart(), self.overflow.look(name, target.device) as is_finite:
                passes.put(target, piece, adds=adds, is_finite=is_finite)
        else:
            passes.put(target, piece, adds=adds)

    def _make_ready(self, name: str, bound: BoundParameter) -> None:
        """Makes room for a gradient of a parameter, and makes what is there already fit to be added to."""
        self.late_planes.thaw(name)
        if name in self.whole and self.dtype(bound) is not torch.float32:
            self.late_planes.widen_gradients()
        self.late_planes.reserve_for(name)
        if name in self.factors:
            self._apply_factors(name)

    def multiply(self, factor: Tensor) -> None:
        """Notes a factor (0-dim fp32): every gradient counts as multiplied with it from now on."""
        for name in self.names:
            self.factors[name] = (*self.factors.get(name, ()), factor)
            self.views.changed(AssembledKey(name, GRAD))

    def pieces(self, name: str, *, writes: bool = False) -> Iterator[Tensor]:
        """The gradient as 1-D pieces in slot order, one chunk after the other; each valid until the next is asked for."""
        for part, touches in gradient_parts(self.layout, name, writes=writes):
            (unit,) = self.executor.use(Phase.STEP, name, touches)
            yield unit[part.start : part.stop]

    def read(self, bound: BoundParameter) -> Tensor:
        """A copy of the gradient on the host, in fp32, of the parameter's shape and strides."""
        with self.executor.quiet():
            shape, stride = bound.shape_only.shape, bound.shape_only.stride()
            whole = torch.empty_strided(shape, stride, dtype=torch.float32, device="cpu")
            with self.executor.room.making(whole.nbytes):
                self.copy_into(bound.name, whole.as_strided((whole.numel(),), (1,)))
            return whole

    def copy_into(self, name: str, flat: Tensor) -> None:
        """Writes the gradient, rounded to its type, into a 1-D tensor in slot order."""
        factors = self.factors.get(name, ())
        scaled = (block for piece in self.pieces(name) for block in scaled_blocks(piece, factors))
        if self.gathering is not None:
            self.gathering.assemble(name, scaled, flat)
        else:
            put_together(flat, scaled)

    def write(self, bound: BoundParameter, flat: Tensor, *, wholly: bool) -> None:
        """Takes a gradient that was read (`copy_into`) and has been changed.

        An element that reads as before keeps what it was rounded from, unless all are written (`wholly`). A plane that cannot hold what was
        written becomes fp32: one of 16 bits under a parameter that computes in fp32, or whose gradient is still to be multiplied.

        Raises:
            BudgetError: there is no room for such a plane. The gradient is as it was.
        """
        name = bound.name
        self.make_fit(bound, torch.float32 if name in self.factors else flat.dtype)
        self._apply_factors(name)
        self.overflow.forget(name)
        with self.executor.quiet():
            for part, target in zip(self.layout.parts(name), self.pieces(name, writes=True), strict=True):
                written = flat[part.tensor_start : part.tensor_start + target.numel()]
                if wholly or target.dtype == written.dtype:
                    target.copy_(written)
                else:
                    _take_changes(written, target)
                if self.finds_overflow:
                    with self.executor.apart(), self.overflow.look(name, target.device) as is_finite:
                        self.passes[target.device.type].look(target, is_finite)

    def make_fit(self, bound: BoundParameter, dtype: torch.dtype) -> None:
        """Makes the plane of a parameter's gradient one that holds values of this type as they are. BudgetError where there is no room for it."""
        if self.dtype(bound) is not torch.float32 and self.dtype(bound) != dtype:
            self.late_planes.widen_gradients()

    def dtype(self, bound: BoundParameter) -> torch.dtype:
        """The type in which a parameter's gradient is kept."""
        return self.dtype_of(PlaneRef(bound.ref.chunk, GRAD))

    def drop(self, names: Iterable[str]) -> None:
        """Drops the gradients of these parameters; chunks without any other give their slots back."""
        gone = (self.names | self.incomplete.keys()).intersection(names)
        self.names -= gone
        self.whole -= gone
        why = "it was released (zero_grad(), p.grad = None, a checkpoint that was loaded)"
        for name in gone:
            self.incomplete.pop(name, None)
            self.factors.pop(name, None)
            if self.views.tensors:
                self.views.dropped(AssembledKey(name, GRAD), why)
        if self.finds_overflow:
            self.overflow.forget(*gone)
        left = self.names | self.incomplete.keys()
        for chunk in sorted({part.chunk for name in gone for part in self.layout.parts(name)}):
            if not left or left.isdisjoint(piece.name for piece in self.layout.tensors_in(chunk)):
                self.executor.release(PlaneRef(chunk, GRAD))

    def fill_with_zeros(self, names: Collection[str]) -> None:
        """Sets those of these gradients that there are to zero, where they lie (`zero_grad(set_to_none=False)`)."""
        with self.executor.quiet():
            for chunk in sorted({part.chunk for name in self.names for part in self.layout.parts(name)}):
                (flat,) = self.executor.use(Phase.STEP, "", (Touch(PlaneRef(chunk, GRAD), True),))
                for piece in self.layout.tensors_in(chunk):
                    if piece.name in self.names and piece.name in names:
                        flat[piece.start : piece.stop].zero_()
        self.overflow.forget(*names)
        for name in names:
            self.factors.pop(name, None)
            if name in self.names:
                self.views.changed(AssembledKey(name, GRAD))

    def _apply_factors(self, name: str) -> None:
        factors = self.factors.pop(name, ())
        if factors:
            with self.executor.quiet():
                for piece in self.pieces(name, writes=True):
                    for factor in factors:
                        piece.mul_(factor)


def _take_changes(written: Tensor, kept: Tensor) -> None:
    """Widens the elements of a 16-bit tensor that are not those that the kept ones are rounded to; the others stay as they are."""
    for block in blocks(kept.numel()):
        changed = kept[block].to(written.dtype).view(torch.int16) != written[block].view(torch.int16)
        kept[block].copy_(torch.where(changed, written[block].to(torch.float32), kept[block]))
