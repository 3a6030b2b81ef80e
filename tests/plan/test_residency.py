"""The one rule by which residency changes: what `make_room` decides, and what `apply` allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32, Formats, PlaneFormat
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan.actions import Action, Copy, Create, Drop, Wait, parse_action
from patrickstar.plan.check import check
from patrickstar.plan.plan import Plan
from patrickstar.plan.residency import (
    InvariantError,
    NoRoom,
    Residency,
    apply,
    bytes_of_slot,
    make_room,
    mark_free,
    mark_written,
    release,
    slots_of,
)
from patrickstar.plan.snapshot import CopyState
from tests.plan.builders import PLENTY, Instance, few, instances, layout_of, resting, state_of, unit, units


def room_for(state: Residency, needed: str, *, slots: int, pinned: str = "") -> list[str]:
    """The actions that `make_room` asks for with victims in order of id, having changed nothing."""
    before = state.copy()
    actions = make_room(state, needed=units(needed), pinned=units(pinned), capacity_slots=slots, order=sorted)
    assert state == before
    for action in actions:
        apply(state, action)
    state.expect_settled()
    assert state.slots_used <= slots
    assert all(ref in state.resident for ref in units(needed))
    return list(map(str, actions))


def test_what_is_resident_needs_no_action() -> None:
    assert room_for(state_of("c0.weight clean, c1.weight dirty"), "c0.weight c1.weight", slots=2) == []


def test_a_missing_unit_is_copied_and_waited_for() -> None:
    assert room_for(state_of("c0.weight away"), "c0.weight", slots=1) == ["c0.weight K>H", "c0.weight H?"]


def test_a_free_unit_is_created_not_fetched() -> None:
    state = state_of("c0.grad free")
    assert room_for(state, "c0.grad", slots=1) == ["c0.grad 0>H"]
    assert state.resident[unit("c0.grad")] is CopyState.DIRTY
    assert not state.free


def test_a_created_unit_whose_home_is_here_is_at_home() -> None:
    state = resting(layout_of(1), home=Tier.HOST, planes=[GRAD], free=units("c0.grad"))
    assert room_for(state, "c0.grad", slots=1) == ["c0.grad 0>H"]
    assert state.resident[unit("c0.grad")] is CopyState.HERE


def test_a_clean_victim_is_dropped_without_a_transfer() -> None:
    state = state_of("c0.weight clean, c1.weight away")
    assert room_for(state, "c1.weight", slots=1) == ["c0.weight H!", "c1.weight K>H", "c1.weight H?"]


def test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused() -> None:
    state = state_of("c0.weight dirty, c1.weight away")
    assert room_for(state, "c1.weight", slots=1) == [
        "c0.weight H>K", "c0.weight K?", "c0.weight H!", "c1.weight K>H", "c1.weight H?",
    ]  # fmt: skip


def test_transfers_of_a_kind_are_all_issued_before_the_first_is_waited_for() -> None:
    state = state_of("c0.weight dirty, c1.weight dirty, c2.weight away, c3.weight away")
    assert room_for(state, "c2.weight c3.weight", slots=2) == [
        "c0.weight H>K", "c1.weight H>K", "c0.weight K?", "c0.weight H!", "c1.weight K?", "c1.weight H!",
        "c2.weight K>H", "c3.weight K>H", "c2.weight H?", "c3.weight H?",
    ]  # fmt: skip


def test_between_device_and_disk_a_unit_passes_through_one_slot_set_of_the_host() -> None:
    state = state_of("c0.weight dirty, c1.weight away", compute=Tier.DEVICE)
    assert room_for(state, "c1.weight", slots=1) == [
        "c0.weight D>H", "c0.weight H?", "c0.weight D!", "c0.weight H>K", "c0.weight K?", "c0.weight H!",
        "c1.weight K>H", "c1.weight H?", "c1.weight H>D", "c1.weight D?", "c1.weight H!",
    ]  # fmt: skip


def test_capacity_below_what_is_in_use_evicts_without_a_miss() -> None:
    state = state_of("c0.weight clean, c1.weight clean, c2.weight clean")
    assert room_for(state, "c1.weight", slots=1) == ["c0.weight H!", "c2.weight H!"]


def test_needed_and_pinned_units_are_never_victims() -> None:
    state = state_of("c0.weight clean, c1.weight clean, c2.weight clean, c3.weight away")
    assert room_for(state, "c0.weight c3.weight", pinned="c1.weight", slots=3) == [
        "c2.weight H!", "c3.weight K>H", "c3.weight H?",
    ]  # fmt: skip


def test_a_pinned_unit_that_is_not_there_takes_no_room() -> None:
    assert room_for(state_of("c0.weight clean, c1.weight away"), "c0.weight", pinned="c1.weight", slots=1) == []


def test_a_void_unit_gives_its_slots_back_before_anything_else_leaves() -> None:
    state = state_of("c0.weight clean, c1.grad void, c2.weight away")
    assert room_for(state, "c2.weight", slots=2) == ["c1.grad H!", "c2.weight K>H", "c2.weight H?"]


def test_a_void_unit_that_is_needed_begins_again_from_zeros() -> None:
    assert room_for(state_of("c1.grad void"), "c1.grad", slots=1) == ["c1.grad H!", "c1.grad 0>H"]


def test_small_victims_stay_where_a_large_one_makes_their_going_needless() -> None:
    state = state_of("c0.weight clean, c1.weight clean, c2.weight away", slots={"c1.weight": 3, "c2.weight": 3})
    assert room_for(state, "c2.weight", slots=4) == ["c1.weight H! x3", "c2.weight K>H x3", "c2.weight H?"]


def test_an_order_may_offer_what_may_not_go_and_nothing_twice_counts() -> None:
    state = state_of("c0.weight clean, c1.weight clean, c2.weight here, c3.weight away")
    offered = units("c9.weight c3.weight c2.weight c1.weight c0.weight c0.weight")
    actions = make_room(state, needed=units("c1.weight"), capacity_slots=2, order=lambda _: offered)
    assert list(map(str, actions)) == ["c0.weight H!"]


def test_no_room_says_what_is_needed_at_once() -> None:
    state = state_of("c0.weight here, c1.weight clean, c2.weight dirty, c3.weight away", slots={"c3.weight": 2})
    with pytest.raises(NoRoom) as refused:
        make_room(state, needed=units("c3.weight"), pinned=units("c1.weight"), capacity_slots=3, order=sorted)
    assert (refused.value.needed_slots, refused.value.capacity_slots) == (4, 3)  # 2 needed, 1 pinned, 1 at home here


def test_writing_makes_a_clean_copy_dirty() -> None:
    state = state_of("c0.weight clean, c1.weight here")
    mark_written(state, unit("c0.weight"))
    mark_written(state, unit("c1.weight"))
    assert list(state.resident.values()) == [CopyState.DIRTY, CopyState.HERE]


@pytest.mark.parametrize("condition", ["away", "free", "void"])
def test_what_has_no_contents_here_cannot_be_written(condition: str) -> None:
    with pytest.raises(InvariantError, match=r"^\(1\)"):
        mark_written(state_of(f"c0.weight {condition}"), unit("c0.weight"))


@pytest.mark.parametrize("condition", ["clean", "dirty", "here"])
def test_release_gives_the_slots_back_without_a_transfer(condition: str) -> None:
    state = state_of(f"c0.grad {condition}")
    actions = release(state, unit("c0.grad"))
    assert list(map(str, actions)) == ["c0.grad H!"]
    apply(state, actions[0])
    assert state == state_of("c0.grad free", home=state.home[unit("c0.grad")])


@pytest.mark.parametrize("condition", ["away", "free"])
def test_release_of_what_has_no_slots_takes_no_action(condition: str) -> None:
    state = state_of(f"c0.grad {condition}")
    assert release(state, unit("c0.grad")) == []
    assert state == state_of("c0.grad free")


def test_a_transfer_pins_what_it_reads() -> None:
    state = state_of("c0.weight dirty")
    apply(state, parse_action("c0.weight H>K"))
    for touch in (mark_written, mark_free):
        with pytest.raises(InvariantError, match=r"^\(5\)"):
            touch(state, unit("c0.weight"))
    with pytest.raises(InvariantError, match=r"^\(5\)"):
        make_room(state, needed=[], capacity_slots=1, order=sorted)
    with pytest.raises(InvariantError, match=r"^\(5\)"):
        state.snapshot()


def test_a_staged_unit_must_move_on_before_a_moment() -> None:
    state = state_of("c0.weight away", compute=Tier.DEVICE)
    for action in ("c0.weight K>H", "c0.weight H?"):
        apply(state, parse_action(action))
    with pytest.raises(InvariantError, match=r"^\(9\)"):
        state.expect_settled()


@pytest.mark.parametrize(
    ("state", "action", "number"),
    [
        ("c0.weight dirty", "c0.weight H!", 4),  # the only valid copy
        ("c0.weight here", "c0.weight H!", 4),  # its home
        ("c0.weight away", "c0.weight H!", 2),  # no slots to give back
        ("c0.weight away", "c0.weight K!", 4),  # its home
        ("c0.weight free", "c0.weight K>H", 4),  # nothing to fetch
        ("c0.weight void", "c0.weight H>K", 4),  # nothing to write back
        ("c0.weight clean", "c0.weight K>H", 5),  # its slots are taken
        ("c0.weight clean", "c0.weight H?", 5),  # never issued
        ("c0.weight clean", "c0.weight 0>H", 4),  # has contents
        ("c0.weight void", "c0.weight 0>H", 5),  # its slots are taken
        ("c0.weight free", "c0.weight 0>K", 9),  # made where it is used
        ("c0.weight here", "c0.weight H>K", 9),  # rests here
        ("c0.weight clean", "c0.weight H>D", 9),  # no such tier on its way
        ("c0.weight clean", "c0.weight H! x2", 7),  # takes one slot
        ("c0.weight clean", "c1.weight H!", 9),  # no such unit
    ],
)
def test_an_illegal_action_is_refused_by_number_and_changes_nothing(state: str, action: str, number: int) -> None:
    now = state_of(state)
    with pytest.raises(InvariantError, match=rf"^\({number}\) {action[:9]}"):
        apply(now, parse_action(action))
    assert now == state_of(state)


def test_a_wider_plane_takes_several_slots() -> None:
    layout = layout_of(1, 3)
    planes = {**FP32.planes, WEIGHT: PlaneFormat("bfloat16", 2)}
    formats = Formats(planes=planes, whole=planes)
    assert bytes_of_slot(layout, formats) == 32
    assert [slots_of(ref, layout, formats) for ref in units("c0.weight c1.weight c2.exp_avg")] == [1, 3, 2]


def candidates(ref: PlaneRef, slots: int) -> list[Action]:
    """Every action there is for a unit."""
    copies = [Copy(ref, src, dst, slots) for src in Tier for dst in Tier]
    others = [(Wait(ref, tier), Drop(ref, tier, slots), Create(ref, tier, slots)) for tier in Tier]
    return [*copies, *(action for actions in others for action in actions)]


@few
@given(instance=instances(), data=st.data())
def test_apply_allows_exactly_what_the_replay_of_versions_finds_nothing_wrong_with(
    instance: Instance, data: st.DataObject
) -> None:
    # One action, and perhaps a write, per moment: what `check` finds at moments is about actions, at the end about
    # what is left in flight.
    state = instance.start.copy()
    taken: list[tuple[Action, ...]] = []
    moments: list[Moment] = []

    def violations(action: Action) -> list[str]:
        snapshot = instance.start.snapshot()
        plan = Plan(instance.layout.digest(), "any", machine, snapshot, (*taken, (action,)), snapshot)
        trace = Trace((*moments, Moment(Phase.FORWARD, "", ())))
        return [text for text in check(plan, trace, instance.layout, machine) if "the end" not in text]

    machine = Machine(state.compute, {**instance.machine.budget, state.compute: PLENTY})
    for _ in range(8):
        ref = data.draw(st.sampled_from(sorted(state.home)))
        verdicts = {}
        for action in candidates(ref, state.slots[ref]):
            after = state.copy()
            try:
                apply(after, action)
            except InvariantError:
                assert after == state
                # Two lanes may read the same bytes at once; here each unit has one transfer at a time.
                busy = isinstance(action, Copy) and ref in state.in_flight
                assert busy or violations(action), f"{action} is refused"
            else:
                assert violations(action) == [], f"{action} is allowed"
                verdicts[action] = after
        if verdicts:
            action = data.draw(st.sampled_from(list(verdicts)))
            state = verdicts[action]
            taken.append((action,))
            written = [ref for ref in state.resident if ref not in {*state.void, *state.in_flight, *state.staged}]
            touches = data.draw(st.lists(st.sampled_from(sorted(written)), max_size=1)) if written else []
            moments.append(Moment(Phase.FORWARD, "", tuple(Touch(ref, writes=True) for ref in touches)))
            for ref in touches:
                mark_written(state, ref)
