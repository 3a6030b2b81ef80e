"""Room that a session turns out to need: planes of parameters that were frozen, gradients of several backwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from patrickstar.core.formats import Formats, SessionFormats
from patrickstar.core.gradient_use import GradientUse
from patrickstar.core.layout import Layout, Run
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.plane import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Phase, Touch
from patrickstar.plan.minimum import Need, expect_room
from patrickstar.plan.placement import place_more
from patrickstar.plan.residency import slots_of
from patrickstar.plan.touches import update_touches
from patrickstar.runtime.conductor import Conductor

__all__ = ["Growth"]

_WIDE = 4  # bytes of an element in fp32


class Growth:
    """Gives chunks planes that they have not had, or wider ones. What fits no budget is refused before anything has changed.

    Args:
        gradients: where they go.
        changed: is told that plans made so far are of units of other sizes.
    """

    def __init__(
        self,
        layout: Layout,
        formats: SessionFormats,
        conductor: Conductor,
        *,
        machine: Machine,
        gradients: GradientUse,
        changed: Callable[[str], None],
    ) -> None:
        self._layout = layout
        self._formats = formats
        self._conductor = conductor
        self._machine = machine
        self._gradients = gradients
        self._changed = changed

    def thaw(self, name: str) -> None:
        """A parameter that was frozen is trained from now on, and with it whatever shares its chunks.

        Raises:
            BudgetError: what that takes does not fit.
        """
        for weight in self._layout.weight_units(name):
            self._thaw_run(self._layout.run_of(weight.chunk), name)

    def _thaw_run(self, run: Run, name: str) -> None:
        chunks = range(run.head, run.head + run.length)
        if self._formats.now.is_trained(run.head, self._layout):
            return
        self._conductor.settle()
        formats, state = self._formats.now.thaw(chunks), self._conductor.mover.state
        weight = PlaneRef(run.head, WEIGHT)
        units = [ref for ref in formats.units(self._layout, self._gradients.planes) if ref.chunk in chunks]
        slots = {ref: slots_of(ref, self._layout, formats) for ref in units}
        new = [ref for ref in units if slots[ref] != state.slots.get(ref)]
        homes = self._prepare(new, slots, formats)
        # An fp16 weight alone becomes the fp32 master.
        self._reform(homes, slots, keep=weight if weight in new else None, grow=partial(Formats.thaw, chunks=chunks))
        self._changed(f"{name} is trained from now on")

    def widen_gradients(self) -> None:
        """Gradients add up in fp32 from now on: those that have come are widened, in every chunk.

        Raises:
            BudgetError: what that takes does not fit.
        """
        formats, layout, state = self._formats.now, self._layout, self._conductor.mover.state
        narrow = [ref for ref in formats.units(layout, (GRAD,)) if formats.of(ref, layout).itemsize < _WIDE]
        factor = {ref: _WIDE // formats.of(ref, layout).itemsize for ref in narrow}
        slots = {ref: state.slots[ref] * factor[ref] for ref in narrow}
        homes = self._prepare(narrow, slots, formats)
        for ref in narrow:
            keep = None if ref in state.free else ref
            self._reform({ref: homes[ref]}, slots, keep=keep, grow=partial(Formats.widen, chunk=ref.chunk))
        self._changed("gradients of several backwards add up in fp32 from now on")

    def _reform(
        self,
        homes: dict[PlaneRef, Tier],
        slots: dict[PlaneRef, int],
        *,
        keep: PlaneRef | None,
        grow: Callable[[Formats], Formats],
    ) -> None:
        """Takes units in, or in another size. `keep`: the one whose contents stay, in its new type. `grow`: the formats that have them so."""
        conductor, state = self._conductor, self._conductor.mover.state
        with conductor.apart():
            values = None
            if keep is not None:
                conductor.moment(Phase.STEP, "", (Touch(keep),))
                values = conductor.tensor(keep).clone()
            for ref in homes:
                if ref in state.home:
                    conductor.mover.release(ref)
            self._formats.now = grow(self._formats.now)
            conductor.mover.grow(homes, slots)
            if keep is not None and values is not None:
                conductor.moment(Phase.STEP, "", (Touch(keep, True),))
                conductor.tensor(keep).copy_(values)

    def _prepare(self, new: Collection[PlaneRef], slots: dict[PlaneRef, int], formats: Formats) -> dict[PlaneRef, Tier]:
        """Where the units will rest. BudgetError where they do not fit there, or the update of a chunk does not fit any more."""
        self._expect_room_for_updates({ref.chunk for ref in new}, slots, formats)
        mover = self._conductor.mover
        homes = place_more(
            self._machine,
            new,
            home=mover.state.home,
            slots={**mover.state.slots, **slots},
            slot_bytes=mover.state.slot_bytes,
            disk=mover.store.has_disk,
        )
        mover.prepare(homes, slots)
        return homes

    def _expect_room_for_updates(self, chunks: Collection[int], slots: dict[PlaneRef, int], formats: Formats) -> None:
        state, layout = self._conductor.mover.state, self._layout
        sizes = {**state.slots, **slots}
        for chunk in sorted(chunks):
            gradient = [Touch(PlaneRef(chunk, GRAD))] if self._gradients.has_plane else []
            touches = update_touches(chunk, layout, formats, *gradient)
            needed = sum(sizes[touch.ref] for touch in touches)
            expect_room(Need(f"step {layout.run_of(chunk).tensors[0]}", needed, state.slot_bytes, 0), self._machine)
