"""Faults of tables of which only rows leave the host."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, replace, without

__all__ = ["TABLES"]

TESTS = "tests/session/test_tables.py"

TABLES: tuple[Mutant, ...] = (
    Fault("what-lookups-of-one-backward-bring-is-added-one-by-one", "step.events:Events.row_gradients").by(
        replace("self._rows.add(...)", "_; self.bring_rows()"),
        f"{TESTS}::test_lookups_of_several_forwards_add_up_in_one_backward[deferred]",
    ),
    Fault("the-last-steps-rows-stay-in-the-gradient", "step.gradients:Gradients.add_rows").by(
        assign("is_there", "True", nth=1), f"{TESTS}::test_a_gradient_takes_the_place_of_what_its_chunk_held_before"
    ),
    Fault("padding-gets-a-gradient-in-every-tile-but-the-first", "parameters.lookups:RowGradients.sums").by(
        without("first", nth=2), f"{TESTS}::test_padding_in_a_later_tile_gets_no_gradient"
    ),
    Fault("rows-that-cross-the-link-are-not-counted", "step.executor:Executor._moment").by(
        drop("move"), f"{TESTS}::test_only_rows_cross_the_link_until_the_step"
    ),
)
