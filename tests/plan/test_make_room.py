"""What `make_room` decides: who leaves, who comes, and in which order."""

from __future__ import annotations

import pytest

from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD
from patrickstar.core.trace import Touch
from patrickstar.plan.make_room import NoRoom, make_room
from patrickstar.plan.plan import Condition
from patrickstar.plan.residency import Residency, apply
from tests.plan import texts
from tests.plan.builders import layout_of, resting, state_of
from tests.plan.texts import unit, units


def by_id(_, refs):
    return sorted(refs)


def room_for(
    state: Residency, needed: str, *, slots: int, pinned: str = "", host: int = 9, spare: int = 0
) -> list[str]:
    """The actions that `make_room` asks for with victims in order of id, having changed nothing."""
    before = state.copy()
    capacity = {Tier.HOST: host, state.compute: slots}
    touches = [texts.touch(word) for word in needed.split()]
    actions = make_room(state, touches=touches, held=units(pinned), capacity=capacity, spare_slots=spare, order=by_id)
    assert state == before
    for action in actions:
        apply(state, action)
    assert all(state.slots_used[tier] <= capacity[tier] for tier in state.taken)
    assert all(state.is_newest(touch.ref, touch.tier or state.compute) for touch in touches)
    return list(map(str, actions))


def test_what_is_resident_needs_no_action() -> None:
    assert room_for(state_of("c0.weight clean, c1.weight dirty"), "c0.weight c1.weight", slots=2) == []


def test_a_missing_unit_is_copied_and_waited_for() -> None:
    assert room_for(state_of("c0.weight away"), "c0.weight", slots=1) == ["c0.weight K>H", "c0.weight H?"]


def test_a_free_unit_is_created_not_fetched() -> None:
    state = state_of("c0.grad free")
    assert room_for(state, "c0.grad", slots=1) == ["c0.grad 0>H"]
    assert state.snapshot().condition(unit("c0.grad")) is Condition.DIRTY


def test_a_created_unit_whose_home_is_here_is_at_home() -> None:
    state = resting(layout_of(1), home=Tier.HOST, planes=[GRAD], free=units("c0.grad"))
    assert room_for(state, "c0.grad", slots=1) == ["c0.grad 0>H"]
    assert state.snapshot().condition(unit("c0.grad")) is Condition.HERE


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


def test_between_device_and_disk_a_unit_passes_through_the_host_and_stays_there() -> None:
    state = state_of("c0.weight dirty, c1.weight away", compute=Tier.DEVICE)
    assert room_for(state, "c1.weight", slots=1) == [
        "c0.weight D>H", "c0.weight H?", "c0.weight D!",
        "c1.weight K>H", "c1.weight H?", "c1.weight H>D", "c1.weight D?",
    ]  # fmt: skip
    assert str(state.snapshot()).splitlines()[1:] == ["  weight K away,dirty 0", "  weight K clean,clean 1"]


def test_a_host_with_one_slot_is_passed_through_by_one_after_another() -> None:
    state = state_of("c0.weight dirty, c1.weight away, c2.weight away", compute=Tier.DEVICE)
    assert room_for(state, "c1.weight c2.weight", slots=2, host=1) == [
        "c0.weight D>H", "c0.weight H?", "c0.weight D!",
        "c0.weight H>K", "c0.weight K?", "c0.weight H!", "c1.weight K>H", "c1.weight H?", "c1.weight H>D", "c1.weight D?",
        "c1.weight H!", "c2.weight K>H", "c2.weight H?", "c2.weight H>D", "c2.weight D?",
    ]  # fmt: skip


def test_what_the_host_has_is_not_read_from_the_disk() -> None:
    state = state_of("c0.weight away,dirty, c1.weight away,clean", compute=Tier.DEVICE)
    assert room_for(state, "c0.weight c1.weight", slots=2, host=2) == [
        "c0.weight H>D", "c1.weight H>D", "c0.weight D?", "c1.weight D?",
    ]  # fmt: skip


def test_what_is_about_to_be_read_on_the_host_stays_until_it_has_been() -> None:
    state = state_of("c0.weight away,clean, c1.weight away", compute=Tier.DEVICE)
    assert room_for(state, "c0.weight c1.weight", slots=2, host=1) == [
        "c0.weight H>D", "c0.weight D?",
        "c0.weight H!", "c1.weight K>H", "c1.weight H?", "c1.weight H>D", "c1.weight D?",
    ]  # fmt: skip


def test_dirty_copies_leave_the_host_through_the_disk_and_stale_ones_at_once() -> None:
    state = state_of("c0.weight away,dirty, c1.weight dirty,stale, c2.weight away", compute=Tier.DEVICE)
    assert room_for(state, "c2.weight", slots=2, host=1) == [
        "c1.weight H!",
        "c0.weight H>K", "c0.weight K?", "c0.weight H!", "c2.weight K>H", "c2.weight H?", "c2.weight H>D", "c2.weight D?",
    ]  # fmt: skip


def test_a_host_that_homes_have_made_smaller_gives_way_even_where_nothing_is_missing() -> None:
    state = state_of("c0.weight away,clean, c1.weight away,dirty, c2.weight clean,clean", compute=Tier.DEVICE)
    assert room_for(state, "", slots=2, host=1) == [
        "c1.weight H>K", "c0.weight H!", "c1.weight K?", "c1.weight H!",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "reads", "writes"),
    [
        ("away", "", ""),
        ("clean", "", "c0.grad D!"),
        ("dirty", "c0.grad D>H, c0.grad H?", "c0.grad D>H, c0.grad H?, c0.grad D!"),
        ("free", "c0.grad 0>H", "c0.grad 0>H"),
        ("void", "c0.grad D!, c0.grad 0>H", "c0.grad D!, c0.grad 0>H"),
        ("dirty:D>H", "c0.grad H?", "c0.grad H?, c0.grad D!"),
        ("away:H>D", "", "c0.grad D?, c0.grad D!"),
    ],
)
def test_what_must_happen_before_a_unit_is_used_on_the_host(condition: str, reads: str, writes: str) -> None:
    for touch, wanted in (("c0.grad@H", reads), ("c0.grad@H*", writes)):
        before = state_of(f"c0.grad {condition}", compute=Tier.DEVICE, home=Tier.HOST)
        assert ", ".join(room_for(before, touch, slots=1)) == wanted


@pytest.mark.parametrize(
    ("condition", "actions"),
    [
        ("away", "c0.grad K>H, c0.grad H?"),
        ("away,clean", ""),
        ("dirty", "c0.grad D>H, c0.grad H?, c0.grad D!"),
        ("dirty,stale", "c0.grad H!, c0.grad D>H, c0.grad H?, c0.grad D!"),
        ("free,stale", "c0.grad H!, c0.grad 0>H"),
        ("away:K>H", "c0.grad H?"),
        ("away,dirty:H>K", "c0.grad K?"),
    ],
)
def test_what_rests_on_the_disk_is_used_on_the_host_too(condition: str, actions: str) -> None:
    assert ", ".join(room_for(state_of(f"c0.grad {condition}", compute=Tier.DEVICE), "c0.grad@H*", slots=1)) == actions


def test_what_is_on_its_way_is_waited_for_and_not_fetched_again() -> None:
    state = state_of("c0.weight away:K>H, c1.weight dirty:H>K, c2.weight away")
    assert room_for(state, "c0.weight c1.weight", slots=2) == ["c0.weight H?"]
    assert room_for(state, "c1.weight*", slots=2) == ["c1.weight K?"]


def test_a_write_back_under_way_is_waited_for_where_its_slots_are_needed() -> None:
    state = state_of("c0.weight dirty:H>K, c1.weight away")
    assert room_for(state, "c1.weight", slots=1) == ["c0.weight K?", "c0.weight H!", "c1.weight K>H", "c1.weight H?"]


def test_what_is_still_arriving_leaves_last() -> None:
    state = state_of("c0.weight away:K>H, c1.weight clean, c2.weight away")
    assert room_for(state, "c2.weight", slots=2) == ["c1.weight H!", "c2.weight K>H", "c2.weight H?"]
    state = state_of("c0.weight away:K>H, c2.weight away")
    assert room_for(state, "c2.weight", slots=1) == ["c0.weight H?", "c0.weight H!", "c2.weight K>H", "c2.weight H?"]


def test_capacity_below_what_is_in_use_evicts_without_a_miss() -> None:
    state = state_of("c0.weight clean, c1.weight clean, c2.weight clean")
    assert room_for(state, "c1.weight", slots=1) == ["c0.weight H!", "c2.weight H!"]


def test_where_something_leaves_spare_slots_are_free_afterwards() -> None:
    begins, arrival = (
        "c0.weight clean, c1.weight clean, c2.weight clean, c3.weight away",
        ["c3.weight K>H", "c3.weight H?"],
    )
    assert room_for(state_of(begins), "c3.weight", slots=3, spare=1) == ["c0.weight H!", "c1.weight H!", *arrival]
    assert room_for(state_of(begins), "c3.weight", slots=4, spare=1) == arrival  # nothing has to leave


def test_as_many_as_can_be_where_the_rest_is_needed() -> None:
    state = state_of("c0.weight clean, c1.weight clean, c2.weight here, c3.weight away")
    leaving = room_for(state, "c3.weight", slots=3, pinned="c1.weight", spare=3)
    assert leaving == ["c0.weight H!", "c3.weight K>H", "c3.weight H?"]


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
    actions = make_room(state, touches=[Touch(unit("c1.weight"))], capacity={Tier.HOST: 2}, order=lambda *_: offered)
    assert list(map(str, actions)) == ["c0.weight H!"]


def test_no_room_says_what_is_needed_at_once() -> None:
    state = state_of("c0.weight here, c1.weight clean, c2.weight dirty, c3.weight away", slots={"c3.weight": 2})
    with pytest.raises(NoRoom) as refused:
        make_room(
            state, touches=[Touch(unit("c3.weight"))], held=units("c1.weight"), capacity={Tier.HOST: 3}, order=by_id
        )
    assert (refused.value.needed_slots, refused.value.capacity_slots) == (4, 3)  # 2 needed, 1 pinned, 1 at home here
