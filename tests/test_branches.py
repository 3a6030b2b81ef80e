"""`tests/branches.py` finds branches that are no longer taken, and only in lines that have not changed."""

from tests.branches import lost

BEFORE = ["if a:", "    b()", "c()", "if d:", "    e()"]


def test_a_branch_that_was_taken_and_is_not_any_more_is_lost():
    assert lost(BEFORE, set(), BEFORE, {(1, 3)}) == [(1, 3)]
    assert lost(BEFORE, {(1, 3)}, BEFORE, {(1, 3)}) == []


def test_lines_that_moved_are_followed():
    assert lost(BEFORE, {(4, 5)}, ["new()", *BEFORE], {(5, 6)}) == []
    assert lost(BEFORE, set(), ["new()", *BEFORE], {(5, 6)}) == [(5, 6)]


def test_a_branch_of_lines_that_changed_is_not_lost():
    assert lost(BEFORE, set(), ["if a and x:", *BEFORE[1:]], {(1, 3)}) == []


def test_the_exit_of_a_function_is_a_branch_too():
    assert lost(BEFORE, {(4, -1)}, BEFORE, {(4, -1)}) == []
    assert lost(BEFORE, set(), BEFORE, {(4, -1)}) == [(4, -1)]
