"""Faults of the planner, which the planner's own checks and tests must find without a tensor."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["PLANNING"]

RESIDENCY = "tests/plan/test_residency.py"
ROOM_TESTS = "tests/plan/test_room.py"
MAKE = "tests/plan/test_make.py"
ROOM = "capacity_slots = (budget_bytes - moment.nonmodel_bytes) // slot_bytes"

PLANNING: tuple[Mutant, ...] = (
    Mutant(
        name="the-last-valid-copy-is-dropped",
        file="plan/room.py",
        old="if state.resident[ref] is CLEAN:\n            ends.append",
        new="if True:\n            ends.append",
        tests=(f"{ROOM_TESTS}::test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused",),
    ),
    Mutant(
        name="dropping-the-last-valid-copy-is-legal",
        file="plan/residency.py",
        old="(copy is DIRTY and not state.staged.get(ref, False))",
        new="False",
        tests=(f"{RESIDENCY}::test_an_illegal_action_is_refused_by_number_and_changes_nothing",),
    ),
    Mutant(
        name="the-check-of-plans-lets-the-last-valid-copy-go",
        file="plan/check.py",
        old="if newest and version == newest and not any(self.held.get((ref, other)) == newest for other in Tier):",
        new="if False:",
        tests=("tests/plan/test_check.py::test_4_a_dirty_copy_is_dropped_without_write_back",),
    ),
    Mutant(
        name="a-unit-is-planned-to-be-used-before-its-wait",
        file="plan/room.py",
        old="ends.append(Wait(ref, compute))",
        new="pass",
        tests=(f"{ROOM_TESTS}::test_a_missing_unit_is_copied_and_waited_for",),
    ),
    Mutant(
        name="a-slot-is-given-back-before-its-write-back-has-read-it",
        file="plan/room.py",
        old="ends += [Wait(ref, home), Drop(ref, compute, slots)]",
        new="ends += [Drop(ref, compute, slots), Wait(ref, home)]",
        tests=(f"{ROOM_TESTS}::test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused",),
    ),
    Mutant(
        name="a-unit-at-home-here-is-evicted",
        file="plan/room.py",
        old="state.resident.get(ref, HERE) is not HERE and",
        new="ref in state.resident and",
        tests=(f"{ROOM_TESTS}::test_an_order_may_offer_what_may_not_go_and_nothing_twice_counts",),
    ),
    Mutant(
        name="a-pinned-unit-is-evicted",
        file="plan/room.py",
        old="keep.update(dict.fromkeys(pinned))",
        new="pass",
        tests=(f"{ROOM_TESTS}::test_needed_and_pinned_units_are_never_victims",),
    ),
    Mutant(
        name="a-write-of-the-trace-does-not-make-dirty",
        file="plan/make.py",
        old="if touch.writes:",
        new="if False:",
        tests=(f"{MAKE}::test_plans_chain_over_steps_with_gradients_released_between",),
    ),
    Mutant(
        name="the-planned-budget-is-off-by-one-slot",
        file="plan/make.py",
        old=ROOM,
        new=f"{ROOM} + 1",
        tests=(f"{MAKE}::test_a_plan_keeps_every_invariant_or_is_refused_for_a_reason",),
    ),
    Mutant(
        name="activations-are-no-part-of-the-budget",
        file="plan/make.py",
        old=ROOM,
        new="capacity_slots = budget_bytes // slot_bytes",
        tests=(f"{MAKE}::test_space_that_activations_take_is_given_up_before_it_is_missed",),
    ),
    Mutant(
        name="the-minimum-is-of-the-first-moment-not-the-worst",
        file="plan/fit.py",
        old="if not index or needed * slot_bytes + nonmodel_bytes > worst.nbytes:",
        new="if not index:",
        tests=("tests/plan/test_fit.py::test_the_minimum_fits_and_one_byte_less_does_not",),
    ),
    Mutant(
        name="what-is-used-next-is-evicted-first",
        file="plan/eviction.py",
        old="return lambda ref, now: -uses.after(ref, now)",
        new="return lambda ref, now: uses.after(ref, now)",
        tests=("tests/plan/test_eviction.py::test_next_use_gives_up_what_is_used_furthest_away",),
    ),
)
