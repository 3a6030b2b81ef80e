"""Where every unit rests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.formats import FP32
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT, PlaneRef
from patrickstar.errors import BudgetError
from patrickstar.plan.placement import bytes_below, place
from patrickstar.plan.residency import slots_of
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


def test_one_byte_less_and_everything_rests_one_tier_below() -> None:
    units = list(LAYOUT.units(PLANES))
    assert place(LAYOUT, host(WHOLE + 6, WHOLE), planes=PLANES, formats=FP32, nonmodel_bytes=7) == dict.fromkeys(
        units, Tier.DISK
    )
    assert place(LAYOUT, device(WHOLE + 6, WHOLE), planes=PLANES, formats=FP32, nonmodel_bytes=7) == dict.fromkeys(
        units, Tier.HOST
    )


def test_without_a_disk_everything_rests_on_the_host_or_is_refused() -> None:
    with pytest.raises(BudgetError, match="a disk below it") as refused:
        place(LAYOUT, host(WHOLE + 6), planes=PLANES, formats=FP32, nonmodel_bytes=7)
    assert (refused.value.tier, refused.value.needed_bytes, refused.value.smallest_bytes) == (
        "host",
        WHOLE + 7,
        WHOLE + 7,
    )
    with pytest.raises(BudgetError):
        place(LAYOUT, host(WHOLE - 1, 2 * WHOLE), planes=PLANES, formats=FP32, disk=False)


def test_transient_planes_do_not_count_where_nothing_lies_below() -> None:
    lasting = WHOLE * 3 // 4
    home = place(LAYOUT, host(lasting), planes=PLANES, formats=FP32, transient=[GRAD])
    assert set(home.values()) == {Tier.HOST}
    with pytest.raises(BudgetError):
        place(LAYOUT, host(lasting - 1), planes=PLANES, formats=FP32, transient=[GRAD])


@pytest.mark.parametrize(
    ("slots_on_host", "spilled"),
    [
        (15, "c2.exp_avg_sq c3.exp_avg_sq"),  # and one to stage them through
        (
            11,
            "c0.exp_avg_sq c1.exp_avg_sq c2.exp_avg_sq c3.exp_avg_sq c2.exp_avg c3.exp_avg",
        ),
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


def refusing_tier(machine: Machine) -> Tier | None:
    try:
        place(LAYOUT, machine, planes=PLANES, formats=FP32)
    except BudgetError as error:
        return Tier[error.tier.upper()]
    return None


sizes = st.integers(0, 2 * WHOLE)


@some
@given(budgets=st.tuples(sizes, sizes, st.none() | sizes), compute=st.sampled_from([Tier.HOST, Tier.DEVICE]))
def test_a_placement_fits_the_tiers_below_and_the_smallest_budget_it_names_is_enough(
    budgets: tuple[int, int, int | None], compute: Tier
) -> None:
    top, middle, disk = budgets
    machine = host(top, disk) if compute is Tier.HOST else device(top, middle, disk)
    tier = refusing_tier(machine)
    if tier is None:
        home = place(LAYOUT, machine, planes=PLANES, formats=FP32)
        slots = {ref: slots_of(ref, LAYOUT, FP32) for ref in home}
        held = bytes_below(home=home, slots=slots, slot_bytes=SLOT_BYTES, compute=compute)
        assert all(nbytes <= machine.budget.get(tier, 0) for tier, nbytes in held.items())
    else:
        with pytest.raises(BudgetError) as refused:
            place(LAYOUT, machine, planes=PLANES, formats=FP32)
        enough = Machine(compute, {**machine.budget, tier: refused.value.smallest_bytes})
        assert refusing_tier(enough) is not tier  # another one may be too small as well
