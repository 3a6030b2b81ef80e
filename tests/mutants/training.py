"""Faults of gradients, updates, the optimizer's bookkeeping and checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TRAINING"]

FAULTS = "tests/runtime/test_faults_caught.py"
TRAINING_ON = f"{FAULTS}::test_training_has_the_bits_of_plain_pytorch"
RESUME = f"{FAULTS}::test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped"
MOMENTS = "touches = [Touch(PlaneRef(chunk, EXP_AVG), True), Touch(PlaneRef(chunk, EXP_AVG_SQ), True), weight]"

TRAINING: tuple[Mutant, ...] = (
    Mutant(
        name="a-chunk-is-updated-twice-in-a-step",
        file="runtime/updates.py",
        old="for piece in self._ranges(chunk, order):",
        new="for piece in self._ranges(chunk, order) * (2 if chunk == 1 else 1):",
        tests=(f"{TRAINING_ON}[emulated]",),
    ),
    Mutant(
        name="one-plane-of-a-moment-is-forgotten",
        file="runtime/updates.py",
        old=MOMENTS,
        new="touches = [Touch(PlaneRef(chunk, EXP_AVG), True), weight]",
        tests=(f"{TRAINING_ON}[emulated]",),
    ),
    Mutant(
        name="one-plane-of-a-moment-is-taken-for-unwritten",
        file="runtime/updates.py",
        old=MOMENTS,
        new=MOMENTS.replace("EXP_AVG_SQ), True", "EXP_AVG_SQ), False"),
        tests=(f"{TRAINING_ON}[emulated]",),
    ),
    Mutant(
        name="a-first-gradient-is-added-to-zeros",
        file="runtime/gradients.py",
        old="target.copy_(piece)",
        new="target.zero_().add_(piece)",
        tests=(f"{FAULTS}::test_gradients_of_negative_zero_stay_negative",),
    ),
    Mutant(
        name="a-second-gradient-takes-the-place-of-the-first",
        file="runtime/gradients.py",
        old="                if bound.name in self.names:\n                    target.add_(piece)",
        new="                if False:\n                    target.add_(piece)",
        tests=(f"{FAULTS}::test_gradients_add_up_and_are_gone_after_zero_grad",),
    ),
    Mutant(
        name="a-stale-gradient-stays-after-zero-grad",
        file="runtime/training.py",
        old="self._gradients.drop_all()",
        new="pass",
        tests=(f"{FAULTS}::test_gradients_add_up_and_are_gone_after_zero_grad",),
    ),
    Mutant(
        name="a-clip-factor-misses-one-chunk-of-the-update",
        file="runtime/updates.py",
        old="for factor in order.factors:",
        new="for factor in order.factors if chunk else ():",
        tests=(f"{FAULTS}::test_clipping_scales_every_gradient",),
    ),
    Mutant(
        name="a-clip-factor-misses-one-chunk-that-is-read",
        file="runtime/gradients.py",
        old="for factor in factors:",
        new="for factor in factors if chunk else ():",
        tests=(f"{FAULTS}::test_clipping_scales_every_gradient",),
    ),
    Mutant(
        name="all-tensors-share-one-step-count",
        file="runtime/training.py",
        old="{name: self.steps[name] for name in names}, factors)",
        new="{name: max(self.steps.values()) for name in names}, factors)",
        tests=(f"{FAULTS}::test_what_has_no_gradient_is_left_alone_and_counts_its_own_updates",),
    ),
    Mutant(
        name="a-parameter-without-gradient-is-updated",
        file="runtime/training.py",
        old="name in hypers and (name in self._gradients.names or name in own)",
        new="name in hypers",
        tests=(f"{FAULTS}::test_what_has_no_gradient_is_left_alone_and_counts_its_own_updates",),
    ),
    Mutant(
        name="hyper-parameters-are-read-when-the-update-is-done",
        file="runtime/training.py",
        old="        self._unfinished = True\n        with self._own",
        new="        self._unfinished = True\n"
        "        order = StepOrder({name: self._hypers()[name] for name in order.hypers}, order.steps, order.factors)\n"
        "        with self._own",
        tests=(f"{FAULTS}::test_a_step_is_done_as_things_stood_when_it_was_called",),
    ),
    Mutant(
        name="a-pending-step-is-lost-at-close",
        file="runtime/training.py",
        old="        if not self._unfinished:\n            self._conductor.settle()\n        self._conductor.pending = None",
        new="        self._conductor.pending = None",
        tests=(f"{FAULTS}::test_a_step_is_done_as_things_stood_when_it_was_called",),
    ),
    Mutant(
        name="an-update-is-no-change-for-autograd",
        file="runtime/updates.py",
        old="self._bump(order.hypers)",
        new="pass",
        tests=(f"{FAULTS}::test_an_update_between_forward_and_backward_is_an_error_as_in_pytorch",),
    ),
    Mutant(
        name="in-backward-updates-at-once-what-is-recomputed",
        file="tracing/choreography.py",
        old="return not self._uses_apart[name] or self._uses[name] == 1",
        new="return True",
        tests=(f"{FAULTS}::test_an_update_in_backward_waits_for_the_last_recomputation",),
    ),
    Mutant(
        name="a-trial-run-draws-random-numbers",
        file="tracing/offline.py",
        old="random.setstate(python)",
        new="random.random()",
        tests=(f"{FAULTS}::test_training_draws_the_random_numbers_of_plain_pytorch",),
    ),
    Mutant(
        name="a-checkpoint-lacks-a-moment",
        file="runtime/saving.py",
        old='"moments") for kind in _PLANES]',
        new='"moments") for kind in ["exp_avg"]]',
        tests=(RESUME,),
    ),
    Mutant(
        name="a-moment-is-loaded-into-the-other-plane",
        file="runtime/saving.py",
        old="self._read_moment(reader, name, owner, _PLANES[kind])",
        new='self._read_moment(reader, name, owner, _PLANES["exp_avg"])',
        tests=(RESUME,),
    ),
    Mutant(
        name="random-states-are-not-restored",
        file="runtime/saving.py",
        old='rng.restore(state["rng"])',
        new="pass",
        tests=(RESUME,),
    ),
    Mutant(
        name="a-damaged-checkpoint-is-taken",
        file="runtime/saving.py",
        old="reader.verify()",
        new="pass",
        tests=(f"{FAULTS}::test_a_checkpoint_with_a_flipped_bit_is_refused_and_nothing_changes",),
    ),
)
