"""Faults of gradients and state that are put together for a use."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["ASSEMBLED"]

GRADIENTS = "tests/session/test_assembled.py"
STATE = "tests/session/test_optimizer_state.py"
NARROW = "tests/session/test_sixteen_bits.py"
LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"

ASSEMBLED: tuple[Mutant, ...] = (
    Mutant(
        name="an-assigned-gradient-is-rounded",
        file="step/gradients.py",
        old="                self._gradients.make_fit(bound, own.dtype)\n",
        new="",
        tests=(
            f"{LINE}[forward backward grad(4)=.3 grad(7)=None read step zero forward backward step zero-bf16-fp32-emulated]",
        ),
    ),
    Mutant(
        name="an-assigned-gradient-is-read-in-its-own-type",
        file="step/training.py",
        old="yield name, own.to(torch.float32)",
        new="yield name, own",
        tests=(
            f"{LINE}[forward backward grad(4)=.3 grad(7)=None read step zero forward backward step zero-bf16-emulated]",
        ),
    ),
    Mutant(
        name="a-kernel-is-chosen-where-nothing-is-updated",
        file="optim/adamw.py",
        old="hyper = Hyper.from_group(group)",
        new="hyper, _ = Hyper.from_group(group), [self._passes_on(parameter.device) for parameter in group['params']]",
        tests=("tests/optim/test_adamw.py::test_a_step_that_has_nothing_to_update_chooses_no_kernel",),
    ),
    Mutant(
        name="a-loaded-state-of-a-bf16-parameter-is-left-as-torch-casts-it",
        file="optim/adamw.py",
        old="if values is None or parameter.dtype is torch.float32:",
        new="if True:",
        tests=("tests/optim/test_adamw.py::test_bf16_parameters_go_on_from_what_was_saved",),
    ),
    Mutant(
        name="a-gradients-use-writes-nothing-back",
        file="parameters/assembled.py",
        old="self._owner.assembled_changed(key, wholly=wholly)",
        new="pass",
        tests=(f"{GRADIENTS}::test_a_loop_over_gradients_has_torchs_bits[emulated-clip]",),
    ),
    Mutant(
        name="a-stale-gradient-is-read-after-zero-grad",
        file="parameters/assembled.py",
        old="            self._known[id(tensor)][1].source.gone = why\n            self._leases",
        new="            self._leases",
        tests=(f"{GRADIENTS}::test_a_gradient_that_was_let_go_is_refused_by_name[zero_grad]",),
    ),
    Mutant(
        name="one-tensor-of-a-foreach-list-is-skipped",
        file="parameters/functions.py",
        old="for index in range(length):",
        new="for index in range(length - 1):",
        tests=(f"{GRADIENTS}::test_a_loop_over_gradients_has_torchs_bits[emulated-foreach]",),
    ),
    Mutant(
        name="what-amp-writes-is-not-noticed",
        file="parameters/functions.py",
        old='if name.startswith("_foreach_"):\n        return run',
        new="return run",
        tests=(f"{GRADIENTS}::test_a_loop_over_gradients_has_torchs_bits[emulated-amp foreach]",),
    ),
    Mutant(
        name="a-held-view-does-not-show-what-is-added",
        file="parameters/assembled.py",
        old="self._owner.renew(key, self._leases.take_copy(key, self._owner.make_copy))",
        new="pass",
        tests=(f"{GRADIENTS}::test_a_held_gradient_shows_what_another_backward_adds[emulated]",),
    ),
    Mutant(
        name="a-view-of-a-gradient-that-was-let-go-writes-into-the-next",
        file="parameters/assembled.py",
        old="            self._leases.disown(key)\n",
        new="",
        tests=(f"{GRADIENTS}::test_a_view_of_a_gradient_that_is_let_go_keeps_its_last_values",),
    ),
    Mutant(
        name="whole-tensors-count-against-no-budget",
        file="parameters/assembled.py",
        old="return self._leases.assembled_bytes() + self.making_bytes",
        new="return 0",
        tests=(f"{GRADIENTS}::test_many_whole_gradients_at_once_are_refused_in_numbers",),
    ),
    Mutant(
        name="autograd-saves-the-stand-in-of-a-gradient",
        file="parameters/assembled.py",
        old="return tensor.detach() if type(tensor) is self._class else tensor",
        new="return tensor",
        tests=(f"{GRADIENTS}::test_autograd_keeps_what_it_saves_of_a_gradient",),
    ),
    Mutant(
        name="a-pending-step-is-done-after-state-was-read",
        file="step/events.py",
        old="            self._stretches.pause()\n        self.check_watch()\n        self._executor.settle()\n",
        new="            self._stretches.pause()\n        self.check_watch()\n",
        tests=(f"{STATE}::test_a_state_kept_over_a_step_shows_what_the_step_made_of_it",),
    ),
    Mutant(
        name="elements-that-did-not-change-are-rounded",
        file="step/gradients.py",
        old="if wholly or target.dtype == written.dtype:",
        new="if True:",
        tests=(f"{NARROW}::test_gradients_are_shown_rounded_and_what_is_changed_is_widened[bf16-2-a few]",),
    ),
    Mutant(
        name="gradients-too-small-to-be-shown-outlive-zeroing",
        file="parameters/assembled.py",
        old='"zero_", "fill_",',
        new='"fill_",',
        tests=(f"{NARROW}::test_what_sets_every_element_sets_those_that_are_shown_as_they_become_too",),
    ),
    Mutant(
        name="a-change-is-rounded-to-a-16-bit-plane",
        file="step/gradients.py",
        old="torch.float32 if name in self.factors else flat.dtype)",
        new="torch.float32 if name in self.factors else self.dtype(bound))",
        tests=(f"{NARROW}::test_gradients_are_shown_rounded_and_what_is_changed_is_widened[bf16-fp32-1-a third]",),
    ),
    Mutant(
        name="a-whole-entry-of-state-is-written-in-part",
        file="session/state_mapping.py",
        old="            count_of(AssembledKey(name, STEP), wanted[STEP])\n",
        new="            pass\n",
        tests=(f"{STATE}::test_a_whole_entry_that_is_wrong_is_refused_before_any_of_it_is_written",),
    ),
)
