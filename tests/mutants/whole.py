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

WHOLE: tuple[Mutant, ...] = (
    Fault("a-slot-moves-under-an-ordinary-parameter", "memory.leases:Leases.take_part").by(
        drop("_note"), f"{FILE}::test_a_part_of_a_unit_is_found_where_it_lies"
    ),
    Fault("whole-is-chosen-one-slot-too-early", "step.budgets:Budgets.hold").by(
        replace("state_bytes + beside_bytes + self.spare_bytes", "_ - 8192"), EDGE
    ),
    Fault("the-spare-room-is-taken-by-model-states", "session.start:Setup.sizes").by(
        replace("slots * bytes_of_slot(layout, formats) + gradient_bytes", "_ - gradient_bytes"), EDGE
    ),
    Fault("a-new-shape-is-not-asked-about", "step.whole:Whole.stays").by(always("hold"), LEAVES),
    Fault("a-process-that-is-too-large-stays-so", "step.room:HostRoom.end").by(
        drop("is_short"),
        f"{FILE}::test_where_the_process_has_grown_past_its_bound_the_next_forward_is_bound_by_use",
    ),
    Fault("parameters-are-let-go-that-a-graph-holds", "step.whole:Whole._leave").by(
        never("held", nth=2), f"{HELD}[a graph]"
    ),
    Fault("a-refused-forward-leaves-parameters-bound-by-use", "step.whole:Whole._leave").by(
        drop("hold"), f"{HELD}[a view]"
    ),
    Fault("averages-that-left-are-taken-for-those-in-their-slot", "step.whole:Whole._pieces").by(
        always("all(was)"), f"{FILE}::test_averages_that_left_come_back_for_their_step"
    ),
    Fault("updates-of-different-numbers-are-one", "step.whole:Whole.update").by(
        replace("(hypers[name], steps.get(name, 0) + 1)", "(hypers[name], 1)"),
        f"{FILE}::test_a_parameter_that_is_trained_later_gets_its_averages",
    ),
    Fault("an-update-does-not-count-as-a-change", "step.whole:Whole.update").by(
        drop("stepped"),
        f"{FILE}::test_a_step_that_changes_a_weight_between_forward_and_backward_is_an_error_of_torchs",
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
        never("expected.by_chance"), f"{WAITS}[by chance]"
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
        drop("_spent"),
        f"{IN_BACKWARD}::test_gradients_are_zeroed_however_it_is_done[before the backward-by the model]",
    ),
    Fault("a-used-gradient-is-added-to", "step.training_in_backward:InBackwardTraining._arrives").by(
        never("self._spent"), REFUSED
    ),
    Fault("a-used-gradient-is-left-to-what-is-bound-by-use", "step.whole:Whole._leave").by(
        drop("used.forget"),
        f"{IN_BACKWARD}::test_so_they_are_when_an_evaluation_comes_before_they_are_zeroed",
    ),
    Fault("gradients-that-wait-take-no-room", "session.start:Setup.kept_gradients").by(
        returns("frozenset()", nth=1),
        f"{IN_BACKWARD}::test_the_smallest_budget_at_which_they_keep_their_bytes_has_room_for_gradients_that_wait[detached first-4096]",
    ),
    Fault("the-tail-of-a-tensor-is-not-updated", "optim.fused:update_all").by(
        never("body < numel"), f"{FILE}::test_tensors_whose_length_is_no_multiple_of_a_vector_are_updated_whole"
    ),
)
