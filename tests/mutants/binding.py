"""Faults of the binding: what autograd keeps, what a view holds, what is changed by hand."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["BINDING"]

SAVED = "tests/parameters/test_saved_tensors.py"
HANDED_ON = "tests/parameters/test_faults_caught.py"
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
        old="saved.shape, saved.stride, saved.offset)",
        new="saved.shape, saved.stride, 0)",
        tests=(f"{SAVED}::test_inplace_operations_after_a_layer",),
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
