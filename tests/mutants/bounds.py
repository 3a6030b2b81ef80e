"""Faults of the bound on the process: fixed costs, freed blocks, holes of the heap."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BOUNDS"]

COSTS = "tests/core/test_fixed_costs.py"
BLOCKS = "tests/session/test_freed_blocks.py"
BUDGETS = "tests/session/test_budgets.py::test_from_the_floor_on_the_smallest_budget_holds_the_fixed_costs_and_is_named_as_it_is_to_be_given"

BOUNDS: tuple[Mutant, ...] = (
    Mutant(
        name="a-budget-below-the-floor-gives-more-than-the-floor",
        file="core/fixed_costs.py",
        old="min(self.given_bytes, self._most_below)",
        new="self.given_bytes",
        tests=(f"{COSTS}::test_a_larger_budget_never_gives_less_room",),
    ),
    Mutant(
        name="fixed-costs-have-no-share-of-the-need",
        file="core/fixed_costs.py",
        old="return CONSTANT_BYTES + -(-need_bytes * _PERCENT // 100)",
        new="return CONSTANT_BYTES",
        tests=(f"{COSTS}::test_a_need_and_what_comes_beside_it_is_the_smallest_budget_that_has_room_for_it",),
    ),
    Mutant(
        name="a-forecast-names-a-budget-without-fixed-costs",
        file="session/smallest.py",
        old="needed + machine.costs.beside(needed)",
        new="needed",
        tests=(BUDGETS,),
    ),
    Mutant(
        name="chunks-on-a-device-are-no-whole-granules",
        file="core/chunk_size.py",
        old="grain = max(GRAIN, granule_numel)",
        new="grain = GRAIN",
        tests=("tests/core/test_chunk_size.py::test_chunks_of_a_device_are_whole_granules",),
    ),
    Mutant(
        name="budgets-of-another-machine-are-those-of-this-one",
        file="session/forecast.py",
        old="absent_bytes=absent, has=has)",
        new="absent_bytes=absent)",
        tests=("tests/session/test_resources.py::test_weights_that_are_nowhere_are_no_memory_to_take_over",),
    ),
    Mutant(
        name="a-refusal-names-a-budget-without-fixed-costs",
        file="plan/fit.py",
        old="fixed_bytes = machine.costs.beside(need.nbytes)",
        new="fixed_bytes = 0",
        tests=(BUDGETS,),
    ),
    Mutant(
        name="freed-blocks-are-kept-whatever-a-plan-takes",
        file="step/freed_blocks.py",
        old="if self._kept and not self._leaves_room(plan, trace, layout):",
        new="if False:",
        tests=(f"{BLOCKS}::test_a_session_in_which_chunks_fill_all_room_returns_them_from_its_first_plan",),
    ),
    Mutant(
        name="freed-blocks-have-the-room-of-the-worst-moment",
        file="step/freed_blocks.py",
        old="simulated.peak[compute.label] + int(trace.peak * found.overshoots)",
        new="simulated.peak[compute.label]",
        tests=(f"{BLOCKS}::test_a_plan_that_takes_that_room_has_them_returned_at_once_and_once",),
    ),
    Mutant(
        name="freed-blocks-are-kept-in-a-step-that-nobody-foresaw",
        file="step/stretches.py",
        old="""            self._freed_blocks.return_at_once(f"the {stretch.kind} was not as planned")
""",
        new="            pass\n",
        tests=(
            f"{BLOCKS}::test_a_session_keeps_them_in_room_and_returns_them_from_the_first_step_that_was_not_as_planned",
        ),
    ),
    Mutant(
        name="holes-of-the-heap-stay-in-use",
        file="memory/allocator.py",
        old="            taken += nbytes\n            continue\n",
        new="            pass\n",
        tests=("tests/memory/test_allocator.py::test_a_heap_with_holes_returns_what_comes_after_they_are_filled",),
    ),
)
