import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from patrickstar.core.slots import _APART, _COLD, _USED, _WARM, SlotMap


def check(slots):
    """Fails, naming the number, where an invariant at the top of `core/slots.py` does not hold."""
    states = slots._state
    assert len(states) == slots.virtual_slots, "(1)"
    assert set(states) <= {_COLD, _WARM, _USED, _APART}, "(1)"
    assert slots.in_use == states.count(_USED), f"(2) {slots.in_use} in use, {states.count(_USED)} marked"
    assert sorted(slots._warm) == [slot for slot, state in enumerate(states) if state == _WARM], "(3)"


def test_a_run_moves_by_a_slot_where_only_the_one_given_back_last_is_warm_and_a_neighbour():
    slots = SlotMap(4)
    slots.take(4)
    slots.give(0)
    slots.give(1, 3)
    assert slots.take(3) == 0


def test_adjacent_slots_are_found_between_slots_in_use():
    slots = SlotMap(9)
    for _ in range(9):
        slots.take()
    for slot in (0, 1, 3, 5, 6, 7):
        slots.give(slot)
    assert slots.can_take(3)
    assert not slots.can_take(4)
    assert slots.take(3) == 5
    with pytest.raises(LookupError, match="no 3 adjacent free slots among 9, of which 6 are in use"):
        slots.take(3)
    assert {slots.take(), slots.take(), slots.take()} == {0, 1, 3}
    assert not slots.can_take()
    with pytest.raises(LookupError):
        slots.take()


def test_trim_gives_pages_back_of_those_longest_free_first():
    slots = SlotMap(10)
    for _ in range(8):
        slots.take()
    for slot in (6, 2, 3, 4, 0):
        slots.give(slot)
    assert slots.trim(8) == []
    assert slots.trim(4) == [2, 3, 4, 6]
    assert slots.committed == 4
    assert slots.trim(0) == [0]
    assert slots.committed == slots.in_use == 3


@pytest.mark.parametrize(("first", "n"), [(3, 1), (0, 1), (1, 2), (-1, 1), (-2, 2), (2, 0), (9, 2)])
def test_giving_back_what_is_not_taken_fails(first, n):
    slots = SlotMap(10)
    slots.give(slots.take())
    taken = {slots.take(), slots.take()}
    assert taken == {0, 1}
    slots.give(0)
    before = slots.committed
    with pytest.raises(AssertionError):
        slots.give(first, n)
    check(slots)
    assert slots.committed == before


def test_an_arena_has_at_least_one_slot():
    with pytest.raises(ValueError, match="0 slots"):
        SlotMap(0)


@settings(deadline=None, max_examples=80, stateful_step_count=40)
class SlotMachine(RuleBasedStateMachine):
    """Any order of operations: who owns what and what is warm is tracked apart, and the books agree after each."""

    N = 24

    def __init__(self):
        super().__init__()
        self.slots = SlotMap(self.N)
        self.owned = {}
        self.warm = set()
        self.last_given = set()
        self.apart = set()

    def windows(self, n):
        used = {slot for first, length in self.owned.items() for slot in range(first, first + length)} | self.apart
        every = (set(range(first, first + n)) for first in range(self.N - n + 1))
        return [window for window in every if window.isdisjoint(used)]

    @rule(n=st.one_of(st.just(1), st.integers(1, 7)))
    def take(self, n):
        free = self.windows(n)
        assert self.slots.can_take(n) == bool(free)
        if not free:
            with pytest.raises(LookupError):
                self.slots.take(n)
            return
        first = self.slots.take(n)
        taken = set(range(first, first + n))
        assert taken in free
        assert len(taken & self.warm) == max(len(window & self.warm) for window in free)
        if any(window <= self.warm and window.isdisjoint(self.last_given) for window in free):
            assert taken.isdisjoint(self.last_given)
        elif any(window <= self.warm and min(window) != min(self.last_given) for window in free):
            assert first != min(self.last_given)
        self.owned[first] = n
        self.warm -= taken

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give(self, data):
        first = data.draw(st.sampled_from(sorted(self.owned)))
        n = self.owned.pop(first)
        self.slots.give(first, n)
        self.last_given = set(range(first, first + n))
        self.warm |= self.last_given

    @rule(data=st.data())
    def set_apart(self, data):
        used = {slot for first, length in self.owned.items() for slot in range(first, first + length)}
        cold = set(range(self.N)) - used - self.warm - self.apart
        if cold:
            slot = data.draw(st.sampled_from(sorted(cold)))
            self.slots.set_apart(slot)
            self.apart.add(slot)

    @precondition(lambda self: self.apart)
    @rule(data=st.data())
    def put_back(self, data):
        slot = data.draw(st.sampled_from(sorted(self.apart)))
        self.slots.put_back(slot)
        self.apart.remove(slot)

    @rule(bound=st.integers(0, N))
    def trim(self, bound):
        cooled = self.slots.trim(bound)
        assert cooled == sorted(set(cooled) & self.warm)
        self.warm -= set(cooled)
        assert len(cooled) == 0 or self.slots.committed == max(bound, self.slots.in_use)
        assert self.slots.committed <= max(bound, self.slots.in_use)

    @invariant()
    def the_books_agree(self):
        check(self.slots)
        assert self.slots.in_use == sum(self.owned.values())
        assert self.slots.committed == self.slots.in_use + len(self.warm)


test_any_order_of_operations_keeps_the_books = SlotMachine.TestCase
