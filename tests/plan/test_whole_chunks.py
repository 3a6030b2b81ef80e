"""Updates of whole chunks in a backward: after the last gradient of a chunk, where there is room; no budget has to be larger."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.fit import worst_moment
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import update_touches
from patrickstar.plan.update_choice import UpdateChoice, choose_places
from patrickstar.plan.whole_chunks import WholeChunks, update_whole_chunks
from patrickstar.tracing.live_bytes import TraceRecorder
from tests.plan.builders import PLENTY, SLOT_BYTES, layout_of, legal_plan, some

PLANES = (WEIGHT, EXP_AVG, EXP_AVG_SQ)


def at_rest(layout: Layout, compute: Tier = Tier.HOST, *, here: tuple[PlaneRef, ...] = ()) -> Residency:
    below = Tier.DISK if compute is Tier.HOST else Tier.HOST
    homes = {ref: compute if ref in here else below for ref in layout.units(PLANES)}
    return Residency.at_rest(layout, compute=compute, home=homes, formats=FP32)


def use(chunk: int, phase: Phase = Phase.BACKWARD, **more: object) -> Moment:
    return Moment(phase, f"p{chunk}", (Touch(PlaneRef(chunk, WEIGHT)),), **more)  # type: ignore[arg-type]


def arrival(chunk: int, layout: Layout, **more: object) -> Moment:
    return Moment(Phase.BACKWARD, f"p{chunk}", update_touches(chunk, layout, FP32), **more)  # type: ignore[arg-type]


def told(found: WholeChunks | None) -> list[str]:
    """The order of moments: `c0` a use, `g0` a gradient that waits, `u0` an update, `G0` a gradient that is used as it arrives."""
    assert found is not None
    texts = []
    for moment in found.trace.moments:
        chunk, planes = moment.touches[0].ref.chunk, {touch.ref.plane for touch in moment.touches}
        arrives = "g" if GRAD in planes else "G" if EXP_AVG in planes else "c"
        texts.append(f"{'u' if moment.updates is not None else arrives}{chunk}")
    return texts


class NoBytes:
    """A meter that counts nothing."""

    live = 0

    def restart_peak(self) -> int:
        return 0


def test_what_somebody_holds_as_its_gradient_updates_it_is_written_down() -> None:
    """Such a weight may not be updated then: that is no use of it, which nobody else need hold."""
    recorder, layout = TraceRecorder(NoBytes()), layout_of(1)
    for touches in (use(0).touches, arrival(0, layout).touches):
        recorder.moment(Phase.BACKWARD, "p0", touches, held=[PlaneRef(0, WEIGHT)])
    used, updated = recorder.trace().moments
    assert (used.held, updated.held) == ((), (PlaneRef(0, WEIGHT),))


def whole(
    layout: Layout, *moments: Moment, slots: int, state: Residency | None = None, **others: Any
) -> WholeChunks | None:
    return update_whole_chunks(
        Trace(moments),
        state=state or at_rest(layout),
        slots_of_gradient=lambda chunk: 1,
        capacity_bytes=slots * SLOT_BYTES,
        **others,
    )


def test_a_chunk_is_updated_after_its_last_gradient() -> None:
    layout = layout_of(1, 1)
    moments = (use(1), arrival(1, layout), arrival(1, layout), use(0), arrival(0, layout))
    found = whole(layout, *moments, slots=100)
    assert told(found) == ["c1", "g1", "g1", "u1", "c0", "g0", "u0"]
    assert found is not None
    assert (found.arrivals, found.slots) == ({1: 2, 0: 1}, {PlaneRef(1, GRAD): 1, PlaneRef(0, GRAD): 1})
    # Until the next chunk is updated, so that an update has that long.
    assert {ref.chunk: index for index, ref in found.frees} == {1: 6, 0: 6}


def test_a_gradient_goes_with_its_own_update_where_there_is_no_room_until_the_next() -> None:
    layout = layout_of(1, 1)
    moments = (arrival(1, layout), use(0), arrival(0, layout))
    assert whole(layout, *moments, slots=3) is None
    found = whole(layout, *moments, slots=4)
    assert told(found) == ["g1", "u1", "c0", "g0", "u0"]
    assert found is not None
    assert {ref.chunk: index for index, ref in found.frees} == {1: 1, 0: 4}
    later = whole(layout, *moments, slots=5)
    assert later is not None
    assert {ref.chunk: index for index, ref in later.frees} == {1: 4, 0: 4}


def test_a_chunk_without_room_in_between_is_updated_parameter_by_parameter() -> None:
    layout = layout_of(1, 1)
    tide = use(0, nonmodel_bytes=SLOT_BYTES)
    moments = (arrival(1, layout), tide, arrival(1, layout), arrival(0, layout))
    assert told(whole(layout, *moments, slots=4)) == ["G1", "c0", "G1", "g0", "u0"]
    assert told(whole(layout, *moments, slots=6)) == ["g1", "c0", "g1", "u1", "g0", "u0"]


def test_gradients_of_two_chunks_that_wait_at_once_need_room_for_both() -> None:
    layout = layout_of(1, 1)
    moments = (arrival(1, layout), arrival(0, layout), arrival(1, layout))
    assert told(whole(layout, *moments, slots=4)) == ["g1", "G0", "g1", "u1"]
    assert told(whole(layout, *moments, slots=5)) == ["g1", "g0", "u0", "g1", "u1"]


def test_a_gradient_that_must_wait_or_has_a_home_below_is_left_to_the_other_way() -> None:
    layout = layout_of(1, 1)
    kept = Moment(Phase.BACKWARD, "p1", (Touch(PlaneRef(1, GRAD), True),))
    state = at_rest(layout)
    state.grow({PlaneRef(1, GRAD): Tier.HOST}, {PlaneRef(1, GRAD): 1})
    moments = (arrival(1, layout), kept, arrival(0, layout))
    assert told(whole(layout, *moments, slots=100, state=state)) == ["G1", "g1", "g0", "u0"]
    state.grow({PlaneRef(1, GRAD): Tier.DISK}, {PlaneRef(1, GRAD): 1})
    assert told(whole(layout, arrival(1, layout), arrival(0, layout), slots=100, state=state)) == ["G1", "g0", "u0"]


def test_what_somebody_holds_when_its_last_gradient_comes_is_left_to_the_other_way() -> None:
    layout = layout_of(1, 1)
    moments = (arrival(1, layout), arrival(1, layout, held=(PlaneRef(1, WEIGHT),)), arrival(0, layout))
    assert told(whole(layout, *moments, slots=100)) == ["G1", "G1", "g0", "u0"]
    assert told(whole(layout, *moments[1::-1], moments[2], slots=100)) == ["g1", "g1", "u1", "g0", "u0"]


@st.composite
def instances(draw: st.DrawFn) -> tuple[Layout, Machine, Residency, Trace]:
    layout = layout_of(*draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    heads = [run.head for run in layout.runs]
    moments = [use(draw(st.sampled_from(heads)), Phase.FORWARD)]
    held: tuple[PlaneRef, ...] = ()
    for _ in range(draw(st.integers(1, 10))):
        sizes = {"nonmodel_bytes": draw(st.integers(0, 3 * SLOT_BYTES))}
        sizes["live_bytes"] = draw(st.integers(0, sizes["nonmodel_bytes"]))
        if draw(st.booleans()):
            moments.append(arrival(draw(st.integers(0, layout.n_chunks - 1)), layout, held=held, **sizes))
        else:
            moments.append(use(draw(st.sampled_from(heads)), held=held, **sizes))
        touched = [touch.ref for touch in moments[-1].touches]
        held = tuple(ref for ref in (*held, *touched) if draw(st.integers(0, 5)) == 0)
    trace = Trace(tuple(moments))
    compute = draw(st.sampled_from([Tier.HOST, Tier.DEVICE]))
    units = list(layout.units(PLANES))
    here = tuple(draw(st.lists(st.sampled_from(units), max_size=2, unique=True)))
    state = at_rest(layout, compute, here=here)
    budget = worst_moment(trace, start=state).nbytes + draw(st.integers(0, 8)) * SLOT_BYTES
    return layout, Machine(compute, {**dict.fromkeys((Tier.HOST, Tier.DISK), PLENTY), compute: budget}), state, trace


@some
@given(
    instance=instances(),
    prefetch=st.sampled_from([0, 2, None]),
    on_host=st.frozensets(st.integers(0, 4)),
    host_slots=st.integers(0, 3),
)
def test_the_plan_of_what_is_updated_whole_keeps_every_invariant_within_the_budget(
    instance: tuple[Layout, Machine, Residency, Trace], prefetch: int | None, on_host: frozenset[int], host_slots: int
) -> None:
    layout, machine, state, trace = instance
    if state.compute is Tier.DEVICE:
        host_bytes = (state.slots_resting[Tier.HOST] + host_slots) * SLOT_BYTES
        machine = Machine(machine.compute, {**machine.budget, Tier.HOST: host_bytes})
    choice = UpdateChoice(tier=lambda chunk: Tier.HOST if chunk in on_host else state.compute)
    found = update_whole_chunks(
        trace,
        state=state,
        slots_of_gradient=lambda chunk: 1,
        capacity_bytes=machine.budget[machine.compute],
        choose_places=partial(choose_places, machine=machine, peak_bytes=0, choice=choice),
    )
    if found is None:
        return
    updates = [moment for moment in found.trace.moments if moment.updates is not None]
    elsewhere = {moment.updates for moment in updates if moment.update_tier is Tier.HOST}
    assert elsewhere <= on_host
    assert {ref.chunk for ref, home in found.homes.items() if home is not state.compute} == (
        elsewhere if state.compute is Tier.DEVICE else set()
    )
    state.grow(found.homes, found.slots)
    for _ in range(2):
        plan = legal_plan(
            found.trace, layout=layout, machine=machine, start=state, frees=found.frees, prefetch=prefetch
        )
        state = Residency.of(plan.end)


@some
@given(instance=instances())
def test_every_gradient_that_arrives_is_used_once_and_what_waits_can_be_used_at_any_moment(
    instance: tuple[Layout, Machine, Residency, Trace],
) -> None:
    layout, machine, state, trace = instance
    capacity = machine.budget[machine.compute]
    found = update_whole_chunks(trace, state=state, slots_of_gradient=lambda chunk: 1, capacity_bytes=capacity)
    if found is None:
        return
    chosen = set(found.arrivals)
    came, until = Counter[int](), {ref.chunk: index for index, ref in found.frees}
    own = [moment for moment in found.trace.moments if moment.updates is None]
    assert [moment.label for moment in own] == [moment.label for moment in trace.moments]
    waiting: set[int] = set()
    rest = sum(state.unit_bytes(ref) for ref, home in state.home.items() if home is state.compute)
    updates = {moment.updates: moment for moment in found.trace.moments if moment.updates is not None}
    for index, moment in enumerate(found.trace.moments):
        chunk = moment.touches[0].ref.chunk
        if moment.updates is not None:
            assert came[moment.updates] == found.arrivals[moment.updates]
        elif moment.touches == (Touch(PlaneRef(chunk, GRAD), True),):
            came[chunk] += 1
            waiting.add(chunk)
            assert chunk in chosen
        held = sum(state.unit_bytes(ref) for ref in moment.held if state.home[ref] is not state.compute)
        for one in waiting:
            beside = len(waiting) * SLOT_BYTES + rest + held + moment.nonmodel_bytes
            needed = sum(
                state.unit_bytes(touch.ref)
                for touch in updates[one].touches
                if touch.ref.plane != GRAD
                and touch.ref not in moment.held
                and state.home[touch.ref] is not state.compute
            )
            assert beside + needed <= capacity
        waiting -= {one for one in waiting if until[one] == index}
    assert not waiting
    assert came == Counter(found.arrivals)
    assert updates.keys() == chosen
