"""Faults of the bound on the process: fixed costs, freed blocks, holes of the heap."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

COSTS = "tests/core/test_fixed_costs.py"
BLOCKS = "tests/session/test_freed_blocks.py"
BUDGETS = "tests/session/test_budgets.py::test_from_the_floor_on_the_smallest_budget_holds_the_fixed_costs_and_is_named_as_it_is_to_be_given"
GUESS = "tests/session/test_budgets.py::test_the_budget_that_is_named_before_any_is_tried_fits_and_a_byte_less_does_not"

BOUNDS: tuple[Mutant, ...] = (
    Fault("a-budget-below-the-floor-gives-more-than-the-floor", "core.fixed_costs:FixedCosts.room_bytes").by(
        replace("min(...)", "self.given_bytes"), f"{COSTS}::test_a_larger_budget_never_gives_less_room"
    ),
    Fault("fixed-costs-have-no-share-of-the-need", "core.fixed_costs:FixedCosts.beside").by(
        returns("CONSTANT_BYTES", nth=2),
        f"{COSTS}::test_a_need_and_what_comes_beside_it_is_the_smallest_budget_that_has_room_for_it",
    ),
    Fault("a-forecast-names-a-budget-without-fixed-costs", "session.forecast:smallest_budgets").by(
        without("machine.costs.beside(needed)"), f"{GUESS}[with fixed costs]"
    ),
    Fault("chunks-on-a-device-are-no-whole-granules", "core.chunk_size:search_chunk_numel").by(
        assign("grain", "GRAIN", nth=1), "tests/core/test_chunk_size.py::test_chunks_of_a_device_are_whole_granules"
    ),
    Fault("budgets-of-another-machine-are-those-of-this-one", "session.start:set_up").by(
        without("has="), "tests/session/test_resources.py::test_weights_that_are_nowhere_are_no_memory_to_take_over"
    ),
    Fault("a-refusal-names-a-budget-without-fixed-costs", "plan.fit:expect_room").by(
        assign("fixed_bytes", "0", nth=1), BUDGETS
    ),
    Fault("freed-blocks-are-kept-whatever-a-plan-takes", "step.room:HostRoom.planned").by(
        drop("_return_at_once"),
        f"{BLOCKS}::test_a_session_in_which_chunks_fill_all_room_returns_them_from_its_first_plan",
    ),
    Fault("freed-blocks-have-the-room-of-the-worst-moment", "step.budgets:leaves_room").by(
        without("int(...)"), f"{BLOCKS}::test_a_plan_that_takes_that_room_has_them_returned_at_once_and_once"
    ),
    Fault("freed-blocks-are-kept-in-a-step-that-nobody-foresaw", "step.room:HostRoom.end").by(
        drop("_return_at_once"),
        f"{BLOCKS}::test_a_session_keeps_them_in_room_and_returns_them_from_the_first_step_that_was_not_as_planned",
    ),
    Fault("holes-of-the-heap-stay-in-use", "memory.allocator:fill_holes").by(
        never("heap_end"),
        "tests/memory/test_allocator.py::test_a_heap_with_holes_returns_what_comes_after_they_are_filled",
    ),
)
