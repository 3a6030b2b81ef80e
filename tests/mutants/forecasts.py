"""Faults of forecasts: of forwards that branch by chance or on their input, and of steps that differentiate a gradient."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without

VALUES = "tests/tracing/test_trial_values.py"
AGAIN = "tests/tracing/test_trial_operations.py"
KNOWN = "tests/session/test_known_forwards.py"
LAYERDROP = "tests/session/test_layerdrop.py"
HOOKS = "tests/session/test_hooks_of_users.py::test_a_hook_is_called_as_in_plain_pytorch"
SHOWS = "tests/session/test_trial_runs.py::test_a_trial_run_shows_to_nobody"
NAMED = "tests/session/test_named_budgets.py::test_the_budget_that_the_first_step_named_is_enough_for_every_step"
TWICE = "tests/session/test_double_backward.py"
GENERATE = "tests/session/test_generate.py"

FORECASTS: tuple[Mutant, ...] = (
    Fault("a-layer-that-may-be-dropped-is-dropped-in-the-forecast", "tracing.offline:OfflineTracer.foresee").by(
        replace("max", "min"), f"{LAYERDROP}::test_a_forecast_keeps_the_layers_that_may_be_dropped[compared-0.9]"
    ),
    Fault("only-the-likely-draw-is-tried", "tracing.offline:_EXTREMES").by(
        assign("_EXTREMES", "()"), f"{LAYERDROP}::test_a_forecast_keeps_the_layers_that_may_be_dropped[compared-0.9]"
    ),
    Fault("every-draw-is-as-small-as-it-can-be", "tracing.trial_values:KnownValues._drawn_number").by(
        replace("self._quantile", "0.0", nth=1), f"{LAYERDROP}::test_so_it_is_where_the_draws_of_all_layers_come_first"
    ),
    Fault("a-trial-run-that-does-not-end-is-left-out-of-the-forecast", "tracing.offline:OfflineTracer._try_extreme").by(
        never("__cause__"), f"{LAYERDROP}::test_the_reason_says_why_a_step_was_not_planned"
    ),
    Fault("a-value-outlives-what-is-written-over-it", "tracing.trial_values:KnownValues._forget_written").by(
        drop("pop"), f"{VALUES}::test_what_is_written_without_a_value_has_none"
    ),
    Fault("what-is-written-with-drawn-numbers-does-not-count-as-drawn", "tracing.trial_values:KnownValues._follow").by(
        drop("drawn", nth=2), f"{VALUES}::test_drawn_numbers_make_what_they_are_written_to_drawn"
    ),
    Fault("a-trial-run-writes-to-the-callers-input", "tracing.trial_values:KnownValues.know").by(
        replace("real.as_strided(...).clone()", "real.as_strided((numel,), (1,), 0)"),
        f"{VALUES}::test_the_callers_tensors_are_not_written_to",
    ),
    Fault("memory-without-contents-has-values", "tracing.trial_values:KnownValues._follow").by(
        without("func.overloadpacket in _UNDEFINED"), f"{VALUES}::test_other_values_are_unknown"
    ),
    Fault("a-step-that-dropped-layers-is-a-model-for-the-next", "step.known_forwards:KnownForward.learn").by(
        never("by_chance"),
        f"{KNOWN}::test_steps_that_took_other_branches_are_no_model_however_many",
        f"{LAYERDROP}::test_steps_that_drop_layers_are_no_model_for_the_next",
    ),
    Fault("smaller-shapes-do-not-know-that-the-forward-branches-by-chance", "step.known_forwards:like_a_larger_one").by(
        without("by_chance="), f"{LAYERDROP}::test_steps_that_drop_layers_are_no_model_for_the_next"
    ),
    Fault(
        "a-step-that-differentiates-a-gradient-takes-the-place-of-plain-ones",
        "step.known_forwards:KnownForward._course_of",
    ).by(always("makes_graph"), f"{TWICE}::test_a_gradient_penalty_is_planned_from_its_second_step_on"),
    Fault(
        "a-step-that-differentiates-a-gradient-is-followed-by-another-for-ever",
        "step.known_forwards:KnownForward._course_of",
    ).by(drop("_stays_twice"), f"{TWICE}::test_a_penalty_at_some_steps_leaves_the_plan_of_the_others"),
    Fault(
        "nobody-measures-the-first-step-that-may-differentiate-a-gradient", "step.stretches:Stretches.begin_forward"
    ).by(
        without("wanted", nth=2),
        f"{TWICE}::test_a_gradient_penalty_is_planned_from_its_second_step_on[cpu+disk-deferred]",
    ),
    Fault("every-backward-with-gradients-on-makes-a-graph", "torch_private:backward_makes_graph").by(
        returns("torch.is_grad_enabled() and backward_id() != -1"),
        "tests/test_torch_private.py::test_nor_does_one_make_a_graph_that_recomputes_with_gradients_on",
    ),
    Fault("every-backward-that-keeps-its-graph-makes-another", "torch_private:backward_makes_graph").by(
        without("torch.is_grad_enabled()"),
        f"{TWICE}::test_a_backward_that_recomputes_or_keeps_its_graph_differentiates_none",
    ),
    Fault("what-a-module-keeps-of-a-forward-is-copied-with-its-history", "tracing.offline:_twin_of").by(
        never("grad_fn"),
        "tests/session/test_forecasts.py::test_the_first_step_is_foreseen_or_known_not_to_be[weight-norm-hook]",
    ),
    Fault("a-trial-run-calls-hooks", "tracing.side_effects:drop_hooks").by(
        never("_computes"), f"{HOOKS}[forward-roomy-after manage]"
    ),
    Fault("a-trial-run-drops-the-hooks-that-compute-weights", "tracing.side_effects:_computes").by(
        without("isinstance(...)"), f"{SHOWS}[old spectral norm-roomy]"
    ),
    Fault("a-trial-run-calls-hooks-of-all-modules", "tracing.side_effects:drop_hooks").by(
        replace("MethodType(...)", "module._call_impl"), f"{HOOKS}[of every module, forward-roomy-after manage]"
    ),
    Fault("a-trial-run-calls-hooks-of-tensors", "tracing.side_effects:HooklessTensors.__torch_function__").by(
        drop("return RemovableHandle(OrderedDict())"), f"{HOOKS}[of a tensor-roomy-after manage]"
    ),
    Fault("a-trial-run-calls-the-model-where-a-function-holds-it", "tracing.side_effects:CopiedFunctions.__init__").by(
        drop("_copy"), f"{SHOWS}[state in a closure-roomy]"
    ),
    Fault("a-trial-run-is-under-modes-of-the-users", "torch_private:without_modes").by(
        without("_disable_current_modes()"), f"{SHOWS}[flops-roomy]"
    ),
    Fault("a-trial-run-is-part-of-a-profile", "torch_private:unprofiled").by(
        replace("False", "True"), f"{SHOWS}[a profile-roomy]"
    ),
    Fault("a-trial-run-calls-hooks-of-saved-tensors", "tracing.offline:OfflineTracer._run").by(
        never("saves_on_cpu"), f"{SHOWS}[a recomputed model-roomy]"
    ),
    Fault("torch-takes-what-a-trial-run-warns-of-for-said", "tracing.side_effects:_unwarned").by(
        drop("set_warn_always", nth=1),
        "tests/session/test_trial_runs.py::test_what_torch_warns_of_once_is_left_for_the_step",
    ),
    Fault("the-copy-of-a-trial-run-waits-for-a-collection-of-everything", "plan.make:garbage_waits").by(
        drop("disable"), "tests/session/test_trial_runs.py::test_a_trial_run_leaves_no_copy_of_the_model_in_memory"
    ),
    Fault("where-anomalies-are-detected-nothing-is-foreseen", "tracing.trial_values:KnownValues.value_for").by(
        replace("checks_for_nan()", "False"), f"{SHOWS}[anomalies-roomy]"
    ),
    Fault("the-first-refusal-forgets-what-comes-with-the-first-update", "step.forwards:KnownForwards._foresee").by(
        assign("trained", "False"), NAMED
    ),
    Fault("a-step-that-has-run-is-refused", "step.forwards:KnownForwards._as_it_ran").by(
        returns("recorded", nth=2), NAMED
    ),
    Fault("a-loss-is-foreseen-as-one-number", "tracing.trial_operations:result_of").by(
        never("ndim"),
        "tests/session/test_forecasts.py::test_a_loss_is_foreseen_with_the_memory_that_it_keeps[mse_loss]",
    ),
    Fault("operands-of-all-shapes-are-alike", "tracing.trial_operations:_describe").by(
        without("value.shape"), f"{AGAIN}::test_the_trace_is_that_of_operations_that_are_all_left_to_torch[views-use]"
    ),
    Fault("equal-operands-of-other-types-are-alike", "tracing.trial_operations:_describe").by(
        without("type(value)"), f"{AGAIN}::test_operands_that_are_equal_and_of_other_types_are_others"
    ),
    Fault("an-operand-of-another-form-is-taken-for-what-it-was", "tracing.trial_operations:TrialOperations._first").by(
        without("_key(func, args, kwargs)[0] == key"),
        f"{AGAIN}::test_what_changes_the_form_or_the_memory_of_an_operand_is_done_each_time",
    ),
    Fault(
        "an-operand-over-other-memory-is-taken-for-what-it-was", "tracing.trial_operations:TrialOperations._first"
    ).by(
        without("[*map(_memory, tensors)] == memory"),
        f"{AGAIN}::test_what_changes_the_form_or_the_memory_of_an_operand_is_done_each_time",
    ),
    Fault("a-view-has-memory-of-its-own", "tracing.trial_operations:_made").by(
        never("_memory"),
        f"{AGAIN}::test_the_trace_is_that_of_operations_that_are_all_left_to_torch[a stack-use]",
    ),
    Fault("what-lies-in-more-memory-has-as-much-as-it-shows", "tracing.trial_operations:_Made.again").by(
        never("nbytes"), f"{AGAIN}::test_a_number_in_the_memory_of_several_has_that_each_time"
    ),
    Fault("conjugates-are-plain", "tracing.trial_operations:_is_plain").by(
        without("tensor.is_conj()"), f"{AGAIN}::test_a_conjugate_is_one_each_time"
    ),
    Fault("a-cache-is-planned-for-as-it-is-now", "tracing.inputs:bounded").by(
        replace("sorted(...)", "[past]"),
        f"{GENERATE}::test_a_step_is_neither_traced_nor_planned_anew_and_fetches_a_block_that_moves_once",
    ),
    Fault("what-is-in-a-cache-is-in-no-forecast", "tracing.offline:OfflineTracer._run").by(
        drop("note"), f"{GENERATE}::test_what_is_foreseen_at_the_bound_is_what_a_forward_takes_there[Llama]"
    ),
    Fault("what-is-in-a-cache-is-not-metered", "step.stretches:Stretches._begin").by(
        drop("note"), f"{GENERATE}::test_what_is_foreseen_at_the_bound_is_what_a_forward_takes_there[Llama]"
    ),
    Fault("a-window-has-the-memory-of-all-that-has-passed", "tracing.inputs:CacheAt.copied").by(
        replace("(more - 1, 1)", "(more,)"),
        f"{GENERATE}::test_what_is_foreseen_at_the_bound_is_what_a_forward_takes_there[windows]",
    ),
    Fault("a-cache-whose-bound-does-not-fit-is-refused", "step.forwards:KnownForwards.expect").by(
        always("is_own", nth=2), f"{GENERATE}::test_what_does_not_fit_is_refused_before_its_forward_computes"
    ),
)
