"""Faults of gradients, updates, the optimizer's bookkeeping and checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TRAINING"]

FAULTS = "tests/session/test_faults_caught.py"
GRADIENTS = "tests/session/test_gradients.py"
CHECKPOINTS = "tests/session/test_checkpoints.py"
TRAINING_ON = "tests/session/test_disk_tier.py::test_no_bit_depends_on_the_machine"
RESUME = f"{CHECKPOINTS}::test_stopping_and_resuming_gives_the_bits_of_not_stopping"
MOMENTS = "planes = (EXP_AVG, EXP_AVG_SQ, *("
WRITTEN = "Touch(PlaneRef(chunk, plane), True) for plane in planes"

TRAINING: tuple[Mutant, ...] = (
    Mutant(
        name="squares-are-added-in-another-order",
        file="optim/norm.py",
        old="torch.add(left[:, 0::2], left[:, 1::2], out=half)",
        new="torch.add(left[:, :rows], left[:, rows:], out=half)",
        tests=("tests/optim/test_norm.py::test_each_sum_has_its_place",),
    ),
    Mutant(
        name="a-last-block-keeps-squares-of-others",
        file="optim/norm.py",
        old="            self._squares[filled : start + rows * _WIDTH].zero_()\n",
        new="",
        tests=("tests/optim/test_norm.py::test_blocks_are_counted_from_the_start_of_each_tensor",),
    ),
    Mutant(
        name="gradients-that-were-used-are-used-again",
        file="step/training.py",
        old="            self._spent = (self._updated & self._binding.by_name.keys()) - own\n",
        new="",
        tests=(
            "tests/session/test_gradients.py::test_a_step_that_would_use_gradients_again_is_refused_with_in_backward",
        ),
    ),
    Mutant(
        name="a-gradient-that-no-backward-has-used-is-forgotten-at-the-step",
        file="step/training.py",
        old="            self._update_rest()\n",
        new="",
        tests=(
            "tests/session/test_gradients.py::test_a_gradient_that_no_backward_has_used_is_used_at_the_step[emulated-assigned]",
        ),
    ),
    Mutant(
        name="a-chunk-is-updated-twice-in-a-step",
        file="step/update.py",
        old="for piece in self._ranges(chunk, order)]",
        new="for piece in self._ranges(chunk, order) * (2 if chunk == 1 else 1)]",
        tests=(f"{TRAINING_ON}[emulated-next-use-deferred]",),
    ),
    Mutant(
        name="one-plane-of-a-moment-is-forgotten",
        file="plan/touches.py",
        old=MOMENTS,
        new="planes = (EXP_AVG, *(",
        tests=(f"{TRAINING_ON}[emulated-next-use-deferred]",),
    ),
    Mutant(
        name="one-plane-of-a-moment-is-taken-for-unwritten",
        file="plan/touches.py",
        old=WRITTEN,
        new=WRITTEN.replace("True", "plane != EXP_AVG_SQ"),
        tests=(f"{TRAINING_ON}[cpu+disk-next-use-deferred]",),
    ),
    Mutant(
        name="a-first-gradient-is-added-to-zeros",
        file="optim/passes.py",
        old="target.copy_(source)",
        new="target.zero_().add_(source)",
        tests=(f"{FAULTS}::test_a_gradient_of_negative_zero_stays_negative",),
    ),
    Mutant(
        name="a-second-gradient-takes-the-place-of-the-first",
        file="optim/passes.py",
        old="            target.add_(source)",
        new="            target.copy_(source)",
        tests=(f"{GRADIENTS}::test_gradients_of_several_backwards_add_up[True]",),
    ),
    Mutant(
        name="a-stale-gradient-stays-after-zero-grad",
        file="step/training.py",
        old="self._gradients.drop_all()",
        new="pass",
        tests=(f"{GRADIENTS}::test_zeroing_means_what_it_means_in_pytorch[tight-zero_by_optimizer]",),
    ),
    Mutant(
        name="a-clip-factor-misses-one-chunk-of-the-update",
        file="step/update.py",
        old="hyper=piece.hyper, factors=piece.factors)",
        new="hyper=piece.hyper, factors=piece.factors if chunk else ())",
        tests=(f"{GRADIENTS}::test_clipping_through_the_session[0.001]",),
    ),
    Mutant(
        name="a-clip-factor-is-missing-where-gradients-are-read",
        file="step/gradients.py",
        old="scaled_blocks(piece, self.factors.get(name, ()))",
        new="scaled_blocks(piece, ())",
        tests=(f"{GRADIENTS}::test_clipping_twice_clips_twice_and_gradients_show_it",),
    ),
    Mutant(
        name="the-rest-of-a-split-master-is-forgotten",
        file="optim/masters.py",
        old="rest.copy_(bits)  #",
        new="rest.zero_()  #",
        tests=("tests/optim/test_masters.py::test_joining_is_the_inverse_of_splitting[1-kept0]",),
    ),
    Mutant(
        name="ties-of-a-split-master-go-to-even",
        file="optim/masters.py",
        old="upper = torch.add(bits, _HALF, out=scratch)",
        new="upper = (bits + _HALF - 1 + ((bits >> 16) & 1))",
        tests=("tests/optim/test_masters.py::test_ties_go_away_from_zero",),
    ),
    Mutant(
        name="a-change-by-hand-does-not-reach-a-split-master",
        file="step/masters_by_hand.py",
        old="                self._carry(part, before)",
        new="                pass",
        tests=("tests/session/test_sixteen_bits.py::test_a_change_by_hand_is_carried_into_the_master[bf16-clamp]",),
    ),
    Mutant(
        name="a-change-by-hand-takes-the-rest-of-every-element",
        file="step/masters_by_hand.py",
        old="masked_fill_(now.view(torch.int16) != was.view(torch.int16), 0)",
        new="zero_()",
        tests=(
            "tests/session/test_sixteen_bits.py::test_a_change_by_hand_is_carried_into_the_master[bf16-some_elements]",
        ),
    ),
    Mutant(
        name="gradients-of-several-backwards-add-up-in-16-bits",
        file="core/formats.py",
        old='GRAD: PlaneFormat(gradient, 2 if gradient == "bfloat16" else 4),',
        new='GRAD: PlaneFormat("bfloat16", 2),',
        tests=("tests/session/test_sixteen_bits.py::test_gradients_of_several_backwards_add_up_in_fp32[bf16-fp32]",),
    ),
    Mutant(
        name="all-tensors-share-one-step-count",
        file="step/training.py",
        old="{name: self.steps[name] for name in names},\n            self._trace_of",
        new="{name: max(self.steps.values()) for name in names},\n            self._trace_of",
        tests=("tests/session/test_departures.py::test_a_module_called_twice_or_not_at_all[not at all]",),
    ),
    Mutant(
        name="a-parameter-without-gradient-is-updated",
        file="step/training.py",
        old="name in hypers and (name in self._gradients.names or name in own)",
        new="name in hypers",
        tests=(f"{GRADIENTS}::test_a_frozen_parameter_and_an_unused_one_have_none",),
    ),
    Mutant(
        name="hyper-parameters-are-read-when-the-update-is-done",
        file="step/training.py",
        old="return self._updates.work(self._executor.pending, chunk, tier)",
        new="object.__setattr__(self._executor.pending, 'hypers', self._hypers())\n"
        "        return self._updates.work(self._executor.pending, chunk, tier)",
        tests=(f"{GRADIENTS}::test_hyper_parameters_are_read_when_step_is_called",),
    ),
    Mutant(
        name="a-pending-step-is-lost-at-close",
        file="step/training.py",
        old="            self._executor.pending = None\n        else:\n            self._executor.settle()",
        new="            self._executor.pending = None\n        else:\n            self._executor.pending = None",
        tests=(
            "tests/session/test_after_manage.py::test_close_gives_back_ordinary_parameters_with_the_current_weights[step]",
        ),
    ),
    Mutant(
        name="an-update-is-no-change-for-autograd",
        file="step/training.py",
        old="self._binding.changing(names)",
        new="pass",
        tests=("tests/session/test_hand_changes.py::test_a_step_between_forward_and_backward_is_an_error[two_layers]",),
    ),
    Mutant(
        name="in-backward-updates-at-once-what-is-recomputed",
        file="plan/touches.py",
        old="        if self.counts.apart.get(label) and self.counts.uses.get(label) != 1:",
        new="        if False:",
        tests=(f"{FAULTS}::test_an_update_in_backward_waits_for_the_last_recomputation[with a head]",),
    ),
    Mutant(
        name="a-trial-run-draws-random-numbers",
        file="tracing/side_effects.py",
        old="random.setstate(python)",
        new="random.random()",
        tests=("tests/session/test_types.py::test_no_random_number_is_drawn[0.5]",),
    ),
    Mutant(
        name="a-checkpoint-lacks-a-moment",
        file="session/saving.py",
        old='"moments") for kind in _PLANES]',
        new='"moments") for kind in ["exp_avg"]]',
        tests=(f"{RESUME}[emulated-emulated-chunk_sizes0]",),
    ),
    Mutant(
        name="a-moment-is-loaded-into-the-other-plane",
        file="session/saving.py",
        old="self._read_average(reader, name, owner, _PLANES[kind])",
        new='self._read_average(reader, name, owner, _PLANES["exp_avg"])',
        tests=(f"{RESUME}[emulated-emulated-chunk_sizes0]",),
    ),
    Mutant(
        name="random-states-are-not-restored",
        file="session/saving.py",
        old='rng.restore(state["rng"], self._binding.device)',
        new="pass",
        tests=(f"{RESUME}[emulated-emulated-chunk_sizes0]",),
    ),
    Mutant(
        name="a-damaged-checkpoint-is-taken",
        file="session/saving.py",
        old="reader.verify()",
        new="pass",
        tests=(f"{CHECKPOINTS}::test_a_flipped_byte_is_found_before_anything_has_changed[0.7]",),
    ),
    Mutant(
        name="the-end-of-a-backward-whose-gradients-came-inside-is-missed",
        file="step/events.py",
        old="            self._training.backwards.notice_recomputation()",
        new="            pass",
        tests=(
            "tests/session/test_sixteen_bits.py::test_gradients_of_which_only_a_backward_inside_of_another_tells[bf16-fp32-1]",
        ),
    ),
)
