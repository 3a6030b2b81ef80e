"""Faults of 16-bit types: copies that compute, loss scales, factors."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SIXTEEN_BITS"]

SIXTEEN = "tests/session/test_sixteen_bits.py"
SCALING = "tests/session/test_loss_scaling.py"

SIXTEEN_BITS = (
    Mutant(
        name="a-copy-that-is-held-keeps-the-old-weight",
        file="parameters/binding.py",
        old="            if bound.name in living:",
        new="            if bound.name in () and living:",
        tests=(f"{SIXTEEN}::test_a_view_of_a_weight_that_is_held_shows_the_update[fp16-host]",),
    ),
    Mutant(
        name="two-copies-of-one-weight-live-at-once",
        file="memory/leases.py",
        old="            tensor = self._living_copy(key)",
        new="            tensor = None",
        tests=(f"{SIXTEEN}::test_a_view_of_a_weight_that_is_held_shows_the_update[fp16-host]",),
    ),
    Mutant(
        name="a-change-in-a-copy-is-lost",
        file="step/events.py",
        old="            self._copies.changed(key)",
        new="            pass",
        tests=(f"{SIXTEEN}::test_a_change_by_hand_is_carried_into_the_master[fp16-host-clamp]",),
    ),
    Mutant(
        name="a-change-in-a-copy-rounds-its-neighbours-masters",
        file="step/copies.py",
        old="kept[block].copy_(torch.where(changed, value, kept[block]))",
        new="kept[block].copy_(value)",
        tests=(f"{SIXTEEN}::test_a_change_by_hand_is_carried_into_the_master[fp16-host-some_elements]",),
    ),
    Mutant(
        name="fp16-weights-compute-with-bits-that-fp16-does-not-have",
        file="step/copies.py",
        old="        if self._scratch is None or copy.dtype is self._rounding:",
        new="        if True:",
        tests=(f"{SIXTEEN}::test_every_machine_has_the_bits_of_masters_kept_by_hand[fp16-fp32-deferred-cpu+disk]",),
    ),
    Mutant(
        name="a-change-in-a-widened-copy-of-a-split-weight-leaves-the-rest",
        file="step/copies.py",
        old="                rest[block].copy_(torch.where(changed, left, rest[block]))",
        new="                pass",
        tests=(f"{SIXTEEN}::test_a_change_by_hand_is_carried_into_the_master[fp16-fp32-clamp]",),
    ),
    Mutant(
        name="fp16-weights-on-a-device-are-fp32-masters",
        file="step/precision.py",
        old='    is_split = has.device != "cpu"',
        new="    is_split = False",
        tests=(
            "tests/session/test_host_updates.py::test_the_gradient_goes_down_and_the_weight_comes_up_and_nothing_else_does[True-fp16-deferred]",
        ),
    ),
    Mutant(
        name="an-fp16-weight-that-is-nan-has-a-rest",
        file="optim/masters.py",
        old="            rest.masked_fill_(torch.isnan(weight), 0)",
        new="            pass",
        tests=("tests/optim/test_masters.py::test_joining_is_the_inverse_of_splitting[0-kept1]",),
    ),
    Mutant(
        name="a-weight-written-on-a-gpu-has-the-rest-of-another-type",
        file="step/values.py",
        old="zip(halves, (weight.dtype, rest_type(weight.dtype)), strict=True)",
        new="zip(halves, (weight.dtype, torch.int16), strict=True)",
        tests=("tests/cuda/test_users_code.py::test_a_master_that_is_written_comes_back_whole[fp16]",),
    ),
    Mutant(
        name="other-units-leave-while-a-copy-is-made",
        file="parameters/binding.py",
        old="            units = [self.leases.take(touch.ref) for touch in touches]  # none may leave while copies are made",
        new="            units = []",
        tests=(f"{SIXTEEN}::test_no_unit_leaves_while_copies_of_several_are_made",),
    ),
    Mutant(
        name="an-overflow-is-not-found",
        file="step/gradients.py",
        old="        if not self._finds_overflow:",
        new="        if not self._finds_overflow or target.numel():",
        tests=(f"{SCALING}::test_injected_overflows_skip_the_same_steps_with_the_same_bits[None]",),
    ),
    Mutant(
        name="an-overflow-written-by-hand-is-not-found",
        file="step/gradients.py",
        old="        if self._finds_overflow:",
        new="        if self._finds_overflow and target.numel() < 0:",
        tests=("tests/session/test_sixteen_bits.py::test_an_overflow_is_found_as_gradients_are_when_the_scaler_looks",),
    ),
    Mutant(
        name="a-nan-is-no-overflow",
        file="optim/passes.py",
        old="torch.isfinite(least) & torch.isfinite(most)",
        new="~torch.isinf(least) & ~torch.isinf(most)",
        tests=(f"{SCALING}::test_injected_overflows_skip_the_same_steps_with_the_same_bits[None]",),
    ),
    Mutant(
        name="an-overflow-outlives-its-gradient",
        file="step/gradients.py",
        old="        self.factors.pop(name, None)\n        self.overflow.forget(name)\n        self._views",
        new="        self.factors.pop(name, None)\n        self._views",
        tests=(f"{SCALING}::test_an_overflow_that_was_let_go_does_not_count",),
    ),
    Mutant(
        name="gradients-are-not-divided-by-the-scale",
        file="session/scaler.py",
        old="        self._training.multiply(torch.tensor(1.0 / self._rule.scale, dtype=torch.float32))",
        new="        pass",
        tests=(f"{SCALING}::test_injected_overflows_skip_the_same_steps_with_the_same_bits[None]",),
    ),
    Mutant(
        name="a-clipped-gradient-is-rounded-before-it-is-used",
        file="optim/masters.py",
        old="            block.mul_(factor)",
        new="            block.mul_(factor).copy_(block.to(piece.dtype))",
        tests=(f"{SIXTEEN}::test_a_gradient_clipped_twice_is_rounded_once",),
    ),
    Mutant(
        name="the-loss-scale-is-not-in-the-checkpoint",
        file="session/saving.py",
        old='                self._scaler().load_state_dict(state["scaler"])',
        new="                pass",
        tests=(f"{SCALING}::test_the_scale_is_part_of_a_checkpoint",),
    ),
)
