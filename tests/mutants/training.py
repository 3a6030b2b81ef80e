"""Faults of gradients, updates, the optimizer's bookkeeping and checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import drop, never, replace, without

LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
GRADIENTS = "tests/session/test_gradients.py"
HOMES = "tests/session/test_gradient_homes.py"
CHECKPOINTS = "tests/session/test_checkpoints.py"
TRAINING_ON = "tests/session/test_disk_tier.py::test_no_bit_depends_on_the_machine"
RESUME = f"{CHECKPOINTS}::test_stopping_and_resuming_gives_the_bits_of_not_stopping"

TRAINING: tuple[Mutant, ...] = (
    Fault("squares-are-added-in-another-order", "optim.norm:GlobalNorm._levels").by(
        replace("torch.add(...)", "torch.add(left[:, :rows], left[:, rows:], out=half)"),
        "tests/optim/test_norm.py::test_each_sum_has_its_place",
    ),
    Fault("a-last-block-keeps-squares-of-others", "optim.norm:GlobalNorm._sum").by(
        drop("zero_"), "tests/optim/test_norm.py::test_blocks_are_counted_from_the_start_of_each_tensor"
    ),
    Fault("gradients-that-were-used-are-used-again", "step.training_in_backward:InBackwardTraining.step").by(
        drop("_spent"),
        "tests/session/test_gradients.py::test_a_step_that_would_use_gradients_again_is_refused_with_in_backward",
    ),
    Fault(
        "a-gradient-that-no-backward-has-used-is-forgotten-at-the-step",
        "step.training_in_backward:InBackwardTraining.step",
    ).by(
        drop("_update_rest"),
        "tests/session/test_gradients.py::test_a_gradient_that_no_backward_has_used_is_used_at_the_step[emulated-assigned]",
    ),
    Fault("a-chunk-is-updated-twice-in-a-step", "step.optimizer_step:OptimizerStep.work").by(
        replace("self._ranges(...)", "_ * (2 if chunk == 1 else 1)"), f"{TRAINING_ON}[emulated-next-use-deferred]"
    ),
    Fault("one-plane-of-a-moment-is-forgotten", "plan.touches:update_touches").by(
        without("EXP_AVG_SQ"), f"{TRAINING_ON}[emulated-next-use-deferred]"
    ),
    Fault("one-plane-of-a-moment-is-taken-for-unwritten", "plan.touches:update_touches").by(
        replace("True", "plane != EXP_AVG_SQ", nth=2), f"{TRAINING_ON}[cpu+disk-next-use-deferred]"
    ),
    Fault("a-first-gradient-is-added-to-zeros", "optim.passes:Passes.put").by(
        replace("target.copy_", "target.zero_().add_"), f"{GRADIENTS}::test_a_gradient_of_negative_zero_stays_negative"
    ),
    Fault("a-second-gradient-takes-the-place-of-the-first", "optim.passes:Passes.put").by(
        replace("target.add_", "target.copy_"),
        f"{LINE}[forward backward forward backward train forward backward step-fp32-emulated]",
    ),
    Fault("a-stale-gradient-stays-after-zero-grad", "step.training:Training.zero_grad").by(
        drop("in_chunks.drop"), f"{LINE}[forward backward step zero forward backward step zero-fp32-emulated]"
    ),
    Fault("a-clip-factor-misses-one-chunk-of-the-update", "step.optimizer_step:OptimizerStep.work.update").by(
        replace("alike", "(*alike[:2], alike[2] if chunk else ())", nth=2),
        f"{LINE}[forward backward limit(9) step zero forward backward limit(.001) read step planned(2)-fp32-emulated]",
    ),
    Fault("a-clip-factor-is-missing-where-gradients-are-read", "step.gradients:Gradients.copy_into").by(
        replace("self.factors.get(...)", "()"),
        f"{LINE}[forward backward limit(.01) limit(.001) read forward backward read step-fp32-emulated]",
    ),
    Fault("the-rest-of-a-split-master-is-forgotten", "optim.masters:split").by(
        replace("rest.copy_(bits)", "rest.zero_()"),
        "tests/optim/test_masters.py::test_joining_is_the_inverse_of_splitting[1-kept0]",
    ),
    Fault("ties-of-a-split-master-go-to-even", "optim.masters:split").by(
        replace("torch.add(...)", "bits + _HALF - 1 + (bits >> 16 & 1)"),
        "tests/optim/test_masters.py::test_ties_go_away_from_zero",
    ),
    Fault("a-change-by-hand-does-not-reach-a-split-master", "step.weight_masters:Masters.carry").by(
        drop("_carry"),
        "tests/session/test_sixteen_bits.py::test_a_change_by_hand_is_carried_into_the_master[bf16-clamp]",
    ),
    Fault("a-change-by-hand-takes-the-rest-of-every-element", "step.weight_masters:Masters._carry").by(
        replace("lacks.masked_fill_(...)", "lacks.zero_()"),
        "tests/session/test_sixteen_bits.py::test_a_change_by_hand_is_carried_into_the_master[bf16-by_index]",
    ),
    Fault("gradients-of-several-backwards-add-up-in-16-bits", "core.formats:formats_of_16_bits").by(
        never("adds_up"),
        "tests/session/test_scripts.py::test_gradients_that_are_said_to_add_up_do_so_in_fp32[bf16-fp32]",
    ),
    Fault("all-tensors-share-one-step-count", "step.optimizer_step:OptimizerStep.order").by(
        replace("self.steps[name]", "max(self.steps.values())", nth=2),
        "tests/session/test_departures.py::test_a_module_called_twice_or_not_at_all[not at all]",
    ),
    Fault("parts-of-one-tensor-share-a-count-of-changes", "step.training_deferred:SixteenBitGradients.arrived").by(
        never("gradient.untyped_storage().nbytes() > gradient.nbytes"),
        "tests/session/test_whole_sixteen.py::test_gradients_that_are_parts_of_one_tensor_are_rounded_each_by_itself",
    ),
    Fault("a-parameter-without-gradient-is-updated", "step.training_deferred:DeferredTraining.step").by(
        without("name in self.in_chunks.names"),
        f"{GRADIENTS}::test_a_frozen_parameter_and_an_unused_one_have_none",
    ),
    Fault("hyper-parameters-are-read-when-the-update-is-done", "step.training_deferred:DeferredTraining.step").by(
        replace(
            "self.updates.order(...)",
            (
                "(lambda order, read=self.hypers: (setattr(order, 'alike', type('Now', (dict,), {'__getitem__': lambda own, name: "
                "(own.get(name)[0], read()[name], own.get(name)[2])})(order.alike)), order)[1])(_)"
            ),
        ),
        f"{LINE}[forward backward lr*=.5 step lr*=.5 zero forward backward step-fp32-emulated]",
    ),
    Fault("a-pending-step-is-lost-at-close", "step.training:Training.finish").by(
        replace("self.executor.settle()", "self.executor.pending = None"),
        "tests/session/test_after_manage.py::test_close_gives_back_ordinary_parameters_with_the_current_weights[step]",
    ),
    Fault("an-update-is-no-change-for-autograd", "step.training_deferred:DeferredTraining.step").by(
        drop("outdate"),
        "tests/session/test_hand_changes.py::test_a_step_between_forward_and_backward_is_an_error[two_layers]",
    ),
    Fault("in-backward-updates-at-once-what-is-recomputed", "plan.touches:Touches.comes_whole").by(
        never("uses"),
        f"{HOMES}::test_twelve_bytes_a_parameter_and_the_gradients_that_wait_are_enough[cpu+disk-three-fp32]",
    ),
    Fault("a-trial-run-draws-random-numbers", "tracing.side_effects:no_side_effects").by(
        replace("stack.callback(random.setstate, random.getstate())", "random.random()"),
        "tests/session/test_types.py::test_no_random_number_is_drawn[0.5]",
    ),
    Fault("a-checkpoint-lacks-a-moment", "session.saving:Saving._tensors").by(
        replace("_MOMENTS", "['exp_avg']"), f"{RESUME}[emulated-emulated-chunk_sizes0]"
    ),
    Fault("a-moment-is-loaded-into-the-other-plane", "session.saving:Saving._take").by(
        replace("plane", "EXP_AVG if plane == EXP_AVG_SQ else plane", nth=3),
        f"{RESUME}[emulated-emulated-chunk_sizes0]",
    ),
    Fault("random-states-are-not-restored", "session.saving:Saving.load").by(
        drop("restore"), f"{RESUME}[emulated-emulated-chunk_sizes0]"
    ),
    Fault("a-damaged-checkpoint-is-taken", "session.saving:Saving.load").by(
        drop("verify"), f"{CHECKPOINTS}::test_damage_is_found_before_anything_has_changed[a bit at -200]"
    ),
    Fault("the-end-of-a-backward-whose-gradients-came-inside-is-missed", "step.events:Events.use").by(
        drop("notice_recomputation"),
        "tests/session/test_sixteen_bits.py::test_gradients_of_which_only_a_backward_inside_of_another_tells[bf16-fp32-1]",
    ),
)
