"""Faults of the binding: what autograd keeps, what a view holds, what is changed by hand."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BINDING"]

SAVED = "tests/parameters/test_saved_tensors.py"
HANDED_ON = "tests/parameters/test_faults_caught.py"
REPORTS = "tests/session/test_public_reports.py"
BY_HAND = "tests/session/test_hand_changes.py::test_a_change_survives_on_its_own"

BINDING: tuple[Mutant, ...] = (
    Mutant(
        name="a-detached-view-brings-autograd-back",
        file="parameters/differentiate.py",
        old='get_gradient_edge(tensor) if hasattr(type(tensor), "managed_by") else tensor',
        new="get_gradient_edge(tensor) if bound(tensor) is not None else tensor",
        tests=(
            "tests/session/test_double_backward.py::test_a_backward_that_differentiates_what_it_has_saved[deferred]",
        ),
    ),
    Mutant(
        name="saved-tensors-are-not-bound-to-slots",
        file="parameters/saved.py",
        old="found = self._find(tensor)",
        new="found = None",
        tests=(f"{SAVED}::test_gradients_are_those_of_the_weights_that_the_forward_used",),
    ),
    Mutant(
        name="a-saved-slice-is-read-from-the-start-of-its-unit",
        file="parameters/saved.py",
        old="self.shape, self.stride, self.offset_bytes // size)",
        new="self.shape, self.stride, 0)",
        tests=(f"{SAVED}::test_inplace_operations_after_a_layer",),
    ),
    Mutant(
        name="a-saved-view-loses-its-conjugation",
        file="parameters/saved.py",
        old="        if self.is_conjugated:\n            alias = torch._conj(alias)\n",
        new="",
        tests=(f"{REPORTS}::test_a_view_of_a_weight_keeps_its_traits_until_backward[conjugated]",),
    ),
    Mutant(
        name="a-placeholder-can-be-read",
        file="parameters/bound.py",
        old="        refuse_reads(nan)",
        new="        pass",
        tests=(f"{REPORTS}::test_a_placeholder_that_no_check_sees_cannot_be_read[grad_and_value]",),
    ),
    Mutant(
        name="a-class-that-hides-parameters-is-let-in",
        file="parameters/transforms.py",
        old="value.is_nested or _hides_parameters(value, probe)",
        new="value.is_nested",
        tests=(
            f"{REPORTS}::test_what_would_read_placeholders_is_refused_before_anything_is_computed[a class that asks no other]",
        ),
    ),
    Mutant(
        name="what-a-fused-step-writes-is-not-noticed",
        file="parameters/functions.py",
        old='or (name.startswith("_fused_") and name.endswith("_"))',
        new="",
        tests=(f"{REPORTS}::test_a_second_optimizer_over_what_the_managed_one_lacks[AdamW, fused-fp32]",),
    ),
    Mutant(
        name="data-that-is-assigned-is-let-go",
        file="parameters/attributes.py",
        old="            self._binding.handle(Tensor.copy_, (self._get_data(bound), value), {})",
        new="            pass",
        tests=(f"{REPORTS}::test_values_that_are_assigned_as_data_are_taken_over",),
    ),
    Mutant(
        name="a-graph-of-gradients-holds-its-weights",
        file="parameters/saved.py",
        old="if backward_makes_graph() and inside_node_of_torch()",
        new="if False and inside_node_of_torch()",
        tests=(f"{SAVED}::test_a_graph_of_gradients_holds_no_weight[2]",),
    ),
    Mutant(
        name="hooks-are-pushed-inside-of-others",
        file="parameters/saved.py",
        old="if backward_makes_graph() and inside_node_of_torch()",
        new="if backward_makes_graph()",
        tests=(f"{SAVED}::test_a_backward_in_python_finds_the_hooks_that_it_has_pushed",),
    ),
    Mutant(
        name="hooks-are-pushed-where-they-are-forbidden",
        file="parameters/saved.py",
        old=" and are_saved_tensors_hooks_allowed():",
        new=":",
        tests=(f"{SAVED}::test_where_hooks_are_forbidden_weights_are_held",),
    ),
    Mutant(
        name="packing-does-not-delegate-to-the-hooks-underneath",
        file="parameters/saved.py",
        old="if underneath is not None:",
        new="if False:",
        tests=(f"{HANDED_ON}::test_hooks_of_the_users_are_given_the_activations_of_plain_pytorch",),
    ),
    Mutant(
        name="no-version-check-of-weights-at-unpacking",
        file="parameters/saved.py",
        old="if now != saved.version and not",
        new="if False and not",
        tests=(f"{SAVED}::test_a_weight_changed_between_forward_and_backward_raises_as_in_pytorch",),
    ),
    Mutant(
        name="no-version-check-of-activations-at-unpacking",
        file="parameters/saved.py",
        old="if saved.tensor._version != saved.version:",
        new="if False:",
        tests=(f"{SAVED}::test_an_activation_changed_between_forward_and_backward_raises_as_in_pytorch",),
    ),
    Mutant(
        name="a-slot-is-reused-under-a-living-view",
        file="memory/leases.py",
        old="return self._held.copy()",
        new="return ()",
        tests=(f"{SAVED}::test_a_view_that_outlives_its_moment_keeps_its_slot",),
    ),
    Mutant(
        name="the-address-of-a-dead-lease-is-taken-for-its-slot",
        file="memory/leases.py",
        old="        if self._dead:\n            self.settle()  # an ordinary tensor",
        new="        if False:\n            self.settle()  # an ordinary tensor",
        tests=("tests/parameters/test_leases.py::test_an_ordinary_tensor_is_never_taken_for_a_slot_that_was_let_go",),
    ),
    Mutant(
        name="the-executor-forgets-living-views",
        file="step/executor.py",
        old="held = store.leases.held()",
        new="held = ()",
        tests=("tests/session/test_faults_caught.py::test_a_view_that_is_kept_over_steps_keeps_its_weight",),
    ),
    Mutant(
        name="operations-on-views-are-not-seen",
        file="parameters/binding.py",
        old="result.__class__ = self._alias_class",
        new="pass",
        tests=(f"{HANDED_ON}::test_a_view_is_packed_when_an_operation_saves_it_for_its_input",),
    ),
    Mutant(
        name="a-change-by-hand-does-not-make-dirty",
        file="step/events.py",
        old="self._executor.wrote(key)",
        new="pass",
        tests=(f"{BY_HAND}[add]",),
    ),
    Mutant(
        name="a-change-through-numpy-is-not-noticed",
        file="parameters/escapes.py",
        old="if now != digest:",
        new="if False:",
        tests=(f"{BY_HAND}[by_numpy]",),
    ),
)
