"""Free slots over ranges of moments, against a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patrickstar.plan.overlap import FreeSlots
from tests.plan.builders import some

sizes = st.sampled_from([1, 5, 47, 48, 49, 96, 150])


@some
@given(size=sizes, data=st.data())
def test_ranges_change_and_are_searched_as_those_of_a_list(size: int, data: st.DataObject) -> None:
    plain = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    free = FreeSlots(plain)
    for _ in range(data.draw(st.integers(1, 12))):
        first, end = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        slots = data.draw(st.integers(-3, 3))
        free.add(slots, first, end)
        plain = [value + slots * (first <= moment < end) for moment, value in enumerate(plain)]
        first, end = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        wanted = data.draw(st.integers(-4, 8))
        least = next((at for at in range(first, end + 1) if all(value >= wanted for value in plain[at:end])), end)
        assert free.enough_from(wanted, first, end) == least
