"""Where every unit rests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT, PlaneRef
from patrickstar.errors import BudgetError
from patrickstar.plan.actions import Issue
from patrickstar.plan.placement import place, place_gradients, refuse_unless_homes_fit
from patrickstar.plan.residency import Residency, apply, slots_of
from tests.plan.builders import SLOT_BYTES, layout_of, some

LAYOUT = layout_of(1, 2, 1)
PLANES = (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ)
WHOLE = 4 * 4 * SLOT_BYTES


def host(nbytes: int, disk: int | None = None) -> Machine:
    return Machine(Tier.HOST, {Tier.HOST: nbytes} | ({} if disk is None else {Tier.DISK: disk}))


def device(nbytes: int, host: int, disk: int | None = None) -> Machine:
    return Machine(Tier.DEVICE, {Tier.DEVICE: nbytes, Tier.HOST: host} | ({} if disk is None else {Tier.DISK: disk}))


def on_disk(home: dict[PlaneRef, Tier]) -> list[str]:
    return [str(ref) for ref, tier in home.items() if tier is Tier.DISK]


@pytest.mark.parametrize(
    "machine", [host(WHOLE + 7), host(WHOLE + 7, WHOLE), device(WHOLE + 7, 0), device(WHOLE + 7, 0, 0)]
)
def test_what_fits_whole_beside_the_activations_is_at_home_where_it_is_used(machine: Machine) -> None:
    home = place(LAYOUT, machine, planes=PLANES, formats=FP32, nonmodel_bytes=7)
    assert home == dict.fromkeys(LAYOUT.units(PLANES), machine.compute)


@pytest.mark.parametrize(
    ("machine", "below"), [(host(WHOLE + 6, WHOLE), Tier.DISK), (device(WHOLE + 6, WHOLE), Tier.HOST)]
)
def test_one_byte_less_and_everything_rests_one_tier_below(machine: Machine, below: Tier) -> None:
    home = place(LAYOUT, machine, planes=PLANES, formats=FP32, nonmodel_bytes=7)
    assert home == dict.fromkeys(LAYOUT.units(PLANES), below)


def test_without_a_disk_everything_rests_on_the_host_or_is_refused() -> None:
    with pytest.raises(BudgetError, match="a disk below it") as refused:
        place(LAYOUT, host(WHOLE + 6), planes=PLANES, formats=FP32, nonmodel_bytes=7)
    assert refused.value.tier == "host"
    assert refused.value.needed_bytes == refused.value.smallest_bytes == WHOLE + 7


@pytest.mark.parametrize(
    ("slots_on_host", "spilled"),
    [
        (15, "c2.exp_avg_sq c3.exp_avg_sq"),  # and one to stage them through
        (11, "c0.exp_avg_sq c1.exp_avg_sq c2.exp_avg_sq c3.exp_avg_sq c2.exp_avg c3.exp_avg"),
    ],
)
def test_what_is_used_once_a_step_goes_to_disk_first_and_the_last_chunks_first(
    slots_on_host: int, spilled: str
) -> None:
    home = place(LAYOUT, device(0, slots_on_host * SLOT_BYTES, WHOLE), planes=PLANES, formats=FP32)
    assert sorted(on_disk(home)) == sorted(spilled.split())


def test_weights_go_to_disk_last() -> None:
    home = place(LAYOUT, device(0, 3 * SLOT_BYTES, WHOLE), planes=PLANES, formats=FP32)
    assert [str(ref) for ref, tier in home.items() if tier is Tier.HOST] == ["c0.weight"]


@pytest.mark.parametrize(
    ("machine", "tier"),
    [
        (host(0, WHOLE - 1), "disk"),
        (device(0, WHOLE - 1), "host"),
        (device(0, WHOLE // 2, WHOLE // 2 - 1), "disk"),
        (device(0, SLOT_BYTES, WHOLE), "host"),  # the run of two cannot be staged
    ],
)
def test_what_fits_nowhere_is_refused_by_tier(machine: Machine, tier: str) -> None:
    with pytest.raises(BudgetError) as refused:
        place(LAYOUT, machine, planes=PLANES, formats=FP32)
    assert refused.value.tier == tier
    assert refused.value.needed_bytes > refused.value.available_bytes


sizes = st.integers(0, 2 * WHOLE)


@some
@given(budgets=st.tuples(sizes, sizes, st.none() | sizes), compute=st.sampled_from([Tier.HOST, Tier.DEVICE]))
def test_a_placement_fits_the_tiers_below_and_the_smallest_budget_it_names_is_enough(
    budgets: tuple[int, int, int | None], compute: Tier
) -> None:
    top, middle, disk = budgets
    machine = host(top, disk) if compute is Tier.HOST else device(top, middle, disk)
    try:
        home = place(LAYOUT, machine, planes=PLANES, formats=FP32)
    except BudgetError as refused:
        enough = Machine(compute, {**machine.budget, Tier[refused.tier.upper()]: refused.smallest_bytes})
        try:
            place(LAYOUT, enough, planes=PLANES, formats=FP32)
        except BudgetError as again:
            assert again.tier != refused.tier  # another one may be too small as well
        return
    slots = {ref: slots_of(ref, LAYOUT, FP32) for ref in home}
    refuse_unless_homes_fit(machine, home=home, slots=slots, slot_bytes=SLOT_BYTES)


# gradients that must wait, which come later than the rest

LASTING = (WEIGHT, EXP_AVG, EXP_AVG_SQ)
TWELVE = WHOLE * 3 // 4
GRADIENTS = [PlaneRef(chunk, GRAD) for chunk in range(4)]


def resting(machine: Machine) -> Residency:
    """All but the gradients at home, below where they fit there."""
    try:
        home = place(LAYOUT, machine, planes=LASTING, formats=FP32, nonmodel_bytes=machine.budget[machine.compute])
    except BudgetError:
        home = place(LAYOUT, machine, planes=LASTING, formats=FP32)
    return Residency.at_rest(LAYOUT, compute=machine.compute, home=home, free=home, formats=FP32)


def placed(machine: Machine, kept: list[PlaneRef], state: Residency | None = None) -> list[str]:
    """Where these gradients come to rest, in order."""
    before = resting(machine) if state is None else state
    homes, slots = place_gradients(machine, kept, state=before, layout=LAYOUT, formats=FP32, why="they wait")
    assert slots == {ref: slots_of(ref, LAYOUT, FP32) for ref in homes}
    return [f"{ref} {tier.value}" for ref, tier in homes.items()]


def needed(machine: Machine, kept: list[PlaneRef], state: Residency | None = None) -> tuple[str, int]:
    """The tier that has no room for these gradients, and what it is short of."""
    with pytest.raises(BudgetError, match="they wait") as refused:
        placed(machine, kept, state)
    error = refused.value
    assert error.needed_bytes == error.smallest_bytes
    return error.tier, error.smallest_bytes - error.available_bytes


@pytest.mark.parametrize("count", [0, 1, 4])
def test_gradients_rest_below_beside_the_rest_and_take_what_they_take(count: int) -> None:
    kept, room = GRADIENTS[:count], TWELVE + count * SLOT_BYTES
    assert placed(device(0, room), kept) == [f"{ref} H" for ref in kept]
    assert placed(host(0, room), kept) == [f"{ref} K" for ref in kept]
    if count:
        assert needed(device(0, room - 1), kept) == ("host", 1)
        assert needed(host(0, room - 1), kept) == ("disk", 1)


def test_gradients_go_to_disk_only_as_far_as_the_host_has_no_room() -> None:
    one_to_stage = TWELVE + 3 * SLOT_BYTES
    homes = placed(device(0, one_to_stage, 2 * SLOT_BYTES), GRADIENTS)
    assert homes == ["c0.grad H", "c1.grad H", "c2.grad K", "c3.grad K"]
    assert needed(device(0, one_to_stage, 2 * SLOT_BYTES - 1), GRADIENTS) == ("disk", 1)


def test_gradients_beside_what_rests_on_disk_are_staged_where_it_is() -> None:
    machine = device(0, 10 * SLOT_BYTES, 8 * SLOT_BYTES)  # nine on the host, one to stage through, three on the disk
    assert placed(machine, GRADIENTS) == [f"{ref} K" for ref in GRADIENTS]
    assert needed(device(0, 10 * SLOT_BYTES, 7 * SLOT_BYTES - 1), GRADIENTS) == ("disk", 1)


def test_a_device_that_can_hold_everything_takes_gradients_that_the_host_cannot() -> None:
    assert placed(device(WHOLE, TWELVE), GRADIENTS) == [f"{ref} D" for ref in GRADIENTS]
    assert needed(device(WHOLE - 1, TWELVE), GRADIENTS) == ("host", 4 * SLOT_BYTES)
    # A disk is there to be used, as `place` has it.
    assert needed(host(WHOLE, TWELVE), GRADIENTS) == ("disk", 4 * SLOT_BYTES)


def test_where_everything_is_at_home_gradients_are_too_and_count_while_they_are_kept() -> None:
    for machine, less in (
        (host(TWELVE + 2 * SLOT_BYTES), host(TWELVE + 2 * SLOT_BYTES - 1)),
        (device(WHOLE - 2 * SLOT_BYTES, 0), None),
    ):
        state = resting(machine)
        assert set(state.home.values()) == {machine.compute}
        first, rest = GRADIENTS[:2], GRADIENTS[2:]
        assert placed(machine, first, state) == [f"{ref} {machine.compute.value}" for ref in first]
        state.grow(*place_gradients(machine, first, state=state, layout=LAYOUT, formats=FP32, why=""))
        # The first two are let go before the others come, or they are not.
        assert placed(machine, rest, state) == [f"{ref} {machine.compute.value}" for ref in rest]
        assert needed(machine, GRADIENTS, state) == (machine.compute.label, 2 * SLOT_BYTES)
        apply(state, Issue.create(first[0], machine.compute, 1))
        assert needed(machine, rest, state) == (machine.compute.label, SLOT_BYTES)
        if less is not None:
            assert needed(less, first) == (less.compute.label, 1)


def test_gradients_that_have_homes_keep_them_and_later_ones_find_room() -> None:
    machine = device(0, TWELVE + 2 * SLOT_BYTES, 3 * SLOT_BYTES)
    state = resting(machine)
    for ref, tier in zip(GRADIENTS, "HKKK"):  # a slot of the host stays free, to stage through
        assert placed(machine, [ref], state) == [f"{ref} {tier}"]
        before = dict(state.home)
        homes, slots = place_gradients(
            machine, GRADIENTS[: ref.chunk + 1], state=state, layout=LAYOUT, formats=FP32, why=""
        )
        assert list(homes) == [ref]
        assert state.home == before, "asking changes nothing"
        state.grow(homes, slots)
        assert placed(machine, GRADIENTS[: ref.chunk + 1], state) == []


def test_the_last_slot_of_the_host_is_taken_where_the_disk_has_no_room() -> None:
    assert placed(device(0, TWELVE + SLOT_BYTES, SLOT_BYTES - 1), GRADIENTS[:1]) == ["c0.grad H"]


@some
@given(
    budgets=st.tuples(sizes, sizes, st.none() | sizes),
    compute=st.sampled_from([Tier.HOST, Tier.DEVICE]),
    kept=st.lists(st.sampled_from(GRADIENTS), unique=True),
)
def test_gradients_fit_where_they_are_placed_and_the_smallest_budget_named_is_enough(
    budgets: tuple[int, int, int | None], compute: Tier, kept: list[PlaneRef]
) -> None:
    top, middle, disk = budgets
    machine = host(top, disk) if compute is Tier.HOST else device(top, middle, disk)
    try:
        state = resting(machine)
    except BudgetError:
        return
    try:
        homes, slots = place_gradients(machine, kept, state=state, layout=LAYOUT, formats=FP32, why="")
    except BudgetError as refused:
        assert refused.needed_bytes > refused.available_bytes
        tier = Tier[refused.tier.upper()]
        enough = Machine(compute, {**machine.budget, tier: refused.smallest_bytes})
        try:
            place_gradients(enough, kept, state=state, layout=LAYOUT, formats=FP32, why="")
        except BudgetError as again:
            assert again.tier != refused.tier  # another one may be too small as well
        return
    assert set(homes) == set(kept)
    state.grow(homes, slots)
    refuse_unless_homes_fit(machine, home=state.home, slots=state.slots, slot_bytes=SLOT_BYTES)
    at_home = sum(state.unit_bytes(ref) for ref, tier in state.home.items() if tier is compute)
    assert at_home <= machine.budget[compute]
