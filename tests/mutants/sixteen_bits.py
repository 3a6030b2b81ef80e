"""Faults of 16-bit types: copies that compute, loss scales, factors."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace

LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
SIXTEEN = "tests/session/test_sixteen_bits.py"
SCALING = "tests/session/test_loss_scaling.py"

SIXTEEN_BITS: tuple[Mutant, ...] = (
    Fault("a-copy-that-is-held-keeps-the-old-weight", "parameters.changes:Changes.renew").by(
        replace("bound.name in living", "bound.name in () and living"),
        f"{LINE}[hold(2) forward backward step held(2)*=.5 zero train held(2) free train-fp16-cpu+disk]",
    ),
    Fault("two-copies-of-one-weight-live-at-once", "memory.leases:Leases.take_copy").by(
        assign("tensor", "None", nth=2),
        f"{LINE}[hold(2) forward backward step held(2)*=.5 zero train held(2) free train-fp16-cpu+disk]",
    ),
    Fault("a-change-in-a-copy-is-lost", "step.events:Events.changed").by(
        drop("changed"), f"{SIXTEEN}::test_a_change_by_hand_is_carried_into_the_master[fp16-host-clamp]"
    ),
    Fault("a-change-in-a-copy-rounds-its-neighbours-masters", "step.weight_masters:Masters.take_changes").by(
        replace("torch.where(changed, value, kept[block])", "value"),
        f"{SIXTEEN}::test_a_change_by_hand_is_carried_into_the_master[fp16-host-by_index]",
    ),
    Fault("fp16-weights-compute-with-bits-that-fp16-does-not-have", "step.weight_masters:Masters._convert").by(
        always("dtype"), f"{LINE}[train(4) planned(4)-fp16-fp32-cpu+disk]"
    ),
    Fault(
        "a-change-in-a-widened-copy-of-a-split-weight-leaves-the-rest", "step.weight_masters:Masters.take_changes"
    ).by(drop("copy_", nth=3), f"{SIXTEEN}::test_a_change_by_hand_is_carried_into_the_master[fp16-fp32-clamp]"),
    Fault("fp16-weights-on-a-device-are-fp32-masters", "step.precision:find_precision").by(
        assign("is_split", "False", nth=1),
        "tests/session/test_host_updates.py::test_the_gradient_goes_down_and_the_weight_comes_up_and_nothing_else_does[True-fp16-deferred]",
    ),
    Fault("an-fp16-weight-that-is-nan-has-a-rest", "optim.masters:split").by(
        drop("masked_fill_"), "tests/optim/test_masters.py::test_joining_is_the_inverse_of_splitting[0-kept1]"
    ),
    Fault("a-weight-written-on-a-gpu-has-the-rest-of-another-type", "step.values:Weights.read_into").by(
        replace("rest_type(...)", "torch.int16"),
        "tests/cuda/test_users_code.py::test_a_master_that_is_written_comes_back_whole[fp16]",
    ),
    Fault("other-units-leave-while-a-copy-is-made", "parameters.weight_access:WeightAccess.enter").by(
        assign("leased", "{}", nth=1), f"{SIXTEEN}::test_no_unit_leaves_while_copies_of_several_are_made"
    ),
    Fault("an-overflow-is-not-found", "step.gradients:Gradients.add").by(
        never("finds_overflow"), f"{SCALING}::test_injected_overflows_skip_the_same_steps_with_the_same_bits[None]"
    ),
    Fault("an-overflow-written-by-hand-is-not-found", "step.gradients:Gradients.write").by(
        replace("self.finds_overflow", "_ and target.numel() < 0"),
        "tests/session/test_sixteen_bits.py::test_an_overflow_is_found_as_gradients_are_when_the_scaler_looks",
    ),
    Fault("a-nan-is-no-overflow", "optim.passes:Passes.look").by(
        replace("is_finite.mul_(...)", "is_finite.mul_(~torch.isinf(least) & ~torch.isinf(most))"),
        f"{SCALING}::test_injected_overflows_skip_the_same_steps_with_the_same_bits[None]",
    ),
    Fault("an-overflow-outlives-its-gradient", "step.gradients:Gradients.drop").by(
        drop("forget"), f"{SCALING}::test_an_overflow_that_was_let_go_does_not_count"
    ),
    Fault("gradients-are-not-divided-by-the-scale", "session.scaler:LossScaler.unscale_").by(
        drop("multiply"), f"{SCALING}::test_injected_overflows_skip_the_same_steps_with_the_same_bits[None]"
    ),
    Fault("a-clipped-gradient-is-rounded-before-it-is-used", "optim.masters:scaled_blocks").by(
        replace("block.mul_(factor)", "_.copy_(block.to(piece.dtype))"),
        f"{LINE}[forward backward limit(.01) limit(.001) read forward backward read step-bf16-emulated]",
    ),
    Fault("the-loss-scale-is-not-in-the-checkpoint", "session.saving:Saving.load").by(
        drop("load_state_dict"), f"{SCALING}::test_the_scale_is_part_of_a_checkpoint"
    ),
)
