"""Faults of forecasts: of forwards that branch by chance or on their input, and of steps that differentiate a gradient."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without

__all__ = ["FORECASTS"]

VALUES = "tests/tracing/test_trial_values.py"
KNOWN = "tests/session/test_known_forwards.py"
LAYERDROP = "tests/session/test_layerdrop.py"
TWICE = "tests/session/test_double_backward.py"

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
        never("__cause__"), f"{LAYERDROP}::test_draws_until_one_is_right_cannot_be_traced"
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
    Fault(
        "smaller-shapes-do-not-know-that-the-forward-branches-by-chance", "step.stretches:Stretches._like_a_larger_one"
    ).by(without("by_chance="), f"{LAYERDROP}::test_steps_that_drop_layers_are_no_model_for_the_next"),
    Fault(
        "a-step-that-differentiates-a-gradient-takes-the-place-of-plain-ones",
        "step.known_forwards:KnownForward._course_of",
    ).by(always("differentiates"), f"{TWICE}::test_a_gradient_penalty_is_planned_from_its_second_step_on"),
    Fault(
        "a-step-that-differentiates-a-gradient-is-followed-by-another-for-ever",
        "step.known_forwards:KnownForward._course_of",
    ).by(drop("_stays_twice"), f"{TWICE}::test_a_penalty_at_some_steps_leaves_the_plan_of_the_others"),
    Fault(
        "nobody-measures-the-first-step-that-may-differentiate-a-gradient", "step.stretches:Stretches.begin_forward"
    ).by(
        without("wanted", nth=2),
        f"{TWICE}::test_a_gradient_penalty_is_planned_from_its_second_step_on[deferred-cpu+disk]",
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
)
