"""Faults of changes in place: what a forward does to its own weights, and operations of whose names nothing tells that they write."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["CHANGES"]

TESTS = "tests/session/test_forward_changes.py"
IN_FP32 = f"{TESTS}::test_a_weight_that_the_forward_changes_has_the_bits_of_plain_pytorch"
NARROW = f"{TESTS}::test_what_the_forward_changes_is_carried_into_masters"

CHANGES: tuple[Mutant, ...] = (
    Mutant(
        name="a-function-that-writes-is-taken-for-one-that-reads",
        file="parameters/functions.py",
        old="    return Effects(not writes,",
        new="    return Effects(True,",
        tests=(f"{NARROW}[clamp-bf16-emulated]",),
    ),
    Mutant(
        name="a-forwards-own-change-is-not-in-the-trace",
        file="tracing/offline.py",
        old="        if isinstance(key, PlaneRef):\n            self._moment(self._phase()",
        new="        if isinstance(key, PlaneRef):\n            (lambda *_: None)(self._phase()",
        tests=(f"{IN_FP32}[embedding-deferred-cpu+disk]",),
    ),
    Mutant(
        name="a-plan-goes-on-after-a-change-that-its-trace-has-not",
        file="step/events.py",
        old="        if phase is not Phase.STEP:\n            # A moment of its own",
        new="        if False:\n            # A moment of its own",
        tests=(f"{TESTS}::test_a_change_that_depends_on_more_than_shapes[fp32-done and not foreseen]",),
    ),
    Mutant(
        name="a-change-is-no-part-of-a-stretch",
        file="step/executor.py",
        old="return Phase.FORWARD if is_known else Phase.STEP",
        new="return Phase.STEP",
        tests=(f"{NARROW}[clamp-bf16-emulated]",),
    ),
    Mutant(
        name="a-lookup-that-shortens-rows-is-taken-to-read",
        file="parameters/functions.py",
        old="func in _RENORMALISE and",
        new="func in () and",
        tests=(f"{NARROW}[embedding-bf16-emulated]",),
    ),
    Mutant(
        name="what-torch-passes-by-name-is-not-seen-to-be-written",
        file="parameters/functions.py",
        old="return args[0] if args else list(kwargs.values())",
        new="return args[0] if args else None",
        tests=("tests/session/test_sixteen_bits.py::test_a_change_by_hand_is_carried_into_the_master[bf16-by_init]",),
    ),
    Mutant(
        name="an-unseen-change-keeps-every-elements-master",
        file="parameters/changes.py",
        old="        if before is None:\n            raise UnseenChangeError(",
        new="        if False:\n            raise UnseenChangeError(",
        tests=(f"{TESTS}::test_a_change_that_could_not_be_carried_into_a_master_is_refused_before_the_first_step",),
    ),
    Mutant(
        name="what-batch-norm-averages-into-is-taken-to-be-read",
        file="parameters/functions.py",
        old="    if first is None:",
        new="    if True:",
        tests=(f"{TESTS}::test_a_parameter_that_batch_norm_averages_into[fp32]",),
    ),
    Mutant(
        name="a-call-that-is-one-use-changes-nothing",
        file="parameters/whole_calls.py",
        old="            self._binding.changes.tell(watched)",
        new="            pass",
        tests=(f"{TESTS}::test_a_module_that_is_one_use_may_change_its_weights",),
    ),
    Mutant(
        name="what-a-recomputation-changes-again-is-out-of-date",
        file="parameters/saved.py",
        old="(saved.is_recomputed and self._was_recomputed(saved.owner, now))",
        new="False",
        tests=(f"{TESTS}::test_a_block_that_is_computed_again_changes_its_weights_again[fp32-non-reentrant]",),
    ),
    Mutant(
        name="under-checkpointing-no-change-is-noticed",
        file="parameters/saved.py",
        old="(saved.is_recomputed and self._was_recomputed(saved.owner, now))",
        new="saved.is_recomputed",
        tests=(f"{TESTS}::test_a_weight_changed_by_hand_before_a_checkpointed_block_is_computed_again_is_an_error",),
    ),
    Mutant(
        name="a-view-is-used-before-what-is-pending-is-done",
        file="parameters/binding.py",
        old="        if found.aliases:\n            self._owner.carry_out_pending()",
        new="        if False:\n            self._owner.carry_out_pending()",
        tests=(
            "tests/session/test_hand_changes.py::test_a_view_that_is_held_over_a_step_sees_and_makes_changes_after_it",
        ),
    ),
    Mutant(
        name="a-change-whose-master-was-not-reached-stays",
        file="step/masters_by_hand.py",
        old="                    if before is not None:\n                        for left",
        new="                    if before is None:\n                        for left",
        tests=(f"{TESTS}::test_a_change_by_hand_whose_master_cannot_be_reached_is_no_change",),
    ),
    Mutant(
        name="a-trial-run-brings-parts-of-a-gradient-one-by-one",
        file="tracing/offline.py",
        old='        if self._touches.adds_up(name, str(gradient.dtype).removeprefix("torch.")):',
        new="        if False:",
        tests=(f"{NARROW}[clamp-bf16-fp32-emulated]",),
    ),
)
