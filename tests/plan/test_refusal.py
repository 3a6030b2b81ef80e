"""What a refusal says adds up to the last printed digit, and what it says fits does fit."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.core.machine import Tier
from patrickstar.plan.refusal import refuse_homes, refuse_moment
from patrickstar.units import GIB, MIB, parse_size
from tests.plan.builders import some

sizes = st.integers(0, 1 << 44)


def printed(text: str, what: str) -> float:
    return float(re.search(rf"{what} ([\d.]+) [KMGT]?i?B", text)[1])


@some
@given(slots=st.integers(1, 10**6), slot_bytes=st.integers(1, 1 << 24), nonmodel=sizes, data=st.data())
def test_the_numbers_of_a_moment_add_up(slots: int, slot_bytes: int, nonmodel: int, data: st.DataObject) -> None:
    needed = slots * slot_bytes + nonmodel
    budget = data.draw(st.integers(0, needed - 1))
    error = refuse_moment(
        tier=Tier.DEVICE,
        moment="118 backward layers.7.mlp.w1",
        slot_bytes=slot_bytes,
        slots=slots,
        nonmodel_bytes=nonmodel,
        budget_bytes=budget,
        smallest_bytes=needed,
    )
    text = str(error)
    total = printed(text, "needed")
    assert round(total - printed(text, "slots") - printed(text, "activations"), 6) == 0
    assert round(total - printed(text, "budget") - printed(text, "is"), 6) == 0
    suggested = re.search(r"device_memory >= ([\d.]+ \w+)", text)[1].replace(" ", "")
    assert parse_size(suggested, name="device_memory") >= needed - 1  # parse_size rounds down to whole bytes
    assert (error.needed_bytes, error.available_bytes, error.smallest_bytes) == (needed, budget, needed)


def test_a_moment_that_does_not_fit_reads_as() -> None:
    error = refuse_moment(
        tier=Tier.DEVICE,
        moment="118 backward layers.7.mlp.w1",
        slot_bytes=4 * MIB,
        slots=1920,
        nonmodel_bytes=23 * GIB // 4,
        budget_bytes=12 * GIB,
        smallest_bytes=53 * GIB // 4,
    )
    assert str(error) == (
        "device memory is 1.25 GiB short at moment 118 backward layers.7.mlp.w1\n"
        "  needed 13.25 GiB = chunk slots 7.50 GiB (1920 of 4.00 MiB) + activations 5.75 GiB;  budget 12.00 GiB\n"
        "  fits with: device_memory >= 13.25 GiB  |  activations of at most 4.50 GiB there: a smaller batch, or recompute"
    )


@some
@given(parts=st.lists(sizes, min_size=1, max_size=3), data=st.data())
def test_the_numbers_of_a_tier_add_up(parts: list[int], data: st.DataObject) -> None:
    needed = sum(parts)
    budget = data.draw(st.integers(0, needed))
    named = {f"part{chr(97 + i)}": nbytes for i, nbytes in enumerate(parts)}
    error = refuse_homes(tier=Tier.DISK, parts=named, budget_bytes=budget, smallest_bytes=needed)
    text = str(error)
    assert round(printed(text, "needed") - sum(printed(text, name) for name in named), 6) == 0
    assert round(printed(text, "needed") - printed(text, "budget") - printed(text, "is"), 6) == 0
    assert (error.tier, error.needed_bytes, error.available_bytes) == ("disk", needed, budget)
