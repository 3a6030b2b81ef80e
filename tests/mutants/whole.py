"""Faults of parameters that keep their bytes: what moves under them, what is not noticed of them, and when they are let go."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns

FILE = "tests/session/test_whole.py"
LEAVES = f"{FILE}::test_from_the_first_forward_on_that_does_not_fit_they_are_bound_by_use"
FITS = f"{FILE}::test_under_a_budget_that_holds_all_model_states_parameters_keep_their_bytes[emulated]"
HELD = f"{FILE}::test_a_forward_for_which_they_would_have_to_move_is_refused_while_they_are_held"
GIVEN = f"{FILE}::test_values_given_by_hand_are_taken_over_at_a_forward_at_a_step_and_on_reading"
IN_BACKWARD = "tests/session/test_whole_in_backward.py"
WAITS = f"{IN_BACKWARD}::test_a_gradient_waits_for_the_end_of_the_backward_where_it_must_and_nowhere_else"
REFUSED = f"{IN_BACKWARD}::test_a_refused_forward_leaves_used_gradients_what_they_are"
EDGE = f"{FILE}::test_the_smallest_budget_at_which_they_keep_their_bytes_holds_all_of_it"

USED = f"{IN_BACKWARD}::test_a_backward_that_uses_what_it_has_updated_is_refused_and_waits_from_then_on"
SIXTEEN = "tests/session/test_whole_sixteen.py"
LOST = f"{SIXTEEN}::test_from_the_first_forward_on_that_does_not_fit_nothing_of_it_is_lost"
LINE = "tests/session/test_scripts.py::test_so_it_does_where_parameters_keep_their_bytes"
SEVERAL = f"{LINE}[deferred-2[forward backward] grad(0) grad(0)+=0 grad(7)+=0 read step zero train-bf16-unbounded]"
CLIPPED = f"{LINE}[deferred-forward backward limit(9) step zero forward backward limit(.001) read step planned(2)-bf16-unbounded]"

WHOLE: tuple[Mutant, ...] = (
    Fault("a-slot-moves-under-an-ordinary-parameter", "memory.leases:Leases.take_part").by(
        returns("tensor"), f"{FILE}::test_a_part_of_a_unit_is_found_where_it_lies"
    ),
    Fault("whole-is-chosen-one-slot-too-early", "step.budgets:Budgets.hold").by(
        replace("state_bytes + beside_bytes + self.spare_bytes", "_ - 8192"), EDGE
    ),
    Fault("the-spare-room-is-taken-by-model-states", "session.start:Setup.sizes").by(
        replace("slots * bytes_of_slot(layout, formats) + beside_bytes", "_ - beside_bytes"), EDGE
    ),
    Fault("a-new-shape-is-not-asked-about", "step.whole:Whole.stays").by(always("hold"), LEAVES),
    Fault("a-process-that-is-too-large-stays-so", "step.room:HostRoom.end").by(
        drop("is_short"), f"{FILE}::test_where_the_process_has_grown_past_its_bound_the_next_forward_is_bound_by_use"
    ),
    Fault("parameters-are-let-go-that-a-graph-holds", "step.whole:Whole._leave").by(
        never("held", nth=2), f"{HELD}[a graph]"
    ),
    Fault("a-refused-forward-leaves-parameters-bound-by-use", "step.whole:Whole._leave").by(
        drop("hold"), f"{HELD}[a view]"
    ),
    Fault("averages-that-left-are-taken-for-those-in-their-slot", "step.optimizer_step:OptimizerStep._pieces").by(
        replace("known[0].items() <= slots.items()", "True"),
        f"{FILE}::test_averages_that_left_for_what_nobody_foresaw_come_back_for_their_step_and_weights_stay",
    ),
    Fault("updates-of-different-numbers-are-one", "step.optimizer_step:OptimizerStep._update_together").by(
        replace("(hypers[name], steps.get(name, 0) + 1)", "(hypers[name], 1)"),
        f"{FILE}::test_a_parameter_that_is_trained_later_gets_its_averages",
    ),
    Fault("an-update-does-not-count-as-a-change", "step.optimizer_step:OptimizerStep._update_together").by(
        drop("stepped"), f"{FILE}::test_a_step_that_changes_a_weight_between_forward_and_backward_is_an_error_of_torchs"
    ),
    Fault("memory-given-by-hand-is-not-noticed", "parameters.whole_parameters:WholeParameters.take_back").by(
        drop("_take_value"), GIVEN
    ),
    Fault("memory-of-another-shape-is-taken-over", "parameters.whole_parameters:WholeParameters._take_value").by(
        never("value.shape"), GIVEN
    ),
    Fault("what-is-given-by-hand-is-not-looked-for-on-reading", "session.parts:Parts.begin_access").by(
        drop("take_back"), GIVEN
    ),
    Fault(
        "what-is-given-by-hand-is-not-looked-for-at-a-step", "session.optimizer_target:OptimizerTarget.step_groups"
    ).by(drop("take_back"), f"{FILE}::test_a_step_updates_the_values_that_were_given_by_hand"),
    Fault(
        "a-parameter-that-is-frozen-no-more-has-no-planes", "parameters.whole_parameters:WholeParameters.take_back"
    ).by(drop("thawed"), f"{FILE}::test_a_parameter_that_is_trained_later_gets_its_averages"),
    Fault("a-forked-child-has-no-weights", "memory.unit_bytes:UnitBytes.part").by(
        drop("inherit"), f"{FILE}::test_a_forked_child_has_the_weights_of_the_time_of_the_fork"
    ),
    Fault("a-part-is-taken-for-the-start-of-its-unit", "memory.leases:Leases.take_part").by(
        assign("start_bytes", "0"), f"{FILE}::test_a_part_of_a_unit_is_found_where_it_lies"
    ),
    Fault("a-managed-model-is-managed-again", "parameters.whole_parameters:manager_of").by(
        returns("None", nth=2), f"{FILE}::test_a_second_session_over_the_model_or_a_part_of_it_is_refused"
    ),
    Fault("gradients-from-before-go-where-no-step-looks", "parameters.binding:Binding.__init__").by(
        drop("stay_put"), f"{FILE}::test_gradients_from_before_are_used_and_left[bounded]"
    ),
    Fault("a-part-of-a-gradient-is-used-as-all-of-it", "step.whole:Whole.may_update").by(
        replace("name not in self.kept", "True"), f"{WAITS}[re-entrant twice]"
    ),
    Fault("a-weight-changes-under-a-view-of-it", "step.whole:Whole.may_update").by(
        replace("has_views(...)", "False"),
        f"{IN_BACKWARD}::test_views_that_anybody_holds_keep_their_values_until_the_backward_ends",
    ),
    Fault("what-a-forward-may-do-by-chance-is-taken-for-what-it-does", "step.whole:Whole.stays").by(
        replace("expected.by_chance or self.binding.access.is_surprised", "self.binding.access.is_surprised"),
        f"{WAITS}[by chance]",
    ),
    Fault("a-gradient-stays-when-it-is-used", "step.training_in_backward:InBackwardTraining._update").by(
        drop("used.put"),
        f"{IN_BACKWARD}::test_a_gradient_is_there_for_hooks_of_users_and_gone_before_the_next_one_comes[unbounded]",
    ),
    Fault("a-gradient-is-gone-before-hooks-of-users-see-it", "parameters.gradient_access:GradientAccess._expect").by(
        never("ours"),
        f"{IN_BACKWARD}::test_a_gradient_is_there_for_hooks_of_users_and_gone_before_the_next_one_comes[unbounded]",
    ),
    Fault("nobody-asks-whether-gradients-were-zeroed", "step.training_in_backward:InBackwardTraining._arrives").by(
        drop("_spent"), f"{IN_BACKWARD}::test_gradients_are_zeroed_however_it_is_done[before the backward-by the model]"
    ),
    Fault("a-used-gradient-is-added-to", "step.training_in_backward:InBackwardTraining._arrives").by(
        never("self._spent"), REFUSED
    ),
    Fault("a-used-gradient-is-left-to-what-is-bound-by-use", "step.whole:Whole._leave").by(
        drop("used.forget"), f"{IN_BACKWARD}::test_so_they_are_when_an_evaluation_comes_before_they_are_zeroed"
    ),
    Fault("gradients-that-wait-take-no-room", "session.start:Setup.kept_gradients").by(
        returns("frozenset()", nth=1),
        f"{IN_BACKWARD}::test_the_smallest_budget_at_which_they_keep_their_bytes_has_room_for_gradients_that_wait[detached first-4096]",
    ),
    Fault("a-backward-uses-what-it-has-updated", "parameters.weight_access:WeightAccess.enter").by(
        drop("_expect_none_updated"), f"{USED}[changed]"
    ),
    Fault("nobody-sees-that-a-backward-uses-it", "step.training_in_backward:InBackwardTraining.gradient").by(
        drop("withhold"), f"{USED}[before_the_model]"
    ),
    Fault("a-backward-that-was-refused-once-is-refused-again", "step.whole:Whole.stays").by(
        replace("expected.by_chance or self.binding.access.is_surprised", "expected.by_chance"), f"{USED}[changed]"
    ),
    Fault(
        "a-placeholder-stays-when-the-backward-has-ended", "step.training_in_backward:InBackwardTraining._backward_ends"
    ).by(drop("give_back"), f"{IN_BACKWARD}::test_after_the_backward_parameters_are_ordinary_ones_again"),
    Fault("a-change-by-hand-leaves-the-master-of-16-bits", "parameters.changes:Changes.carry_changed").by(
        drop("to_master"),
        f"{LINE}[deferred-train hold(4) train held(4) held(4)*=2 evaluate free evaluate-bf16-unbounded]",
    ),
    Fault("an-update-is-taken-for-a-change-by-hand", "parameters.changes:Changes.renew").by(
        drop("copy_"), f"{LINE}[deferred-train(4) planned(4)-bf16-unbounded]"
    ),
    Fault("a-master-is-read-without-a-look", "step.values:Weights.pieces").by(
        drop("look"), f"{LINE}[deferred-train unseen(2) read train unseen(2) forward backward step-bf16-unbounded]"
    ),
    Fault("a-copy-computes-with-what-was-written", "parameters.whole_parameters:WholeParameters.take_back").by(
        drop("look"), f"{SIXTEEN}::test_a_weight_that_is_widened_shows_what_was_written_until_the_next_forward"
    ),
    Fault("several-backwards-add-up-in-16-bits", "step.training_deferred:SixteenBitGradients.comes").by(
        drop("_put_in_chunk"), SEVERAL
    ),
    Fault("a-part-of-a-gradient-is-added-as-another-backwards", "step.training_deferred:SixteenBitGradients.comes").by(
        drop("raise StateError(...)"), f"{SIXTEEN}::test_parts_that_no_trace_shows_are_refused_in_a_second_backward"
    ),
    Fault("gradients-that-come-in-parts-stay-whole", "tracing.offline:OfflineTracer._why_by_use").by(
        returns("''", nth=2),
        f"{SIXTEEN}::test_gradients_that_come_in_parts_add_up_in_16_bits_first[2-gradients of 16 bits come in parts]",
    ),
    Fault("a-factor-is-rounded-to-16-bits", "step.training_deferred:DeferredTraining.multiply").by(
        drop("put_in_chunks"), CLIPPED
    ),
    Fault("a-gradient-that-the-model-zeroed-is-used", "step.training_deferred:SixteenBitGradients.take_back").by(
        drop("take_back"),
        f"{LINE}[deferred-forward backward step zero(each) read forward backward step zero(each) planned(2) step-fp16-unbounded]",
    ),
    Fault("half-a-backward-is-taken-for-one", "step.training_deferred:SixteenBitGradients.take_back").by(
        never("not ..."), f"{SIXTEEN}::test_an_exception_in_a_second_backward_leaves_gradients_that_are_to_be_zeroed"
    ),
    Fault("a-gradient-in-fp32-is-not-rounded", "step.training_deferred:SixteenBitGradients.arrived").by(
        never("kept.itemsize"),
        f"{LINE}[deferred-grad(0) forward backward grad(0) step grad(0) zero grad(0)-bf16-fp32-unbounded]",
    ),
    Fault("a-gradient-changed-by-hand-is-rounded", "step.training_deferred:SixteenBitGradients.make_fit").by(
        drop("make_fit"),
        f"{LINE}[deferred-forward backward grad(0)*=.5 grad(3)+=.1 step zero forward backward step-bf16-fp32-unbounded]",
    ),
    Fault("gradients-of-16-bits-are-the-users-own-once-parameters-move", "step.whole:Whole._leave").by(
        drop("leaving"), f"{LOST}[]"
    ),
    Fault("a-change-by-hand-is-lost-once-parameters-move", "step.whole:Whole._leave").by(drop("look"), f"{LOST}[]"),
    Fault("what-is-kept-beside-weights-takes-no-room", "session.start:Setup.sizes").by(
        drop("beside_bytes", nth=2), f"{SIXTEEN}::test_the_smallest_budget_has_room_for_all_that_is_kept_beside_weights"
    ),
    Fault("the-tail-of-a-tensor-is-not-updated", "optim.reference:update_all_fused").by(
        never("body < numel"), f"{FILE}::test_a_tensor_of_any_length_is_updated_wholly[no multiple of a vector]"
    ),
)
