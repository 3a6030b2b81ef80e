"""Faults of weights in tiles."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

__all__ = ["TILES"]

TESTS = "tests/session/test_tiles.py"

TILES: tuple[Mutant, ...] = (
    Fault("a-tile-that-was-used-is-not-out-of-date-when-its-parameter-is-written", "parameters.bound:with_tiles").by(
        without("*bound.tiles"), f"{TESTS}::test_a_write_between_forward_and_backward_is_told"
    ),
    Fault(
        "a-tile-that-was-used-is-not-out-of-date-when-its-parameter-is-written-in-place",
        "parameters.changes:Changes._changed",
    ).by(never("tiles"), f"{TESTS}::test_a_change_in_place_between_forward_and_backward_is_told[in place-fp32]"),
    Fault("tiles-of-a-parameter-share-a-version", "parameters.bound:_tiles").by(
        replace("torch.empty_like(nan)", "standin"),
        f"{TESTS}::test_without_a_bound_tiles_have_the_same_bits[in_backward]",
    ),
    Fault(
        "tiles-stay-frozen-when-their-parameter-is-trained-after-all",
        "parameters.attributes:Attributes._set_requires_grad",
    ).by(drop("parameter.requires_grad"), f"{TESTS}::test_frozen_tiles_have_no_gradient_and_can_be_trained_after_all"),
    Fault("padding-is-looked-for-in-the-wrong-row-of-its-tile", "parameters.tiles:_lookup").by(
        without("tile.first_row", nth=3), f"{TESTS}::test_the_function_takes_its_padding_as_torch_does[-1]"
    ),
    Fault("an-id-beyond-the-table-gets-its-last-row", "parameters.tiles:_expect_inside").by(
        without("ids >= rows"), f"{TESTS}::test_an_id_outside_of_the_table_is_an_index_error_as_in_torch"
    ),
    Fault(
        "a-tile-adds-to-the-first-rows-of-a-gradient-of-the-users-own",
        "parameters.gradient_access:GradientAccess._take",
    ).by(
        replace("bound.of(...)", "own.detach()[:bound.rows]"), f"{TESTS}::test_tiles_add_to_a_gradient_of_the_users_own"
    ),
    Fault(
        "every-tile-counts-as-an-update-of-its-parameter", "step.training_in_backward:InBackwardTraining.gradient"
    ).by(
        assign("steps", "self.steps.get(owner, 0) + 1"),
        f"{TESTS}::test_without_a_bound_tiles_have_the_same_bits[in_backward]",
    ),
    Fault("what-a-failed-backward-left-of-a-tiles-gradient-is-added-to", "step.training:Training.begin_forward").by(
        drop("drop_incomplete"), f"{TESTS}::test_a_backward_that_fails_between_tiles_leaves_no_half_gradient"
    ),
    Fault(
        "a-parameter-is-updated-from-its-tiles-while-a-gradient-of-the-whole-is-still-to-come",
        "plan.touches:Touches.comes_whole",
    ).by(returns("True", nth=2), f"{TESTS}::test_other_uses_in_backward_update_each_parameter_once"),
    Fault("tiles-that-lie-behind-each-other-are-numbered-from-the-first", "core.layout:Layout.parts").by(
        without("tiles[0].tensor_start"),
        "tests/core/test_layout.py::test_tiles_are_laid_out_as_tensors_and_their_parts_are_their_tensors",
    ),
)
