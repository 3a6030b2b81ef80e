"""Faults of gradients and state that are put together for a use."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, drop, replace, returns, without

GRADIENTS = "tests/session/test_assembled.py"
STATE = "tests/session/test_optimizer_state.py"
NARROW = "tests/session/test_sixteen_bits.py"
LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"

ASSEMBLED: tuple[Mutant, ...] = (
    Fault("an-assigned-gradient-is-rounded", "step.optimizer_step:OptimizerStep.update_at_once").by(
        drop("make_fit"),
        f"{LINE}[forward backward grad(4)=.3 grad(7)=None read step zero forward backward step zero-bf16-fp32-emulated]",
    ),
    Fault("an-assigned-gradient-is-read-in-its-own-type", "step.training_deferred:DeferredTraining._gradients").by(
        replace("own.to(...)", "own"),
        f"{LINE}[forward backward grad(4)=.3 grad(7)=None read step zero forward backward step zero-bf16-emulated]",
    ),
    Fault("a-kernel-is-chosen-where-nothing-is-updated", "optim.adamw:_DefinedUpdate.step").by(
        replace(
            "hyper = Hyper.from_group(group)",
            (
                "hyper, _ = (Hyper.from_group(group), [self._passes_on(parameter.device) for parameter in "
                "group['params']])"
            ),
        ),
        "tests/optim/test_adamw.py::test_a_step_that_has_nothing_to_update_chooses_no_kernel",
    ),
    Fault(
        "a-loaded-state-of-a-bf16-parameter-is-left-as-torch-casts-it", "optim.adamw:_DefinedUpdate.load_state_dict"
    ).by(always("dtype"), "tests/optim/test_adamw.py::test_bf16_parameters_go_on_from_what_was_saved"),
    Fault("a-gradients-use-writes-nothing-back", "parameters.assembled:AssembledTensors.using").by(
        drop("assembled_changed"), f"{GRADIENTS}::test_a_loop_over_gradients_has_torchs_bits[emulated-clip]"
    ),
    Fault("a-stale-gradient-is-read-after-zero-grad", "parameters.assembled:AssembledTensors.dropped").by(
        drop("gone"), f"{GRADIENTS}::test_a_gradient_that_was_let_go_is_refused_by_name[zero_grad]"
    ),
    Fault("one-tensor-of-a-foreach-list-is-skipped", "parameters.functions:one_by_one").by(
        replace("range(length)", "range(length - 1)"),
        f"{GRADIENTS}::test_a_loop_over_gradients_has_torchs_bits[emulated-foreach]",
    ),
    Fault("what-amp-writes-is-not-noticed", "parameters.functions:counted").by(
        drop("increment_version"),
        f"{GRADIENTS}::test_a_loop_over_gradients_has_torchs_bits[emulated-amp foreach]",
    ),
    Fault("a-held-view-does-not-show-what-is-added", "parameters.assembled:AssembledTensors.changed").by(
        drop("renew"), f"{GRADIENTS}::test_a_held_gradient_shows_what_another_backward_adds[emulated]"
    ),
    Fault(
        "a-view-of-a-gradient-that-was-let-go-writes-into-the-next", "parameters.assembled:AssembledTensors.dropped"
    ).by(drop("disown"), f"{GRADIENTS}::test_what_is_done_with_gradients_gives_what_it_gives_in_pytorch[outlived]"),
    Fault("whole-tensors-count-against-no-budget", "parameters.binding:Binding.taken_bytes").by(
        without("self.leases.assembled_bytes()"),
        f"{GRADIENTS}::test_many_whole_gradients_at_once_are_refused_in_numbers",
    ),
    Fault("autograd-saves-the-stand-in-of-a-gradient", "parameters.assembled:AssembledTensors.lasting").by(
        returns("tensor"), f"{GRADIENTS}::test_what_is_done_with_gradients_gives_what_it_gives_in_pytorch[saved]"
    ),
    Fault("a-pending-step-is-done-after-state-was-read", "step.events:Events.settle").by(
        drop("settle"), f"{STATE}::test_a_state_kept_over_a_step_shows_what_the_step_made_of_it"
    ),
    Fault("elements-that-did-not-change-are-rounded", "step.gradients:Gradients.write").by(
        always("dtype"), f"{NARROW}::test_gradients_are_shown_rounded_and_what_is_changed_is_widened[bf16-2-a few]"
    ),
    Fault("gradients-too-small-to-be-shown-outlive-zeroing", "parameters.assembled:_OVERWRITES").by(
        without("'zero_'"), f"{NARROW}::test_what_sets_every_element_sets_those_that_are_shown_as_they_become_too"
    ),
    Fault("a-change-is-rounded-to-a-16-bit-plane", "step.gradients:Gradients.write").by(
        replace("flat.dtype", "self.dtype(bound)"),
        f"{NARROW}::test_gradients_are_shown_rounded_and_what_is_changed_is_widened[bf16-fp32-1-a third]",
    ),
    Fault("a-whole-entry-of-state-is-written-in-part", "session.optimizer_target:StateMapping.__setitem__").by(
        drop("count_of"), f"{STATE}::test_a_whole_entry_that_is_wrong_is_refused_before_any_of_it_is_written"
    ),
)
