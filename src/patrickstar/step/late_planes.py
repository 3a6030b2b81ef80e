"""Room that a session turns out to need: planes of parameters that were frozen, gradients of several backwards, and gradients that must wait.

Note [Homes of gradients]
    With `step="in_backward"` a gradient is used as it arrives and rests nowhere: its unit has no home. Those that must wait until the backward
    ends (Note [Updates in backward]) are the ones that a trace of the forward shows in their plane: they get homes before that forward runs.
    Where there is no trace, any may have to wait, and all of them get homes. What is kept although no trace has shown it gets its home then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from patrickstar.core.formats import Formats, SessionFormats
from patrickstar.core.layout import Layout, Run
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, GradientUse, PlaneRef
from patrickstar.core.trace import Phase, Touch, Trace
from patrickstar.memory.interruptions import InterruptionsPutOff
from patrickstar.plan.fit import Need, expect_room, name_gradients
from patrickstar.plan.placement import place_gradients, place_more
from patrickstar.plan.residency import Residency, slots_of
from patrickstar.plan.touches import update_touches
from patrickstar.step.executor import Executor

_WIDE = 4  # bytes of an element in fp32
_Homes = dict[PlaneRef, Tier]
_Slots = Mapping[PlaneRef, int]
_Grow = Callable[[Formats], Formats]


@dataclass(frozen=True, eq=False)
class LatePlanes:
    """Gives chunks planes that they have not had, or wider ones. What fits no budget is refused before anything has changed.

    Attributes:
        gradients: where gradients go.
        changed: is told that plans made so far are of other units, or of units of other sizes.
    """

    layout: Layout
    formats: SessionFormats
    executor: Executor
    machine: Machine
    gradients: GradientUse
    changed: Callable[[str], None]

    def open(self, homes: Mapping[PlaneRef, Tier], slots: _Slots) -> None:
        """Takes in the gradients of chunks that a backward updates whole, with these homes in memory and of these sizes, until `close`."""
        new = {ref: home for ref, home in homes.items() if ref not in self.executor.store.state.home}
        with InterruptionsPutOff():
            self.executor.store.passing.update(new)
            self.executor.store.grow(new, {ref: slots[ref] for ref in new})

    def close(self, gradients: Collection[PlaneRef] | None = None) -> None:
        """Takes out what `open` has taken in, and has no contents any more. `gradients`: which of it; None: all."""
        store = self.executor.store
        wanted = store.passing if gradients is None else store.passing.intersection(gradients)
        over = sorted(filter(store.state.is_free, wanted))
        with InterruptionsPutOff():
            store.passing.difference_update(over)
            store.shrink(over)

    def with_room_for(self, trace: Trace) -> Residency:
        """The residency in which there are homes for the gradients that a forward with this trace keeps. Changes nothing.

        Raises:
            BudgetError: these gradients do not fit.
        """
        state = self.executor.store.state
        if self.gradients is GradientUse.UPDATE:
            state = Residency.of(state.snapshot())
            state.grow(*self._homes_for(trace.touched(GRAD), why=name_gradients(trace)))
        return state

    def reserve(self, trace: Trace | None, reason: str) -> None:
        """Gives homes to the gradients that a forward with this trace keeps, or to all where there is none, for this reason.

        Raises:
            BudgetError: these gradients do not fit. Nothing has changed then.
        """
        if self.gradients is not GradientUse.UPDATE:
            return
        if trace is not None:
            kept, why = trace.touched(GRAD), name_gradients(trace)
        else:
            kept = list(self.formats.now.units(self.layout, (GRAD,)))
            why = f"any of the gradients may have to wait until the backward ends: {reason}"
        self._take_in(kept, why=why)

    def reserve_for(self, name: str) -> None:
        """Gives a home to a parameter's gradient, which is about to be kept; where the plan has that next, there is room for it.

        Raises:
            BudgetError: the gradient does not fit.
        """
        if self.gradients is not GradientUse.UPDATE:
            return
        gradients = sorted({PlaneRef(part.chunk, GRAD) for part in self.layout.parts(name)})
        if self.executor.pilot.stretch.expects(gradients[0]):
            return
        state = self.executor.store.state
        # One at home on the compute tier has room only while it is kept.
        if any(
            state.home.get(ref, state.compute) is state.compute and ref not in state.taken[state.compute]
            for ref in gradients
        ):
            if self.executor.store.passing:
                # What waits in chunks may have the room that is wanted now.
                self.executor.use_what_came(f"the gradient of {name} has to wait until the backward ends")
                self.close()
            self._take_in(gradients, why=f"the gradient of {name} cannot be used as it arrives")

    def _take_in(self, kept: Collection[PlaneRef], *, why: str) -> None:
        self.close(kept)
        homes, slots = self._homes_for(kept, why=why)
        if homes:
            store = self.executor.store
            store.units.prepare(homes, slots)
            store.grow(homes, slots)
            self.changed(why)

    def _homes_for(self, kept: Collection[PlaneRef], *, why: str) -> tuple[_Homes, _Slots]:
        """Homes and sizes for those of these gradients that have no home. BudgetError: the gradients do not fit."""
        homes, slots = place_gradients(
            self.machine, kept, state=self.executor.store.state, layout=self.layout, formats=self.formats.now, why=why
        )
        self._expect_room_for_updates(homes, slots, self.formats.now)
        return homes, slots

    def thaw(self, *names: str) -> None:
        """Gives parameters that were frozen, and whatever shares their chunks, the planes for training. BudgetError: these planes do not fit."""
        if self.layout.has_frozen and self.gradients is not GradientUse.NONE:
            for name in names:
                for weight in self.layout.weight_units(name):
                    self._thaw_run(self.layout.run_of(weight.chunk), name)

    def _thaw_run(self, run: Run, name: str) -> None:
        chunks = range(run.head, run.head + run.length)
        if self.formats.now.is_trained(run.head, self.layout):
            return
        self.executor.settle()
        formats, state = self.formats.now.thaw(chunks), self.executor.store.state
        weight = PlaneRef(run.head, WEIGHT)
        units = [ref for ref in formats.units(self.layout, self.gradients.planes) if ref.chunk in chunks]
        slots = {ref: slots_of(ref, self.layout, formats) for ref in units}
        new = [ref for ref in units if slots[ref] != state.slots.get(ref)]
        homes = self._prepare(new, slots, formats)
        # An fp16 weight alone becomes the fp32 master.
        self._reform(homes, slots, keep=weight if weight in new else None, grow=partial(Formats.thaw, chunks=chunks))
        self.changed(f"{name} is trained from now on")

    def widen_gradients(self) -> None:
        """Widens gradients to fp32, in every chunk: those that have come, and those that will come. BudgetError: the wider planes do not fit."""
        self.executor.settle()
        formats, layout, state = self.formats.now, self.layout, self.executor.store.state
        gradients = [ref for ref in formats.units(layout, (GRAD,)) if formats.of(ref, layout).itemsize < _WIDE]
        factor = {ref: _WIDE // formats.of(ref, layout).itemsize for ref in gradients if ref in state.home}
        slots = {ref: state.slots[ref] * times for ref, times in factor.items()}
        homes = self._prepare(slots, slots, formats)
        for ref in gradients:
            home = {ref: homes[ref]} if ref in homes else {}
            keep = ref if home and not state.is_free(ref) else None
            self._reform(home, slots, keep=keep, grow=partial(Formats.widen, chunk=ref.chunk))
        self.changed("gradients of several backwards add up in fp32 from now on")

    def _reform(self, homes: _Homes, slots: _Slots, *, keep: PlaneRef | None, grow: _Grow) -> None:
        """Takes units in, or in another size. `keep`: the unit whose contents stay, in its new type. `grow`: gives the formats with these units."""
        executor, state = self.executor, self.executor.store.state
        with executor.apart():
            values = None
            if keep is not None:
                (unit,) = executor.use(Phase.STEP, "", (Touch(keep),))
                values = unit.clone()
            for ref in homes:
                if ref in state.home:
                    executor.store.release(ref)
            self.formats.now = grow(self.formats.now)
            executor.store.grow(homes, slots)
            if keep is not None and values is not None:
                (unit,) = executor.use(Phase.STEP, "", (Touch(keep, True),))
                unit.copy_(values)

    def _prepare(self, new: Collection[PlaneRef], slots: _Slots, formats: Formats) -> _Homes:
        """Homes for units. BudgetError where the units do not fit there, or the update of a chunk does not fit any more."""
        self._expect_room_for_updates(new, slots, formats)
        store = self.executor.store
        state = store.state
        sizes = {**state.slots, **slots}
        homes = place_more(self.machine, new, home=state.home, slots=sizes, slot_bytes=state.slot_bytes)
        store.units.prepare(homes, slots)
        return homes

    def _expect_room_for_updates(self, new: Collection[PlaneRef], slots: _Slots, formats: Formats) -> None:
        state, layout = self.executor.store.state, self.layout
        sizes = {**state.slots, **slots}
        for chunk in sorted({ref.chunk for ref in new}):
            gradient = PlaneRef(chunk, GRAD)
            beside = [Touch(gradient)] if gradient in sizes else []
            needed = sum(sizes[touch.ref] for touch in update_touches(chunk, layout, formats, *beside))
            expect_room(Need(f"step {layout.run_of(chunk).tensors[0]}", needed, state.slot_bytes, 0), self.machine)
