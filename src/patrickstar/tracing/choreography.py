"""Which units an event of a step touches: one rule, for the real step and for its twin of fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from patrickstar.core.formats import FP32, Formats
from patrickstar.core.gradient_use import GradientUse
from patrickstar.core.layout import Layout, Part
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, REST, PlaneRef
from patrickstar.core.rows import Rows
from patrickstar.core.trace import Touch

__all__ = ["Choreography"]


class Choreography:
    """Counts uses, and says what a gradient's arrival touches.

    Args:
        gradients: where they go. formats: which chunks have a split master.
        updates: whether the optimizer updates a parameter, by name.

    Note [Updates in backward]
        A parameter may be updated as soon as its gradient is complete and its bytes are not needed again in this backward call. A gradient
        comes in one piece where all uses are in one graph; a use under `no_grad` inside a forward is the mark of re-entrant checkpointing,
        whose recomputations are graphs of their own, each with a gradient of its own. And a use through `detach()` may need the bytes after
        the gradient has come. In both cases the gradient is kept and the update waits until the backward call ends.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        gradients: GradientUse,
        updates: Callable[[str], bool],
        formats: Formats = FP32,
    ) -> None:
        self.layout = layout
        self.gradients = gradients
        self._updates = updates
        self._formats = formats

        self._uses: Counter[str] = Counter()
        self._uses_apart: Counter[str] = Counter()

    def begin_forward(self) -> None:
        """Uses are counted from here on."""
        self._uses.clear()
        self._uses_apart.clear()

    def used(self, names: Sequence[str], *, in_graph: bool) -> None:
        """Parameters are used in a forward; `in_graph`: autograd records it as a use of theirs."""
        self._uses.update(names)
        if not in_graph:
            self._uses_apart.update(names)

    def updates_at_once(self, name: str) -> bool:
        """Whether a gradient that arrives now is the parameter's whole gradient, to be used and dropped. Note [Updates in backward]."""
        if self.gradients is not GradientUse.UPDATE or not self._updates(self.layout.owner(name)):
            return False
        return self.comes_whole(name)

    def comes_whole(self, name: str) -> bool:
        """Whether a backward delivers the gradient of a parameter, or of a tile, in one piece."""
        if self._uses_apart[name] and self._uses[name] != 1:
            return False
        # A parameter in tiles that is also used as a whole has gradients of both.
        owner, leaves = self.layout.owner(name), self.layout.leaves(name)
        return (owner == name or not self._uses[owner]) and (leaves == (name,) or not any(map(self._uses.get, leaves)))

    def adds_up(self, name: str, dtype: torch.dtype) -> bool:
        """Whether what a backward brings of a gradient is added up until it ends, in the type that it is of, since it is kept in another one."""
        if self.gradients is not GradientUse.CHUNK or self.comes_whole(name):
            return False
        kept = self._formats.of(PlaneRef(self.layout.parts(name)[0].chunk, GRAD), self.layout)
        return getattr(torch, kept.dtype) is not dtype

    def master(self, name: str) -> list[tuple[Part, tuple[Touch, ...]]]:
        """The moments in which what was changed of a parameter, or of a tile, is carried to where it is kept: each piece, and what it touches."""
        moments = []
        for part in self.layout.parts(name):
            touches = [Touch(self.layout.weight_place(part)[0], True)]
            if self._formats.is_split(part.chunk, self.layout):
                touches.append(Touch(PlaneRef(part.chunk, REST), True))
            moments.append((part, tuple(sorted(touches, key=lambda touch: touch.ref))))
        return moments

    def keeps_rest(self, name: str) -> bool:
        """Whether the master of a parameter is split: its weight does not show all of it."""
        return self._formats.is_split(self.layout.parts(name)[0].chunk, self.layout)

    def gathered(self, name: str, numel: int) -> Rows:
        """What a lookup of so many elements uses."""
        units = self.layout.weight_units(name)
        return Rows(units, numel * self._formats.of(units[0], self.layout).itemsize)

    def added(self, name: str, nbytes: int) -> Rows | None:
        """What so many bytes of gradients of rows are added to, where it rests; None where they go tile by tile as others do."""
        if self.gradients is not GradientUse.CHUNK:
            return None
        units = (PlaneRef(chunk, GRAD) for chunk in sorted({part.chunk for part in self.layout.parts(name)}))
        return Rows(tuple(units), nbytes, writes=True)

    def gradient(self, name: str) -> list[tuple[Part, tuple[Touch, ...]]]:
        """The moments of a gradient's arrival: the piece of it that each is about, and what it touches."""
        if self.gradients is GradientUse.TENSOR:
            return []
        parts = self.layout.parts(name)
        if not self.updates_at_once(name):
            return [(part, (Touch(PlaneRef(part.chunk, GRAD), True),)) for part in parts]
        return [(part, self._update(part)) for part in parts]

    def _update(self, part: Part) -> tuple[Touch, ...]:
        weight, _ = self.layout.weight_place(part)
        planes = (EXP_AVG, EXP_AVG_SQ, *((REST,) if self._formats.is_split(part.chunk, self.layout) else ()))
        return (Touch(weight, True), *(Touch(PlaneRef(part.chunk, plane), True) for plane in planes))
