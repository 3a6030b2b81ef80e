"""Faults of the planner, which the planner's own checks and tests must find without a tensor."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

RESIDENCY = "tests/plan/test_residency.py"
ROOM_TESTS = "tests/plan/test_make_room.py"
MAKE = "tests/plan/test_make.py"
OVERLAP = "tests/plan/test_overlap.py"
DISK = "tests/plan/test_overlap_disk.py"
REPEATS = "tests/plan/test_repeats.py"

PLANNING: tuple[Mutant, ...] = (
    Fault("what-an-update-still-uses-leaves-the-host", "plan.overlap:_Overlap._by_unit").by(
        drop("pop"), f"{DISK}::test_updates_on_the_host_have_what_they_use_until_they_are_over"
    ),
    Fault("more-is-read-ahead-than-the-host-has-room-for", "plan.overlap:_Overlap._arrive").by(
        drop("_free.add"), f"{DISK}::test_no_more_is_read_ahead_than_the_host_has_slots_for"
    ),
    Fault("what-is-read-ahead-has-no-room-at-the-moment-that-needs-it", "plan.overlap:_Overlap._arrive").by(
        never("_fits"), f"{DISK}::test_what_goes_down_at_the_moment_itself_has_its_slots_there"
    ),
    Fault("what-is-written-on-the-host-is-written-back-before", "plan.overlap:_Overlap._all_pins").by(
        assign("used", "[]", nth=1),
        f"{OVERLAP}::test_so_do_those_of_plans_that_use_units_on_the_host",
        f"{DISK}::test_what_only_the_host_has_is_written_back_after_its_last_use_and_leaves_halfway",
    ),
    Fault("what-came-during-a-step-stays-when-it-is-over", "plan.make:make_plan").by(
        assign("is_end", "False and index == len(trace) - 1"),
        f"{REPEATS}::test_what_came_during_a_step_leaves_at_its_last_moment_though_there_is_room",
    ),
    Fault("what-was-there-when-a-step-began-is-worth-no-more-than-the-rest", "plan.make:make_plan").by(
        without("stays="), f"{REPEATS}::test_after_some_plans_the_next_repeat_themselves_at_the_same_price"
    ),
    Fault("what-leaves-anyway-is-chosen-again-to-make-room", "plan.make_room:_choose").by(
        without("ref not in gone"),
        f"{REPEATS}::test_what_the_last_moment_needs_besides_what_leaves_is_taken_from_what_was_there",
    ),
    Fault("what-makes-room-leaves-none-for-what-comes-early", "plan.make:make_plan").by(
        without("spare_slots="), f"{OVERLAP}::test_what_makes_room_for_early_transfers_leaves_one_slot_of_eight"
    ),
    Fault("what-has-to-be-there-is-no-room-for-what-comes-early", "plan.make_room:_choose").by(
        replace("in_use > most", "in_use > wanted"),
        f"{ROOM_TESTS}::test_as_many_as_can_be_where_the_rest_is_needed",
    ),
    Fault("what-the-last-moment-lets-go-is-brought-home-before-it", "plan.make:make_plan").by(
        without("done", nth=2), f"{REPEATS}::test_what_is_let_go_at_the_end_is_not_written_back_first"
    ),
    Fault("new-plans-are-not-checked", "session.start:Setup.planner").by(
        assign("checks", "False"),
        "tests/session/test_exceptions.py::test_a_wrong_plan_is_an_error_where_plans_are_checked",
    ),
    Fault("steps-never-come-to-repeat-each-other", "plan.planner:make").by(
        assign("repeats", "must_repeat(0, trace=trace, following=after)"),
        "tests/session/test_simulation.py::test_backwards_that_update_come_to_repeat_themselves",
    ),
    Fault("the-last-valid-copy-is-dropped", "plan.make_room:Staging.evict").by(
        drop("if state.is_dirty(ref, compute): ..."),
        f"{ROOM_TESTS}::test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused",
    ),
    Fault("dropping-the-last-valid-copy-is-legal", "plan.residency:_drop").by(
        never("_ALONE"), f"{RESIDENCY}::test_an_illegal_action_is_refused_by_number_and_changes_nothing"
    ),
    Fault("the-check-of-plans-lets-the-last-valid-copy-go", "plan.check:_History._drop").by(
        never("was_last"),
        "tests/plan/test_check.py::test_a_plan_that_is_spoiled_breaks_a_rule[4 a dirty copy is dropped without write-back]",
    ),
    Fault("a-unit-is-planned-to-be-used-before-its-wait", "plan.make_room:Staging.fetch").by(
        drop("append", nth=4), f"{ROOM_TESTS}::test_a_missing_unit_is_copied_and_waited_for"
    ),
    Fault("a-slot-is-given-back-before-its-write-back-has-read-it", "plan.make_room:Staging._take_down").by(
        replace("_OUT_ENDS", "_ONWARD"),
        f"{ROOM_TESTS}::test_a_dirty_victim_is_copied_home_and_waited_for_before_its_slot_is_reused",
    ),
    Fault("a-unit-at-home-here-is-evicted", "plan.make_room:_choose.may_go").by(
        without("home[ref] is not compute"),
        f"{ROOM_TESTS}::test_an_order_may_offer_what_may_not_go_and_nothing_twice_counts",
    ),
    Fault("a-pinned-unit-is-evicted", "plan.make_room:make_room").by(
        assign("keep", "needed", nth=1), f"{ROOM_TESTS}::test_needed_and_pinned_units_are_never_victims"
    ),
    Fault("a-write-of-the-trace-does-not-make-dirty", "plan.residency:mark_moment").by(
        never("writes"), f"{MAKE}::test_plans_chain_over_steps_with_gradients_released_between"
    ),
    Fault("the-planned-budget-is-off-by-one-slot", "plan.make:make_plan").by(
        assign("capacity", "_ + 1", nth=2), f"{MAKE}::test_a_plan_keeps_every_invariant_or_is_refused_for_a_reason"
    ),
    Fault("activations-are-no-part-of-the-budget", "plan.make:make_plan").by(
        without("moment.nonmodel_bytes"), f"{MAKE}::test_space_that_activations_take_is_given_up_before_it_is_missed"
    ),
    Fault("the-minimum-is-of-the-first-moment-not-the-worst", "plan.fit:worst_moment").by(
        replace("max(needed)", "needed[0]"),
        "tests/plan/test_fit.py::test_the_minimum_fits_and_one_byte_less_does_not",
    ),
    Fault("what-is-used-next-is-evicted-first", "plan.eviction:Uses.by_next_use").by(
        replace("-self.after(...)", "self.after(ref, now)"),
        "tests/plan/test_eviction.py::test_next_use_gives_up_what_is_used_furthest_away",
    ),
    Fault("a-host-touch-leaves-the-devices-copy-current", "plan.residency:mark_written").by(
        replace("state.newest[ref] = _ALONE[here]", "if tier is None:\n    state.newest[ref] = _ALONE[here]"),
        f"{RESIDENCY}::test_writing_on_one_tier_leaves_nothing_current_on_another",
    ),
    Fault("a-plan-leaves-the-devices-copy-of-what-the-host-writes", "plan.make_room:Staging.use_on_host").by(
        never("writes"), f"{ROOM_TESTS}::test_what_must_happen_before_a_unit_is_used_on_the_host"
    ),
    Fault("what-is-newer-on-the-device-is-used-on-the-host", "plan.make_room:Staging.use_on_host").by(
        drop("_take_down"), f"{ROOM_TESTS}::test_what_must_happen_before_a_unit_is_used_on_the_host"
    ),
    Fault("copies-on-the-host-are-no-part-of-its-budget", "plan.make_room:Staging._enter_host").by(
        drop("_make_host_room"), "tests/plan/test_host_touches.py::test_plans_keep_every_invariant_in_tight_tiers"
    ),
    Fault("what-only-the-host-has-leaves-it-without-a-transfer", "plan.make_room:Staging._leave_host").by(
        never("DISK"), f"{ROOM_TESTS}::test_dirty_copies_leave_the_host_through_the_disk_and_stale_ones_at_once"
    ),
    Fault("what-is-on-its-way-is-fetched-again", "plan.make_room:make_room").by(
        without("landing.get(ref) is not compute"),
        f"{ROOM_TESTS}::test_what_is_on_its_way_is_waited_for_and_not_fetched_again",
    ),
    Fault("a-unit-that-is-written-again-is-written-back-early", "plan.overlap:_Overlap._complete_from").by(
        without("self._written.get(ref, -1) + 1"),
        f"{OVERLAP}::test_a_write_back_begins_after_the_last_write_and_ends_halfway_to_the_use_of_its_slots",
        "tests/plan/test_weave.py::test_a_gradient_goes_down_early_and_not_before_it_is_complete",
    ),
    Fault("a-drop-comes-before-the-wait-of-its-write-back", "plan.overlap:_Overlap._drop_early").by(
        replace("one.ends", "one.ends[::-1]"),
        f"{OVERLAP}::test_a_write_back_begins_after_the_last_write_and_ends_halfway_to_the_use_of_its_slots",
    ),
    Fault("what-comes-early-takes-slots-that-others-use", "plan.overlap:FreeSlots.enough_from").by(
        never("_free"), f"{OVERLAP}::test_room_that_activations_take_meanwhile_is_not_used"
    ),
    Fault("what-leaves-goes-while-it-is-used", "plan.overlap:_Overlap._unused_from").by(
        returns("max(index - self._ahead, 0)"),
        f"{OVERLAP}::test_what_leaves_clean_leaves_after_its_last_use_where_its_slots_are_taken_early",
    ),
    Fault("a-unit-is-fetched-before-it-has-left", "plan.overlap:_Overlap._arrive").by(
        assign("first", "self._last_issue"), f"{OVERLAP}::test_what_is_written_on_the_host_comes_after_that"
    ),
    Fault("transfers-are-earlier-than-they-may-be", "plan.overlap:_Overlap._arrive").by(
        assign("first", "max(index - self._ahead - 1, 0, self._last_issue)"),
        f"{OVERLAP}::test_no_more_moments_ahead_than_are_allowed",
    ),
    Fault("a-flight-is-forgotten-at-the-end-of-a-stretch", "plan.residency:Residency.snapshot").by(
        without("self.in_flight"),
        "tests/plan/test_host_touches.py::test_what_is_under_way_as_a_plan_begins_is_waited_for_once",
    ),
    Fault("the-check-of-plans-forgets-transfers-that-are-under-way-at-the-end", "plan.check:_History.end").by(
        never("src"),
        "tests/plan/test_check.py::test_a_plan_that_is_spoiled_breaks_a_rule[5 the last transfer is never waited for]",
    ),
)
