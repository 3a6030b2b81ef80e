"""Units that each event of a step touches: one place for the real step, for its twin of fake tensors, and for the traces of norm and update.

| event                                  | phase              | touches (`*`: writes)                                                 |
|----------------------------------------|--------------------|-----------------------------------------------------------------------|
| parameters are used                    | forward, recompute | their weights                                                         |
| autograd needs what it saved           | backward           | a weight                                                              |
| a gradient arrives, and is kept        | backward           | chunk by chunk: gradient*                                             |
| a gradient arrives, and is used        | backward           | chunk by chunk: weight*, both moments*, rest*                         |
| ... with the others of its chunk       | backward, step     | gradient*; with the last one: as a chunk is updated                   |
| the norm is taken                      | step               | parameter by parameter, chunk by chunk: gradient                      |
| a chunk is updated                     | step               | weight*, both moments*, rest*, and gradient; perhaps on the host      |

The rest is there where a chunk's master is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from patrickstar.core.formats import Formats, SessionFormats
from patrickstar.core.layout import Layout, Part
from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, GradientUse, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace


@dataclass(frozen=True, slots=True)
class Touches:
    """Says what the events of forwards and backwards touch.

    Attributes:
        gradients: where gradients go. formats: which chunks have a split master.
        updates: whether the optimizer updates a parameter, by name.
        uses: numbers of uses of parameters and tiles since a forward began, by name, which decide what a gradient does when it arrives: in all,
            and `apart` from autograd's graph.

    Note [Updates in backward]
        A parameter may be updated as soon as its gradient is complete and its bytes are not needed again in this backward call. A gradient
        comes in one piece where all uses are in one graph; a use under `no_grad` inside a forward is the mark of re-entrant checkpointing,
        whose recomputations are graphs of their own, each with a gradient of its own. And a use through `detach()` may need the bytes after
        the gradient has come. In both cases the gradient is kept and the update waits until the backward call ends. Where parameters keep their
        bytes nobody counts uses: the trace of the forward has counted them (`Whole.may_update`). There a use of what the backward has updated is
        refused: a hook's, or a function's in a forward that is not as its trace.
    """

    layout: Layout
    gradients: GradientUse
    updates: Callable[[str], bool]
    formats: SessionFormats
    uses: dict[str, int] = field(default_factory=dict)
    apart: dict[str, int] = field(default_factory=dict)

    def begin_forward(self) -> None:
        """Begins to count uses anew."""
        self.uses.clear()
        self.apart.clear()

    def gradient(self, label: str) -> Iterator[tuple[Part, tuple[Touch, ...]]]:
        """The moments of a gradient's arrival: the piece of the gradient that each is about, and what it touches."""
        if not self.updates_at_once(label):
            return gradient_parts(self.layout, label, writes=True)
        parts, formats = self.layout.parts(label), self.formats.now
        return ((part, update_touches(part.chunk, self.layout, formats)) for part in parts)

    def updates_at_once(self, label: str) -> bool:
        """Tells whether a gradient that arrives now is the parameter's whole gradient, to be used and dropped. Note [Updates in backward]."""
        if self.gradients is not GradientUse.UPDATE or not self.updates(self.layout.owner(label)):
            return False
        return self.comes_whole(label)

    def comes_whole(self, label: str) -> bool:
        """Tells whether a backward delivers the gradient of a parameter, or of a tile, in one piece."""
        if self.apart.get(label) and self.uses.get(label) != 1:
            return False
        # A parameter in tiles that is also used as a whole has gradients of both.
        owner, leaves = self.layout.owner(label), self.layout.leaves(label)
        as_whole = owner != label and self.uses.get(owner)
        in_tiles = leaves != (label,) and any(map(self.uses.get, leaves))
        return not (as_whole or in_tiles)

    def adds_up(self, label: str, dtype: str) -> bool:
        """Tells whether parts of a gradient are added up in their own type until the backward ends, since the plane keeps another type."""
        place = self.layout.slices.get(label)
        is_one = place is not None and not place.tiles and not self.apart
        if self.gradients is GradientUse.NONE or is_one or self.comes_whole(label):
            return False
        kept = self.formats.now.of(PlaneRef(self.layout.parts(label)[0].chunk, GRAD), self.layout)
        return kept.dtype != dtype

    def master(self, label: str) -> list[tuple[Part, tuple[Touch, ...]]]:
        """The moments in which changes of a parameter, or of a tile, are carried to its master: the piece that each is about, and what it touches."""
        formats = self.formats.now
        return [
            (part, master_touches(part, self.layout, is_split=formats.is_split(part.chunk, self.layout), writes=True))
            for part in self.layout.parts(label)
        ]

    def keeps_rest(self, label: str) -> bool:
        """Tells whether a parameter's master is split: the weight does not show all of such a master."""
        return self.formats.now.is_split(self.layout.slices[self.layout.owner(label)].chunk, self.layout)


def gradient_parts(layout: Layout, label: str, *, writes: bool) -> Iterator[tuple[Part, tuple[Touch, ...]]]:
    """The moments in which a gradient in its plane is read or written: the piece that each is about, and what it touches."""
    for part in layout.parts(label):
        yield part, (Touch(PlaneRef(part.chunk, GRAD), writes),)


def master_touches(part: Part, layout: Layout, *, is_split: bool, writes: bool) -> tuple[Touch, ...]:
    """Touches of reading or writing a piece of a parameter's master."""
    weight = Touch(layout.weight_place(part)[0], writes)
    return tuple(sorted([weight, *([Touch(PlaneRef(part.chunk, REST), writes)] if is_split else [])]))


def update_touches(chunk: int, layout: Layout, formats: Formats, *gradient: Touch) -> tuple[Touch, ...]:
    """Touches of a chunk's update, from a gradient that is no unit, or from `gradient`."""
    planes = (EXP_AVG, EXP_AVG_SQ, *((REST,) if formats.is_split(chunk, layout) else ()))
    weight = Touch(PlaneRef(layout.run_of(chunk).head, WEIGHT), True)
    return tuple(sorted([weight, *(Touch(PlaneRef(chunk, plane), True) for plane in planes), *gradient]))


def step_trace(
    layout: Layout, names: Iterable[str], *, formats: Formats, in_plane: bool, scratch_bytes: int = 0
) -> Trace:
    """The moments of an update of these parameters: one for each chunk that holds a piece of one, by whose name it goes.

    Args:
        formats: which chunks are trained, and have a split master.
        in_plane: whether gradients lie in chunks. scratch_bytes: what each update takes of the tier that computes, where it is done there.
    """
    wanted, moments = set(names), list[Moment]()
    for chunk in range(layout.n_chunks):
        label = next((piece.name for piece in layout.tensors_in(chunk) if piece.name in wanted), None)
        if label is None or not formats.is_trained(chunk, layout):
            continue
        touches = update_touches(chunk, layout, formats, *([Touch(PlaneRef(chunk, GRAD))] if in_plane else []))
        moments.append(Moment(Phase.STEP, label, touches, nonmodel_bytes=scratch_bytes, updates=chunk))
    return Trace(tuple(moments))


def on_tiers(updates: Trace, tiers: Mapping[int, Tier]) -> Trace:
    """The moments of updates, those of some chunks on other tiers than the one that computes, of which they take nothing then."""
    moments = []
    for moment in updates.moments:
        tier = None if moment.updates is None else tiers.get(moment.updates)
        moments.append(moment if tier is None else replace(on_tier(moment, tier), nonmodel_bytes=0))
    return Trace(tuple(moments))


def on_tier(update: Moment, tier: Tier | None) -> Moment:
    """The moment of an update on a tier; None: on the one that computes."""
    if tier is None:
        return update
    return replace(update, touches=tuple(touch._replace(tier=tier) for touch in update.touches))


def norm_trace(layout: Layout, names: Iterable[str], *, formats: Formats, scratch_bytes: int = 0) -> Trace:
    """The moments of a pass that reads these parameters' gradients, in layout order. `scratch_bytes`: what the pass takes all the time."""
    wanted = set(names)
    return Trace(
        tuple(
            Moment(Phase.STEP, name, touches, nonmodel_bytes=scratch_bytes, live_bytes=scratch_bytes)
            for name in layout.slices
            if name in wanted
            for part, touches in gradient_parts(layout, name, writes=False)
            if formats.is_trained(part.chunk, layout)
        )
    )


def kept_gradients(trace: Trace, layout: Layout) -> frozenset[str]:
    """The parameters whose gradients wait: for the step or, where they are used as they arrive, for the end of the backward."""
    return frozenset(
        layout.owner(moment.label)
        for moment in trace.moments
        if any(touch.ref.plane == GRAD for touch in moment.touches)
    )


def gradients_freed(trace: Trace) -> tuple[tuple[int, PlaneRef], ...]:
    """(moment, unit) of every gradient that an update in a trace uses: nobody wants the unit any more once that moment is over."""
    return tuple(
        (index, touch.ref)
        for index, moment in enumerate(trace.moments)
        if moment.updates is not None
        for touch in moment.touches
        if touch.ref.plane == GRAD
    )
