"""Faults of homes: room that nobody needs, and room that somebody needs and has not."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, drop, never, replace, without

TESTS = "tests/session/test_gradient_homes.py"
PLACEMENT = "tests/plan/test_placement.py"

HOMES: tuple[Mutant, ...] = (
    Fault("homes-are-reserved-for-gradients-that-nobody-keeps", "core.planes:GradientUse.planes").by(
        always("self is GradientUse.CHUNK"),
        f"{TESTS}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[cpu+disk-none-bf16]",
    ),
    Fault("a-gradient-that-must-wait-has-no-home", "step.forwards:KnownForwards._reserve").by(
        drop("reserve"),
        f"{TESTS}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[emulated-three-fp32]",
    ),
    Fault("all-gradients-have-homes-where-one-must-wait", "step.late_planes:LatePlanes.reserve").by(
        never("trace"),
        f"{TESTS}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[cpu+disk-one-fp32]",
    ),
    Fault("what-cannot-be-traced-has-no-homes-for-gradients", "step.forwards:KnownForwards._reserve").by(
        without("known.trace is None"),
        f"{TESTS}::test_what_cannot_be_traced_is_refused_before_anything_has_changed[emulated-fp32]",
    ),
    Fault("what-is-never-traced-has-no-homes-for-gradients", "step.forwards:KnownForwards.expect").by(
        drop("_reserve", nth=1), f"{TESTS}::test_a_forward_that_is_never_traced_has_room_for_every_gradient[emulated]"
    ),
    Fault("an-evaluation-has-room-for-gradients", "step.forwards:KnownForwards._reserve").by(
        without("torch.is_grad_enabled()"),
        f"{TESTS}::test_what_cannot_be_traced_is_refused_before_anything_has_changed[cpu+disk-fp32]",
    ),
    Fault("a-gradient-that-no-trace-has-shown-has-no-home", "step.gradients:Gradients._make_ready").by(
        drop("reserve_for"),
        f"{TESTS}::test_a_gradient_that_must_wait_although_its_trace_had_not_shown_it_gets_room[emulated]",
    ),
    Fault("widening-is-for-gradients-without-homes-too", "step.late_planes:LatePlanes.widen_gradients").by(
        always("state.home"),
        f"{TESTS}::test_a_gradient_that_no_optimizer_takes_has_room_in_fp32_and_the_others_have_none[emulated-bf16, one by one]",
    ),
    Fault("gradients-at-home-where-it-computes-count-for-ever", "plan.placement:place_gradients").by(
        replace("ref in kept or not state.is_free(ref)", "True"),
        f"{PLACEMENT}::test_where_everything_is_at_home_gradients_are_too_and_count_while_they_are_kept",
    ),
    Fault("gradients-that-have-contents-do-not-count", "plan.placement:place_gradients").by(
        without("not state.is_free(ref)"),
        f"{PLACEMENT}::test_where_everything_is_at_home_gradients_are_too_and_count_while_they_are_kept",
    ),
    Fault("a-device-that-holds-everything-has-no-room-for-gradients", "plan.placement:place_gradients").by(
        always("HOST"), f"{TESTS}::test_where_everything_fits_the_tier_that_computes_gradients_may_be_kept_there"
    ),
    Fault("the-host-has-no-slot-left-to-stage-through", "plan.placement:place_gradients").by(
        replace("max(staging, *new.values())", "staging"),
        f"{PLACEMENT}::test_gradients_that_have_homes_keep_them_and_later_ones_find_room",
    ),
    Fault("a-forecast-has-no-update-after-the-backward", "session.paper_run:PaperRun._update").by(
        never("trained"),
        f"{TESTS}::test_a_forecast_has_the_peaks_and_the_moves_of_a_run[emulated-three-fp32]",
    ),
    Fault("the-smallest-budget-is-that-of-a-first-step", "session.forecast:_needed_beside_homes").by(
        without("trained="),
        "tests/session/test_budgets.py::test_the_budget_that_is_named_before_any_is_tried_fits_and_a_byte_less_does_not[host alone]",
    ),
    Fault(
        "the-smallest-budget-of-a-device-is-told-as-if-the-host-held-everything", "session.forecast:smallest_budgets"
    ).by(
        replace("machine.compute is Tier.DEVICE", "False"),
        "tests/cli/test_machine_source.py::test_model_data_fills_the_device_and_the_host_together",
    ),
    Fault("a-host-through-which-no-unit-passes-has-no-smallest-budget", "session.forecast:_smallest_host").by(
        replace("host_bytes += refusal.smallest_bytes - refusal.available_bytes", "host_bytes = best"),
        f"{TESTS}::test_a_host_through_which_no_unit_passes_is_refused_with_what_would_do",
    ),
    Fault("a-forecast-raises-where-no-unit-passes-through-the-host", "session.forecast:smallest_budgets").by(
        replace("BudgetError", "ZeroDivisionError"),
        f"{TESTS}::test_a_host_through_which_no_unit_passes_is_refused_with_what_would_do",
    ),
    Fault("a-refusal-names-a-budget-that-nobody-has-tried", "session.forecast:_advised").by(
        replace("tried.refused is None", "tried is not None"),
        "tests/cli/test_plan.py::test_the_budget_that_a_refusal_names_is_the_smallest_and_fits",
    ),
    Fault("weights-on-meta-count-as-memory-to-take-over", "deferred.deferred_init:present_and_absent_bytes").by(
        without("not parameter.is_meta"),
        "tests/session/test_resources.py::test_weights_that_are_nowhere_are_no_memory_to_take_over",
    ),
    Fault("a-file-that-could-not-be-set-aside-stays", "memory.disk:DiskPool.add").by(
        drop("_remove_files"), "tests/memory/test_disk.py::test_units_that_cannot_come_leave_everything_as_it_was"
    ),
)
