"""Faults of the planner, which the planner's own checks and tests must find without a tensor."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["PLANNING"]

RESIDENCY = "tests/plan/test_residency.py"
ROOM_TESTS = "tests/plan/test_room.py"
MAKE = "tests/plan/test_make.py"
OVERLAP = "tests/plan/test_overlap.py"
DISK = "tests/plan/test_overlap_disk.py"
REPEATS = "tests/plan/test_repeats.py"
ROOM = "slots = (machine.budget[compute] - moment.nonmodel_bytes) // state.slot_bytes"

PLANNING: tuple[Mutant, ...] = (
    Mutant(
        name="what-an-update-still-uses-leaves-the-host",
        file="plan/overlap_disk.py",
        old="            by_unit.pop(ref, None)\n",
        new="            pass\n",
        tests=(f"{DISK}::test_updates_on_the_host_have_what_they_use_until_they_are_over",),
    ),
    Mutant(
        name="more-is-read-ahead-than-the-host-has-room-for",
        file="plan/overlap_disk.py",
        old="                self._free.add(-read.slots, at, index)\n",
        new="",
        tests=(f"{DISK}::test_no_more_is_read_ahead_than_the_host_has_slots_for",),
    ),
    Mutant(
        name="what-is-read-ahead-has-no-room-at-the-moment-that-needs-it",
        file="plan/overlap_disk.py",
        old="            if max(before) + read.slots > self._capacity:\n",
        new="            if False:\n",
        tests=(f"{DISK}::test_what_goes_down_at_the_moment_itself_has_its_slots_there",),
    ),
    Mutant(
        name="what-is-written-on-the-host-is-written-back-before",
        file="plan/overlap_disk.py",
        old="if touch.writes or touch.tier is Tier.HOST",
        new="if False",
        tests=(
            f"{OVERLAP}::test_so_do_those_of_plans_that_use_units_on_the_host",
            f"{DISK}::test_what_only_the_host_has_is_written_back_after_its_last_use_and_leaves_halfway",
        ),
    ),
    Mutant(
        name="what-came-during-a-step-stays-when-it-is-over",
        file="plan/make.py",
        old="is_end = repeats and",
        new="is_end = False and",
        tests=(f"{REPEATS}::test_what_came_during_a_step_leaves_at_its_last_moment_though_there_is_room",),
    ),
    Mutant(
        name="what-was-there-when-a-step-began-is-worth-no-more-than-the-rest",
        file="plan/make.py",
        old="goes_down=frozenset(goes_down), stays=stays))",
        new="goes_down=frozenset(goes_down)))",
        tests=(f"{REPEATS}::test_after_some_plans_the_next_repeat_themselves_at_the_same_price",),
    ),
    Mutant(
        name="what-leaves-anyway-is-chosen-again-to-make-room",
        file="plan/room.py",
        old=" and ref not in victims and ref not in gone:",
        new=" and ref not in victims:",
        tests=(f"{REPEATS}::test_what_the_last_moment_needs_besides_what_leaves_is_taken_from_what_was_there",),
    ),
    Mutant(
        name="what-the-last-moment-lets-go-is-brought-home-before-it",
        file="plan/make.py",
        old=".difference(stays, done))",
        new=".difference(stays))",
        tests=(f"{REPEATS}::test_what_is_let_go_at_the_end_is_not_written_back_first",),
    ),
    Mutant(
        name="steps-never-come-to-repeat-each-other",
        file="step/stretches.py",
        old="repeats=must_repeat(earlier,",
        new="repeats=must_repeat(0,",
        tests=("tests/session/test_repeated_steps.py::test_backwards_that_update_come_to_repeat_themselves",),
    ),
    Mutant(
        name="the-last-valid-copy-is-dropped",
        file="plan/staging.py",
        old="        elif state.is_dirty(ref, compute):\n            self._take_down(ref)",
        new="",
        tests=(f"{ROOM_TESTS}::test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused",),
    ),
    Mutant(
        name="dropping-the-last-valid-copy-is-legal",
        file="plan/residency.py",
        old="    if newest == _ALONE[tier]:",
        new="    if False:",
        tests=(f"{RESIDENCY}::test_an_illegal_action_is_refused_by_number_and_changes_nothing",),
    ),
    Mutant(
        name="the-check-of-plans-lets-the-last-valid-copy-go",
        file="plan/check.py",
        old="if was_last and not any(map(self._is_last, Tier)):",
        new="if False:",
        tests=("tests/plan/test_check.py::test_4_a_dirty_copy_is_dropped_without_write_back",),
    ),
    Mutant(
        name="a-unit-is-planned-to-be-used-before-its-wait",
        file="plan/staging.py",
        old="self._round.into_ends.append(Wait(ref, compute))",
        new="pass",
        tests=(f"{ROOM_TESTS}::test_a_missing_unit_is_copied_and_waited_for",),
    ),
    Mutant(
        name="a-slot-is-given-back-before-its-write-back-has-read-it",
        file="plan/staging.py",
        old="self._round.out_ends.append(Wait(ref, state.compute.below))",
        new="self._round.onward.append(Wait(ref, state.compute.below))",
        tests=(f"{ROOM_TESTS}::test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused",),
    ),
    Mutant(
        name="a-unit-at-home-here-is-evicted",
        file="plan/room.py",
        old=" and home[ref] is not compute and",
        new=" and",
        tests=(f"{ROOM_TESTS}::test_an_order_may_offer_what_may_not_go_and_nothing_twice_counts",),
    ),
    Mutant(
        name="a-pinned-unit-is-evicted",
        file="plan/room.py",
        old="keep = {**needed, **dict.fromkeys(held)}",
        new="keep = needed",
        tests=(f"{ROOM_TESTS}::test_needed_and_pinned_units_are_never_victims",),
    ),
    Mutant(
        name="a-write-of-the-trace-does-not-make-dirty",
        file="plan/residency.py",
        old="        if touch.writes:",
        new="        if False:",
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
        new="slots = machine.budget[compute] // state.slot_bytes",
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
        old="return -uses.after(ref, now) +",
        new="return uses.after(ref, now) +",
        tests=("tests/plan/test_eviction.py::test_next_use_gives_up_what_is_used_furthest_away",),
    ),
    Mutant(
        name="a-host-touch-leaves-the-devices-copy-current",
        file="plan/residency.py",
        old="        state.newest[ref] = _ALONE[here]\n        for",
        new="        if tier is None:\n            state.newest[ref] = _ALONE[here]\n        for",
        tests=(f"{RESIDENCY}::test_writing_on_one_tier_leaves_nothing_current_on_another",),
    ),
    Mutant(
        name="a-plan-leaves-the-devices-copy-of-what-the-host-writes",
        file="plan/staging.py",
        old="        if is_here and writes:",
        new="        if False:",
        tests=(f"{ROOM_TESTS}::test_what_must_happen_before_a_unit_is_used_on_the_host",),
    ),
    Mutant(
        name="what-is-newer-on-the-device-is-used-on-the-host",
        file="plan/staging.py",
        old="            self._take_down(ref)\n        else:",
        new="            pass\n        else:",
        tests=(f"{ROOM_TESTS}::test_what_must_happen_before_a_unit_is_used_on_the_host",),
    ),
    Mutant(
        name="copies-on-the-host-are-no-part-of-its-budget",
        file="plan/staging.py",
        old="            self._make_host_room(state.slots[ref])",
        new="            pass",
        tests=("tests/plan/test_host_touches.py::test_plans_keep_every_invariant_in_tight_tiers",),
    ),
    Mutant(
        name="what-only-the-host-has-leaves-it-without-a-transfer",
        file="plan/staging.py",
        old="        if not state.is_newest(ref, Tier.DISK) and flight != (Tier.HOST, Tier.DISK):",
        new="        if False:",
        tests=(f"{ROOM_TESTS}::test_dirty_copies_leave_the_host_through_the_disk_and_stale_ones_at_once",),
    ),
    Mutant(
        name="what-is-on-its-way-is-fetched-again",
        file="plan/room.py",
        old=" and landing.get(ref) is not compute",
        new="",
        tests=(f"{ROOM_TESTS}::test_what_is_on_its_way_is_waited_for_and_not_fetched_again",),
    ),
    Mutant(
        name="a-unit-that-is-written-again-is-written-back-early",
        file="plan/overlap.py",
        old="begins = self._not_pinned(ref, max(index - self._ahead, self._written.get(ref, -1) + 1, 0))",
        new="begins = max(index - self._ahead, 0)",
        tests=(f"{OVERLAP}::test_a_write_back_begins_after_the_last_write_and_ends_halfway_to_the_use_of_its_slots",),
    ),
    Mutant(
        name="a-drop-comes-before-the-wait-of-its-write-back",
        file="plan/overlap.py",
        old="[Wait(ref, self._below), Drop(ref, self._compute, slots)]",
        new="[Drop(ref, self._compute, slots), Wait(ref, self._below)]",
        tests=(f"{OVERLAP}::test_a_write_back_begins_after_the_last_write_and_ends_halfway_to_the_use_of_its_slots",),
    ),
    Mutant(
        name="what-comes-early-takes-slots-that-others-use",
        file="plan/free_slots.py",
        old="                    if self._free[moment] + added < slots:",
        new="                    if False:",
        tests=(f"{OVERLAP}::test_room_that_activations_take_meanwhile_is_not_used",),
    ),
    Mutant(
        name="what-leaves-goes-while-it-is-used",
        file="plan/overlap.py",
        old="max(index - self._ahead, pins[before - 1] + 1 if before else 0, 0)",
        new="max(index - self._ahead, 0)",
        tests=(f"{OVERLAP}::test_what_leaves_clean_leaves_after_its_last_use_where_its_slots_are_taken_early",),
    ),
    Mutant(
        name="a-unit-is-fetched-before-it-has-left",
        file="plan/overlap.py",
        old="first = max(index - self._ahead, self._last_issue, self._since.get(ref, 0))",
        new="first = max(index - self._ahead, self._last_issue)",
        tests=(f"{OVERLAP}::test_what_is_written_on_the_host_comes_after_that",),
    ),
    Mutant(
        name="transfers-are-earlier-than-they-may-be",
        file="plan/overlap.py",
        old="first = max(index - self._ahead, self._last_issue, self._since.get(ref, 0))",
        new="first = max(index - self._ahead - 1, 0, self._last_issue, self._since.get(ref, 0))",
        tests=(f"{OVERLAP}::test_no_more_moments_ahead_than_are_allowed",),
    ),
    Mutant(
        name="a-flight-is-forgotten-at-the-end-of-a-stretch",
        file="plan/residency.py",
        old="self.newest, self.taken, self.in_flight)",
        new="self.newest, self.taken)",
        tests=("tests/plan/test_host_touches.py::test_what_is_under_way_as_a_plan_begins_is_waited_for_once",),
    ),
    Mutant(
        name="the-check-of-plans-forgets-transfers-that-are-under-way-at-the-end",
        file="plan/check.py",
        old="            if end.in_flight.get(ref) != (src, tier):",
        new="            if False:",
        tests=("tests/plan/test_check.py::test_5_the_last_transfer_is_never_waited_for",),
    ),
)
