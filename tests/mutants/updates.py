"""Faults of updates that are done between the moments of a forward: late, twice, never, or with the numbers of another step."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without

LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
PENDING = "tests/session/test_pending_steps.py"
WEAVE = "tests/plan/test_weave.py"
STORE = "tests/memory/test_store.py"
RESIDENCY = "tests/plan/test_residency.py"
LANES = "tests/session/test_lanes.py"
HOST = "tests/session/test_host_updates.py"
RUN = "tests/memory/test_updates_of_a_run.py"

UPDATES: tuple[Mutant, ...] = (
    Fault("a-chunk-is-updated-again-by-whoever-asks-again", "step.pending_step:PendingStep.begin").by(
        replace("self.waiting.pop(...)", "self.waiting.get(chunk)"),
        f"{PENDING}::test_updates_are_part_of_the_next_forward_in_the_order_in_which_it_needs_them",
    ),
    Fault("what-the-forward-does-not-need-is-not-updated", "plan.weave:weave").by(
        replace(
            "updates.moments", "(one for one in _ if any((touch.ref in first_use for touch in one.touches)))", nth=2
        ),
        f"{WEAVE}::test_what_the_forward_does_not_need_comes_before_its_last_moment",
    ),
    Fault("an-update-comes-after-the-first-use", "plan.weave:weave").by(
        replace("(*before.get(at, ()), moment)", "(moment, *before.get(at, ()))"),
        f"{WEAVE}::test_each_update_is_there_once_before_it_is_needed_and_takes_no_more_room_than_before",
    ),
    Fault("an-update-takes-room-that-activations-need-later", "plan.weave:weave").by(
        always("room"), f"{PENDING}::test_where_an_update_fits_before_the_forward_alone_it_comes_there"
    ),
    Fault("a-gradient-arrives-before-the-last-one-is-used", "plan.weave:needs_before").by(
        without("touch.writes"), f"{WEAVE}::test_a_gradient_that_is_read_needs_no_update_and_one_that_is_written_does"
    ),
    Fault("a-use-does-not-wait-for-its-chunks-update", "plan.overlap:_Later.note").by(
        drop("_needed", nth=2), f"{WEAVE}::test_a_unit_that_is_used_is_updated_by_then"
    ),
    Fault("a-held-unit-does-not-wait-for-its-chunks-update", "plan.overlap:_Later.note").by(
        drop("update"), f"{WEAVE}::test_a_unit_that_is_held_is_updated_by_then"
    ),
    Fault("it-is-legal-to-take-the-slots-of-an-update", "plan.residency:_drop").by(
        drop("_expect_unused"), f"{RESIDENCY}::test_what_an_update_uses_stays_until_its_wait"
    ),
    Fault("a-wait-for-an-update-that-is-left-out-is-not-noticed", "plan.check:_tell").by(
        drop("for update in ...: ..."), f"{WEAVE}::test_an_update_that_nobody_waits_for_is_noticed_at_the_end"
    ),
    Fault("a-unit-leaves-before-its-update-is-over", "memory.works_under_way:WorksUnderWay._before_reading").by(
        replace("residency.before_it(...)", "[]"), f"{STORE}::test_a_transfer_of_what_an_update_writes_comes_after_it"
    ),
    Fault("bytes-are-given-out-while-they-are-updated", "memory.store:ChunkStore.tensor").by(
        never("updates_of"), f"{STORE}::test_nobody_gets_the_bytes_that_an_update_writes_before_its_wait"
    ),
    Fault("an-interrupted-update-is-not-waited-for", "memory.store:ChunkStore._land").by(
        drop("wait"), f"{PENDING}::test_an_update_that_is_under_way_ends_whole_when_the_user_interrupts"
    ),
    Fault("a-clip-factor-of-the-step-before", "step.optimizer_step:OptimizerStep.order").by(
        replace(
            "self.in_chunks.factors",
            "self.__dict__.setdefault('_kept', []).append(dict(_)) or self._kept[max(0, len(self._kept) - 2)]",
        ),
        f"{LINE}[forward backward limit(9) step zero forward backward limit(.001) read step planned(2)-fp32-emulated]",
    ),
    Fault("gradients-that-are-let-go-of-take-their-update-along", "step.executor:Executor.release").by(
        never("reads"), f"{PENDING}::test_gradients_that_are_let_go_of_are_not_written_back_and_others_stay"
    ),
    Fault("an-update-in-a-forward-is-a-change-of-what-that-has-saved", "step.optimizer_step:OptimizerStep.over").by(
        always("is_woven"),
        f"{PENDING}::test_updates_are_part_of_the_next_forward_in_the_order_in_which_it_needs_them[emulated]",
    ),
    Fault("what-departs-forgets-the-updates-that-are-left", "step.executor:Executor._update_due").by(
        replace("pending.due(touches)", "[]"),
        f"{PENDING}::test_a_forward_that_goes_another_way_has_what_it_needs_updated",
    ),
    Fault("copies-that-somebody-holds-are-not-renewed", "session.build:build_step").by(
        assign("may_weave", "lambda: True"),
        f"{LINE}[train hold(2) train(3) held(2) evaluate free train-bf16-fp32-cpu+disk]",
    ),
    Fault("what-is-updated-on-the-host-leaves-whoever-holds-it", "step.executor:Executor.update").by(
        never("tier"), f"{HOST}::test_a_weight_that_somebody_holds_is_updated_where_it_is_held"
    ),
    Fault("what-finds-no-room-on-the-host-is-updated-there", "plan.update_choice:_can_be_on_host").by(
        replace("passing <= capacity_of(...)[Tier.HOST]", "True or _"),
        f"{HOST}::test_the_rule_gives_the_device_what_finds_room_and_the_host_what_it_can_do",
    ),
    Fault("states-that-find-room-on-the-device-are-counted-once-for-all", "plan.update_choice:choose_tiers").by(
        drop("room -= states"), f"{HOST}::test_the_rule_gives_the_device_what_finds_room_and_the_host_what_it_can_do"
    ),
    Fault("a-new-gradient-comes-home-while-the-last-one-is-used-there", "plan.residency:_copy").by(
        drop("_expect_unused"), f"{RESIDENCY}::test_what_an_update_on_the_host_uses_is_not_written_over"
    ),
    Fault("an-update-is-made-in-the-callers-mode", "step.optimizer_step:OptimizerStep.work").by(
        without("self.executor.quiet()", nth=1),
        f"{PENDING}::test_an_evaluation_in_inference_mode_finds_the_model_updated",
    ),
    Fault("an-update-leaves-no-room-for-what-kernels-keep", "plan.weave:weave").by(
        assign("kept", "0"), f"{WEAVE}::test_before_the_first_moment_there_is_what_kernels_keep_as_far_as_there_is_room"
    ),
    Fault("a-forward-that-was-interrupted-is-still-under-way", "step.events:Events.before_forward").by(
        never("_caller"), f"{LANES}::test_after_an_interruption_steps_are_planned_again"
    ),
    Fault("an-update-does-not-wait-for-its-gradient", "memory.works_under_way:WorksUnderWay.begin").by(
        without("*self._before_reading(...)"),
        f"{RUN}::test_an_update_comes_after_its_gradients_way_there_which_its_wait_ends",
    ),
    Fault("a-chunk-of-a-run-comes-up-before-its-update", "memory.works_under_way:WorksUnderWay._begin_by_chunk").by(
        without("number", nth=3), f"{RUN}::test_the_weight_comes_up_chunk_by_chunk_each_after_its_own_update"
    ),
    Fault("a-gradient-is-let-go-of-though-its-update-could-not-be-done", "memory.store:ChunkStore._land").by(
        drop("want_again"), f"{RUN}::test_what_could_not_come_is_not_updated_and_stays_wanted"
    ),
    Fault("a-gradient-is-free-while-an-update-reads-it", "plan.residency:mark_free").by(
        drop("if state.updates_of(ref): ..."),
        f"{RESIDENCY}::test_a_gradient_may_be_on_its_way_to_its_update_which_is_its_wait",
    ),
    Fault("an-update-may-begin-before-its-gradient-is-on-its-way", "plan.residency:_update").by(
        replace("state.is_arriving(...)", "True"),
        f"{RESIDENCY}::test_a_gradient_may_be_on_its_way_to_its_update_which_is_its_wait",
    ),
    Fault("an-updates-wait-is-not-that-of-its-gradient", "plan.residency:ended_by").by(
        without("*before"), f"{RESIDENCY}::test_a_gradient_that_is_wanted_is_where_its_update_was"
    ),
    Fault("older-contents-of-a-gradient-on-their-way-are-not-noticed", "plan.check:_History.use").by(
        never("_writer", nth=1), f"{WEAVE}::test_a_gradient_on_its_way_has_the_last_contents"
    ),
    Fault("what-departs-decides-as-if-no-update-were-under-way", "plan.pilot:Pilot._make_room").by(
        drop("for wait in waits: ..."),
        f"{PENDING}::test_a_forward_that_goes_another_way_has_what_it_needs_updated[cpu+disk]",
    ),
    Fault("slots-of-a-gradient-stay-where-there-are-not-enough", "plan.overlap:_Overlap._drop_late").by(
        without("self._free.enough_from(...) > index"),
        f"{WEAVE}::test_slots_of_a_gradient_go_when_its_update_is_over_if_nothing_needs_them_before",
    ),
    Fault("updates-of-a-run-wait-for-each-other", "plan.overlap:_Later.note").by(
        always("tier", nth=2), f"{WEAVE}::test_updates_of_a_run_do_not_wait_for_each_other"
    ),
    Fault("a-gradient-goes-down-before-all-of-it-has-been-added-up", "step.stretches:Stretches._plan").by(
        assign("is_last", "kind is StretchKind.TRAINING and True", nth=1),
        f"{HOST}::test_a_gradient_goes_down_once_a_step_when_all_of_it_has_been_added_up",
    ),
    Fault("what-is-held-begins-to-go-down", "plan.overlap:_Overlap._descend").by(
        assign("at", "max(len(moments) - self._ahead, self._written.get(ref, -1) + 1, 0)"),
        f"{WEAVE}::test_what_is_held_until_the_end_does_not_begin_to_go_down",
    ),
    Fault("what-will-be-written-elsewhere-is-kept-for-its-next-use", "plan.eviction:Uses.after").by(
        returns("used if used < NEVER else self._after.get(ref, NEVER)", nth=2),
        "tests/plan/test_eviction.py::test_a_copy_that_is_written_elsewhere_before_its_next_use_is_worth_nothing",
    ),
    Fault("of-what-is-leaving-what-was-used-last-goes-first", "plan.eviction:Uses.by_next_use").by(
        returns("-now - NEVER", nth=1),
        "tests/plan/test_eviction.py::test_of_what_will_be_written_elsewhere_or_goes_down_what_was_used_longest_ago_goes_first",
    ),
    Fault("the-norm-fetches-what-has-gone-down", "step.stretches:Stretches.begin_norm").by(
        assign("trace", "trace"), f"{HOST}::test_the_norm_is_read_where_gradients_are_and_fetches_none"
    ),
)
