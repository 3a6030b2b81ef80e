"""Faults of chunks that a backward updates whole: too early, without room, with gradients that have not come, or never."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

PLAN = "tests/plan/test_whole_chunks.py"
SESSION = "tests/session/test_whole_updates.py"
FORECAST = "tests/session/test_gradient_homes.py"
ON_HOST = "tests/session/test_host_updates.py"

WHOLE_CHUNKS: tuple[Mutant, ...] = (
    Fault("what-somebody-holds-is-updated-whole", "plan.whole_chunks:_arrivals").by(
        without("_touched(...).isdisjoint(...)"),
        f"{PLAN}::test_what_somebody_holds_when_its_last_gradient_comes_is_left_to_the_other_way",
    ),
    Fault("a-host-takes-more-gradients-of-a-backward-than-it-has-room-for", "plan.update_choice:choose_places").by(
        drop("if room < 0: ..."),
        f"{ON_HOST}::test_a_backward_updates_as_many_chunks_on_the_host_as_that_has_room_for_gradients",
    ),
    Fault("a-place-on-the-host-is-kept-when-its-gradient-is-gone", "memory.store:ChunkStore._leave_home").by(
        drop("remove"), f"{ON_HOST}::test_a_backward_updates_as_many_chunks_on_the_host_as_that_has_room_for_gradients"
    ),
    Fault("what-waits-for-its-update-has-the-room-of-what-must-be-kept", "step.late_planes:LatePlanes.reserve_for").by(
        never("passing"), f"{FORECAST}::test_a_gradient_that_must_wait_although_its_trace_had_not_shown_it_gets_room"
    ),
    Fault("a-chunk-is-updated-with-its-first-gradient", "plan.whole_chunks:update_whole_chunks").by(
        replace("-1", "0", nth=3), f"{PLAN}::test_a_chunk_is_updated_after_its_last_gradient"
    ),
    Fault("what-waits-has-no-room-to-be-used-at-any-moment", "plan.whole_chunks:_choose").by(
        replace("max(...)", "_passing(moment, state, at_home)", nth=2),
        f"{PLAN}::test_a_chunk_without_room_in_between_is_updated_parameter_by_parameter",
    ),
    Fault("gradients-that-wait-take-no-room-of-each-other", "plan.whole_chunks:_choose").by(
        assign("room", "0", nth=2), f"{PLAN}::test_gradients_of_two_chunks_that_wait_at_once_need_room_for_both"
    ),
    Fault("a-gradient-goes-before-its-update-has-had-time", "plan.whole_chunks:_choose").by(
        without("last if following is None else following"),
        f"{SESSION}::test_an_update_goes_on_beside_the_backward_until_something_needs_it",
    ),
    Fault("a-chunk-with-a-gradient-that-must-wait-is-updated-whole", "plan.whole_chunks:_arrivals").by(
        without("chunk not in kept"),
        f"{PLAN}::test_a_gradient_that_must_wait_or_has_a_home_below_is_left_to_the_other_way",
    ),
    Fault("a-gradient-that-waits-may-be-written-back", "plan.whole_chunks:_arrivals").by(
        without("state.home.get(...) is state.compute"),
        f"{PLAN}::test_a_gradient_that_must_wait_or_has_a_home_below_is_left_to_the_other_way",
    ),
    Fault("what-is-held-as-a-gradient-arrives-is-forgotten", "tracing.live_bytes:TraceRecorder.moment").by(
        assign("used", "refs"), f"{PLAN}::test_what_somebody_holds_as_its_gradient_updates_it_is_written_down"
    ),
    Fault("gradients-that-have-not-come-are-used-with-the-others", "step.pending_step:PendingStep.pieces").by(
        returns("pieces"), f"{SESSION}::test_a_step_that_is_closed_is_about_what_has_come_alone"
    ),
    Fault("what-has-come-of-a-chunk-is-lost-when-the-plan-is-left", "step.pending_step:PendingStep.close").by(
        drop("update"), f"{SESSION}::test_what_waits_is_used_before_the_first_moment_that_the_plan_did_not_have"
    ),
    Fault("a-step-is-over-before-its-last-gradient-has-come", "step.pending_step:PendingStep.is_done").by(
        without("not self.arrivals"),
        f"{SESSION}::test_a_gradient_that_does_not_come_leaves_its_chunk_to_those_that_have",
    ),
    Fault("what-waits-stays-when-moments-are-decided-on-the-spot", "step.executor:Executor._moment").by(
        drop("use_what_came"), f"{SESSION}::test_what_waits_is_used_before_the_first_moment_that_the_plan_did_not_have"
    ),
    Fault("a-plan-waits-for-an-update-that-somebody-has-waited-for", "step.executor:Executor.settle").by(
        drop("depart"), f"{SESSION}::test_whoever_looks_in_the_middle_of_a_backward_changes_no_bit"
    ),
    Fault(
        "a-copy-that-is-held-shows-what-was-before-the-update", "step.training_in_backward:InBackwardTraining._gather"
    ).by(
        without("self.binding.changes.is_shown(...)"),
        f"{SESSION}::test_a_copy_that_is_held_while_its_gradient_arrives_shows_the_update",
    ),
    Fault(
        "a-gradient-that-is-kept-goes-with-those-that-are-used", "step.training_in_backward:InBackwardTraining.gradient"
    ).by(drop("_end_gathering"), f"{SESSION}::test_a_parameter_that_leaves_its_group_is_updated_no_more"),
    Fault(
        "a-gradient-that-comes-as-the-plan-is-left-waits-for-ever",
        "step.training_in_backward:InBackwardTraining._gather",
    ).by(drop("pending"), f"{SESSION}::test_a_plan_that_is_left_because_a_unit_is_held_loses_no_gradient"),
    Fault(
        "what-a-failed-update-has-left-stays-for-ever", "step.training_in_backward:InBackwardTraining.forget_unfinished"
    ).by(drop("release"), f"{SESSION}::test_a_kernel_that_raises_leaves_weights_of_no_one_step_which_is_said"),
    Fault("gradients-that-waited-keep-homes", "step.stretches:Stretches.end").by(
        drop("close"), f"{SESSION}::test_chunks_are_updated_whole_in_the_order_in_which_their_last_gradients_come"
    ),
    Fault("a-forecast-knows-of-no-chunk-that-is-updated-whole", "session.paper_run:PaperRun._forward").by(
        assign("whole", "False"), f"{FORECAST}::test_a_forecast_has_the_peaks_and_the_moves_of_a_run"
    ),
)
