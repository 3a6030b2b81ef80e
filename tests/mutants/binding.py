"""Faults of the binding: what autograd keeps, what a view holds, what is changed by hand."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

SAVED = "tests/parameters/test_saved_tensors.py"
REPORTS = "tests/session/test_public_reports.py"
LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
BY_HAND = "tests/session/test_hand_changes.py::test_a_change_survives_on_its_own"

BINDING: tuple[Mutant, ...] = (
    Fault("a-detached-view-brings-autograd-back", "parameters.binding:differentiate.edges").by(
        replace("hasattr(...)", "bound(tensor) is not None"),
        "tests/session/test_double_backward.py::test_a_backward_that_differentiates_what_it_has_saved[deferred]",
    ),
    Fault("saved-tensors-are-not-bound-to-slots", "parameters.saved:SavedTensors.around_use.pack").by(
        assign("saved", "None", nth=1), f"{SAVED}::test_gradients_are_those_of_the_weights_that_the_forward_used"
    ),
    Fault("a-saved-slice-is-read-from-the-start-of-its-unit", "parameters.saved:SlotView.over").by(
        replace("self.offset_bytes // size", "0"),
        "tests/parameters/test_parameter_class.py::test_channels_last_parameters_keep_their_strides",
    ),
    Fault("a-saved-view-loses-its-conjugation", "parameters.saved:SlotView.over").by(
        drop("if self.is_conjugated: ..."),
        f"{REPORTS}::test_a_view_of_a_weight_keeps_its_traits_until_backward[conjugated]",
    ),
    Fault("changes-of-many-under-a-mode-are-not-counted", "parameters.functions:counted.run_and_count").by(
        drop("increment_version"), f"{REPORTS}::test_a_change_of_many_weights_under_a_users_mode_is_kept"
    ),
    Fault("an-offset-counts-from-the-start-of-the-slot", "parameters.binding:Binding.handle").by(
        never("STRIDED"), f"{REPORTS}::test_an_offset_of_storage_counts_from_the_start_of_the_parameter[by name]"
    ),
    Fault("an-inputs-class-is-lost-where-it-meets-a-parameter", "parameters.binding:Binding._use").by(
        drop("if foreign and not found.others: ..."),
        f"{REPORTS}::test_what_is_computed_of_an_input_of_a_class_is_of_that_class[False]",
    ),
    Fault("checkpointing-does-not-count-weights", "parameters.saved:SavedTensors.around_use.pack").by(
        never("is_recomputed"), f"{REPORTS}::test_a_block_that_saves_nothing_but_weights_is_recomputed[False]"
    ),
    Fault("hooks-of-the-users-are-not-given-weights", "parameters.saved:SavedTensors.around_use.pack").by(
        never("takes_weights"), f"{SAVED}::test_hooks_of_the_users_are_called_for_weights_too"
    ),
    Fault("what-a-backward-puts-back-is-shown-to-a-meter-that-ended", "tracing.live_bytes:LiveBytes.leave_retired").by(
        replace("seer.counts", "True"), f"{REPORTS}::test_a_mode_around_a_forward_alone_is_left_after_it"
    ),
    Fault("aliases-have-python-objects", "tracing.seen_operations:_install").by(
        drop("impl", nth=1), f"{REPORTS}::test_torch_chooses_the_same_formulas_in_a_measured_step"
    ),
    Fault("autocast-is-given-fp32-for-16-bits", "tracing.inputs:_stays").by(
        assign("widens", "False"), f"{REPORTS}::test_inputs_of_16_bits_under_autocast_are_taken_as_they_are"
    ),
    Fault("a-placeholder-can-be-read", "parameters.bound:placeholder").by(
        drop("refuse_reads"), f"{REPORTS}::test_a_placeholder_that_no_check_sees_cannot_be_read[grad_and_value]"
    ),
    Fault("a-class-that-hides-parameters-is-let-in", "parameters.transforms:expect_ordinary_call").by(
        without("_hides_parameters(...)"),
        f"{REPORTS}::test_what_would_read_placeholders_is_refused_before_anything_is_computed[a class that asks no other]",
    ),
    Fault("what-a-fused-step-writes-is-not-noticed", "parameters.functions:effects_of").by(
        without("name.startswith(...) and name.endswith(...)"),
        f"{REPORTS}::test_a_second_optimizer_over_what_the_managed_one_lacks[AdamW, fused-fp32-200KiB]",
    ),
    Fault("data-that-is-assigned-is-let-go", "parameters.attributes:Attributes._set_data").by(
        drop("use", nth=2), f"{REPORTS}::test_values_that_are_assigned_as_data_are_taken_over"
    ),
    Fault("a-graph-of-gradients-holds-its-weights", "parameters.saved:SavedTensors.unpack").by(
        replace("backward_makes_graph()", "False"), f"{SAVED}::test_a_graph_of_gradients_holds_no_weight[2]"
    ),
    Fault("hooks-are-pushed-inside-of-others", "parameters.saved:SavedTensors.unpack").by(
        without("inside_node_of_torch()"), f"{SAVED}::test_a_backward_in_python_finds_the_hooks_that_it_has_pushed"
    ),
    Fault("hooks-are-pushed-where-they-are-forbidden", "parameters.saved:SavedTensors.unpack").by(
        without("are_saved_tensors_hooks_allowed()"), f"{SAVED}::test_where_hooks_are_forbidden_weights_are_held"
    ),
    Fault("packing-does-not-delegate-to-the-hooks-underneath", "parameters.saved:SavedTensors.around_use.pack").by(
        never("underneath", nth=3), f"{SAVED}::test_hooks_of_the_users_are_called_for_weights_too"
    ),
    Fault("no-version-check-of-weights-at-unpacking", "parameters.saved:SavedTensors.unpack").by(
        replace("now != saved.version", "False"),
        f"{SAVED}::test_a_weight_changed_between_forward_and_backward_raises_as_in_pytorch",
    ),
    Fault("no-version-check-of-activations-at-unpacking", "parameters.saved:SavedTensors.unpack").by(
        never("tensor"), f"{SAVED}::test_an_activation_changed_between_forward_and_backward_raises_as_in_pytorch"
    ),
    Fault("a-slot-is-reused-under-a-living-view", "memory.leases:Leases.held").by(
        returns("()"), f"{SAVED}::test_a_view_that_outlives_its_moment_keeps_its_slot"
    ),
    Fault("the-address-of-a-dead-lease-is-taken-for-its-slot", "memory.leases:Leases.locate").by(
        never("dead"),
        "tests/parameters/test_leases.py::test_an_ordinary_tensor_is_never_taken_for_a_slot_that_was_let_go",
    ),
    Fault("the-executor-forgets-living-views", "step.executor:Executor._moment").by(
        assign("held", "()"), f"{LINE}[train hold(2) train(3) held(2) evaluate free train-fp32-emulated]"
    ),
    Fault("operations-on-views-are-not-seen", "parameters.weight_access:WeightAccess.dress").by(
        drop("__class__"), f"{SAVED}::test_a_view_is_packed_when_an_operation_saves_it"
    ),
    Fault("a-change-by-hand-does-not-make-dirty", "step.events:Events.changed").by(drop("wrote"), f"{BY_HAND}[add]"),
    Fault("a-change-through-numpy-is-not-noticed", "parameters.changes:EscapedMemory.check").by(
        never("digest"), f"{BY_HAND}[by_numpy]"
    ),
)
