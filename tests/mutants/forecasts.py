"""Faults of forecasts: of forwards that branch by chance or on their input, and of steps that differentiate a gradient."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["FORECASTS"]

VALUES = "tests/tracing/test_trial_values.py"
KNOWN = "tests/session/test_known_forwards.py"
LAYERDROP = "tests/session/test_layerdrop.py"
HOOKS = "tests/session/test_hooks_of_users.py::test_a_hook_is_called_as_in_plain_pytorch"
SHOWS = "tests/session/test_trial_runs.py::test_a_trial_run_shows_to_nobody"
NAMED = "tests/session/test_named_budgets.py::test_the_budget_that_the_first_step_named_is_enough_for_every_step"
TWICE = "tests/session/test_double_backward.py"

FORECASTS: tuple[Mutant, ...] = (
    Mutant(
        name="a-layer-that-may-be-dropped-is-dropped-in-the-forecast",
        file="tracing/offline.py",
        old="largest = max(",
        new="largest = min(",
        tests=(f"{LAYERDROP}::test_a_forecast_keeps_the_layers_that_may_be_dropped[compared-0.9]",),
    ),
    Mutant(
        name="only-the-likely-draw-is-tried",
        file="tracing/offline.py",
        old="_EXTREMES = (0.0, 1.0)",
        new="_EXTREMES = ()",
        tests=(f"{LAYERDROP}::test_a_forecast_keeps_the_layers_that_may_be_dropped[compared-0.9]",),
    ),
    Mutant(
        name="every-draw-is-as-small-as-it-can-be",
        file="tracing/trial_values.py",
        old="return low + min(self._quantile,",
        new="return low + min(0.0,",
        tests=(f"{LAYERDROP}::test_so_it_is_where_the_draws_of_all_layers_come_first",),
    ),
    Mutant(
        name="a-trial-run-that-does-not-end-is-left-out-of-the-forecast",
        file="tracing/offline.py",
        old="if isinstance(problem.__cause__, Endless):",
        new="if False:",
        tests=(f"{LAYERDROP}::test_draws_until_one_is_right_cannot_be_traced",),
    ),
    Mutant(
        name="a-value-outlives-what-is-written-over-it",
        file="tracing/trial_values.py",
        old="            self._contents.pop(tensor.untyped_storage()._cdata, None)",
        new="            pass",
        tests=(f"{VALUES}::test_what_is_written_without_a_value_has_none",),
    ),
    Mutant(
        name="what-is-written-with-drawn-numbers-does-not-count-as-drawn",
        file="tracing/trial_values.py",
        old="            self._contents[tensor.untyped_storage()._cdata].drawn |= drawn",
        new="            pass",
        tests=(f"{VALUES}::test_drawn_numbers_make_what_they_are_written_to_drawn",),
    ),
    Mutant(
        name="a-trial-run-writes-to-the-callers-input",
        file="tracing/trial_values.py",
        old="real.as_strided((numel,), (1,), 0).clone()",
        new="real.as_strided((numel,), (1,), 0)",
        tests=(f"{VALUES}::test_the_callers_tensors_are_not_written_to",),
    ),
    Mutant(
        name="memory-without-contents-has-values",
        file="tracing/trial_values.py",
        old="or func.overloadpacket in _UNDEFINED",
        new="",
        tests=(f"{VALUES}::test_other_values_are_unknown",),
    ),
    Mutant(
        name="a-step-that-dropped-layers-is-a-model-for-the-next",
        file="step/known_forwards.py",
        old="if self.by_chance and not _forward_is(course.trace or self.trace, stretch, recorded):",
        new="if False:",
        tests=(
            f"{KNOWN}::test_steps_that_took_other_branches_are_no_model_however_many",
            f"{LAYERDROP}::test_steps_that_drop_layers_are_no_model_for_the_next",
        ),
    ),
    Mutant(
        name="smaller-shapes-do-not-know-that-the-forward-branches-by-chance",
        file="step/known_forwards.py",
        old="            by_chance=self.by_chance,\n",
        new="",
        tests=(f"{LAYERDROP}::test_steps_that_drop_layers_are_no_model_for_the_next",),
    ),
    Mutant(
        name="a-step-that-differentiates-a-gradient-takes-the-place-of-plain-ones",
        file="step/known_forwards.py",
        old="        if not stretch.differentiates:\n",
        new="        if True:\n",
        tests=(f"{TWICE}::test_a_gradient_penalty_is_planned_from_its_second_step_on",),
    ),
    Mutant(
        name="a-step-that-differentiates-a-gradient-is-followed-by-another-for-ever",
        file="step/known_forwards.py",
        old="self._stays_twice = stretch.differentiates",
        new="pass",
        tests=(f"{TWICE}::test_a_penalty_at_some_steps_leaves_the_plan_of_the_others",),
    ),
    Mutant(
        name="nobody-measures-the-first-step-that-may-differentiate-a-gradient",
        file="step/stretches.py",
        old="if needed or wanted:",
        new="if needed:",
        tests=(f"{TWICE}::test_a_gradient_penalty_is_planned_from_its_second_step_on[deferred-cpu+disk]",),
    ),
    Mutant(
        name="every-backward-with-gradients-on-makes-a-graph",
        file="torch_private.py",
        old="torch._C._autograd._get_current_graph_task_keep_graph() and",
        new="",
        tests=("tests/test_torch_private.py::test_nor_does_one_make_a_graph_that_recomputes_with_gradients_on",),
    ),
    Mutant(
        name="every-backward-that-keeps-its-graph-makes-another",
        file="torch_private.py",
        old="torch.is_grad_enabled() and torch._C._autograd",
        new="torch._C._autograd",
        tests=(f"{TWICE}::test_a_backward_that_recomputes_or_keeps_its_graph_differentiates_none",),
    ),
    Mutant(
        name="what-a-module-keeps-of-a-forward-is-copied-with-its-history",
        file="tracing/offline.py",
        old="if tensor.grad_fn is not None)",
        new="if False)",
        tests=(
            "tests/session/test_forecasts.py::test_the_first_step_is_foreseen_or_known_not_to_be[weight-norm-hook]",
        ),
    ),
    Mutant(
        name="a-trial-run-calls-hooks",
        file="tracing/side_effects.py",
        old="if not _computes(hook)]",
        new="if False]",
        tests=(f"{HOOKS}[forward-cpu]",),
    ),
    Mutant(
        name="a-trial-run-drops-the-hooks-that-compute-weights",
        file="tracing/side_effects.py",
        old="isinstance(hook, _OF_TORCH) or",
        new="",
        tests=(f"{SHOWS}[old spectral norm-roomy]",),
    ),
    Mutant(
        name="a-trial-run-calls-hooks-of-all-modules",
        file="tracing/side_effects.py",
        old="MethodType(call_without_hooks_of_all_modules, module)",
        new="module._call_impl",
        tests=(f"{HOOKS}[of every module, forward-cpu]",),
    ),
    Mutant(
        name="a-trial-run-calls-hooks-of-tensors",
        file="tracing/side_effects.py",
        old="return RemovableHandle(OrderedDict())",
        new="pass",
        tests=(f"{HOOKS}[of a tensor-cpu]",),
    ),
    Mutant(
        name="a-trial-run-calls-the-model-where-a-function-holds-it",
        file="tracing/side_effects.py",
        old="                self._copy(value)",
        new="                pass",
        tests=(f"{SHOWS}[state in a closure-roomy]",),
    ),
    Mutant(
        name="a-trial-run-is-under-modes-of-the-users",
        file="torch_private.py",
        old="with _disable_current_modes():",
        new="if True:",
        tests=(f"{SHOWS}[flops-roomy]",),
    ),
    Mutant(
        name="a-trial-run-is-part-of-a-profile",
        file="torch_private.py",
        old="_enable_record_function(False)",
        new="_enable_record_function(True)",
        tests=(f"{SHOWS}[a profile-roomy]",),
    ),
    Mutant(
        name="a-trial-run-calls-hooks-of-saved-tensors",
        file="tracing/offline.py",
        old="if with_backward and hooks is not None and not saves_on_cpu(hooks):",
        new="if False:",
        tests=(f"{SHOWS}[a recomputed model-roomy]",),
    ),
    Mutant(
        name="torch-takes-what-a-trial-run-warns-of-for-said",
        file="tracing/side_effects.py",
        old="torch.set_warn_always(True)",
        new="pass",
        tests=("tests/session/test_trial_runs.py::test_what_torch_warns_of_once_is_left_for_the_step",),
    ),
    Mutant(
        name="where-anomalies-are-detected-nothing-is-foreseen",
        file="tracing/trial_values.py",
        old="and checks_for_nan():",
        new="and False:",
        tests=(f"{SHOWS}[anomalies-roomy]",),
    ),
    Mutant(
        name="the-first-refusal-forgets-what-comes-with-the-first-update",
        file="step/stretches.py",
        old="trained=torch.is_grad_enabled())",
        new="trained=False)",
        tests=(NAMED,),
    ),
    Mutant(
        name="a-step-that-has-run-is-refused",
        file="step/stretches.py",
        old="return within(recorded, budget, start=state)",
        new="return recorded",
        tests=(NAMED,),
    ),
    Mutant(
        name="a-loss-is-foreseen-as-one-number",
        file="tracing/missing.py",
        old="if func.overloadpacket in _REDUCED and not result.ndim:",
        new="if False:",
        tests=("tests/session/test_forecasts.py::test_a_loss_is_foreseen_with_the_memory_that_it_keeps[mse_loss]",),
    ),
)
