"""Faults of homes: room that nobody needs, and room that somebody needs and has not."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["HOMES"]

TESTS = "tests/session/test_gradient_homes.py"
PLACEMENT = "tests/plan/test_placement.py"
MIXED = "tests/session/test_mixed_homes.py"

HOMES: tuple[Mutant, ...] = (
    Mutant(
        name="homes-are-reserved-for-gradients-that-nobody-keeps",
        file="core/planes.py",
        old="return self is GradientUse.CHUNK",
        new="return self in {GradientUse.CHUNK, GradientUse.UPDATE}",
        tests=(f"{TESTS}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[cpu+disk-none-bf16]",),
    ),
    Mutant(
        name="a-gradient-that-must-wait-has-no-home",
        file="step/stretches.py",
        old="            self._late_planes.reserve(known.trace)\n",
        new="            pass\n",
        tests=(f"{TESTS}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[emulated-three-fp32]",),
    ),
    Mutant(
        name="all-gradients-have-homes-where-one-must-wait",
        file="step/late_planes.py",
        old="self._take_in(trace.touched(GRAD), why=name_gradients(trace))",
        new='self.reserve_all("")',
        tests=(f"{TESTS}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[cpu+disk-one-fp32]",),
    ),
    Mutant(
        name="what-cannot-be-traced-has-no-homes-for-gradients",
        file="step/stretches.py",
        old="self._late_planes.reserve_all(known.reason)",
        new="pass",
        tests=(f"{TESTS}::test_what_cannot_be_traced_is_refused_before_anything_has_changed[emulated-fp32]",),
    ),
    Mutant(
        name="what-is-never-traced-has-no-homes-for-gradients",
        file="step/stretches.py",
        old="            self._reserve(unknown)\n",
        new="",
        tests=(f"{TESTS}::test_a_forward_that_is_never_traced_has_room_for_every_gradient[emulated]",),
    ),
    Mutant(
        name="an-evaluation-has-room-for-gradients",
        file="step/stretches.py",
        old="        if not torch.is_grad_enabled():\n            return\n",
        new="",
        tests=(f"{TESTS}::test_what_cannot_be_traced_is_refused_before_anything_has_changed[cpu+disk-fp32]",),
    ),
    Mutant(
        name="a-gradient-that-no-trace-has-shown-has-no-home",
        file="step/gradients.py",
        old="        self._late_planes.reserve_for(name)\n",
        new="",
        tests=(f"{TESTS}::test_a_gradient_that_must_wait_although_its_trace_had_not_shown_it_gets_room[emulated]",),
    ),
    Mutant(
        name="widening-is-for-gradients-without-homes-too",
        file="step/late_planes.py",
        old="narrow = [ref for ref in gradients if ref in state.home]",
        new="narrow = gradients",
        tests=(
            f"{TESTS}::test_gradients_in_bf16_are_widened_where_they_add_up_and_the_others_have_no_room[emulated-one by one]",
        ),
    ),
    Mutant(
        name="gradients-at-home-where-it-computes-count-for-ever",
        file="plan/placement.py",
        old="(ref in kept or not state.is_free(ref))",
        new="True",
        tests=(f"{PLACEMENT}::test_where_everything_is_at_home_gradients_are_too_and_count_while_they_are_kept",),
    ),
    Mutant(
        name="gradients-that-have-contents-do-not-count",
        file="plan/placement.py",
        old="(ref in kept or not state.is_free(ref))",
        new="ref in kept",
        tests=(f"{PLACEMENT}::test_where_everything_is_at_home_gradients_are_too_and_count_while_they_are_kept",),
    ),
    Mutant(
        name="a-device-that-holds-everything-has-no-room-for-gradients",
        file="plan/placement.py",
        old="if compute is Tier.HOST or sum(map(state.unit_bytes, home)) + sum(new.values()) > machine.budget[compute]:",
        new="if True:",
        tests=(f"{TESTS}::test_where_everything_fits_the_tier_that_computes_gradients_may_be_kept_there",),
    ),
    Mutant(
        name="the-host-has-no-slot-left-to-stage-through",
        file="plan/placement.py",
        old="return with_staging(max(needed, *new.values()))",
        new="return with_staging(needed)",
        tests=(f"{PLACEMENT}::test_gradients_that_have_homes_keep_them_and_later_ones_find_room",),
    ),
    Mutant(
        name="a-forecast-has-no-update-after-the-backward",
        file="session/forecast.py",
        old="updates = [update] if late or not in_backward else []",
        new="updates = [] if in_backward else [update]",
        tests=(f"{TESTS}::test_a_forecast_has_the_peaks_and_the_moves_of_a_run[emulated-three-fp32]",),
    ),
    Mutant(
        name="the-smallest-budget-is-that-of-a-first-step",
        file="session/smallest.py",
        old="start=contents, trained=True)",
        new="start=contents)",
        tests=(
            "tests/session/test_budgets.py::test_the_smallest_budget_of_the_host_alone_that_a_forecast_names_runs_and_a_byte_less_does_not",
        ),
    ),
    Mutant(
        name="the-smallest-budget-of-a-device-is-told-as-if-the-host-held-everything",
        file="session/smallest.py",
        old="if machine.compute is Tier.DEVICE and not _rests_below(",
        new="if False and not _rests_below(",
        tests=("tests/cli/test_machine_source.py::test_model_data_fills_the_device_and_the_host_together",),
    ),
    Mutant(
        name="a-host-through-which-no-unit-passes-has-no-smallest-budget",
        file="session/smallest.py",
        old="            host_bytes += refusal.smallest_bytes - refusal.available_bytes\n",
        new="            host_bytes = best\n",
        tests=(f"{MIXED}::test_a_host_through_which_no_unit_passes_is_refused_with_what_would_do",),
    ),
    Mutant(
        name="a-forecast-raises-where-no-unit-passes-through-the-host",
        file="session/smallest.py",
        old="        except BudgetError:\n",
        new="        except ZeroDivisionError:\n",
        tests=(f"{MIXED}::test_a_host_through_which_no_unit_passes_is_refused_with_what_would_do",),
    ),
    Mutant(
        name="a-refusal-names-a-budget-that-nobody-has-tried",
        file="session/forecast.py",
        old="        if tried.refused is None:",
        new="        if tried is not None:",
        tests=("tests/cli/test_plan.py::test_the_budget_that_a_refusal_names_is_the_smallest_and_fits",),
    ),
    Mutant(
        name="weights-on-meta-count-as-memory-to-take-over",
        file="deferred/deferred_init.py",
        old=" and not parameter.is_meta",
        new="",
        tests=("tests/session/test_resources.py::test_weights_that_are_nowhere_are_no_memory_to_take_over",),
    ),
    Mutant(
        name="a-file-that-could-not-be-set-aside-stays",
        file="memory/disk.py",
        old="            _remove_files(self._io, self._files, os.getpid(), keep=files)\n",
        new="",
        tests=("tests/memory/test_disk.py::test_units_that_cannot_come_leave_everything_as_it_was",),
    ),
)
