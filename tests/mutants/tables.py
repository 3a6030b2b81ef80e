"""Faults of tables of which only rows leave the host."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TABLES"]

TESTS = "tests/session/test_tables.py"

TABLES = (
    Mutant(
        name="what-lookups-of-one-backward-bring-is-added-one-by-one",
        file="step/events.py",
        old="        self._rows.add(name, ids, gradient, padding)",
        new="        self._rows.add(name, ids, gradient, padding)\n        self.bring_rows()",
        tests=(f"{TESTS}::test_lookups_of_several_forwards_add_up_in_one_backward[deferred]",),
    ),
    Mutant(
        name="the-last-steps-rows-stay-in-the-gradient",
        file="step/gradients.py",
        old="                is_there = name in self.names or tile.name in before",
        new="                is_there = True",
        tests=(f"{TESTS}::test_a_gradient_takes_the_place_of_what_its_chunk_held_before",),
    ),
    Mutant(
        name="padding-gets-a-gradient-in-every-tile-but-the-first",
        file="parameters/lookups.py",
        old="        padding = self.padding - first if",
        new="        padding = self.padding if",
        tests=(f"{TESTS}::test_padding_in_a_later_tile_gets_no_gradient",),
    ),
    Mutant(
        name="rows-that-cross-the-link-are-not-counted",
        file="step/executor.py",
        old="                store.ledger.move(*link_of_rows(touches), rows_bytes)",
        new="                pass",
        tests=(f"{TESTS}::test_only_rows_cross_the_link_until_the_step",),
    ),
)
