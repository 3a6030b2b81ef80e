"""Faults of weights in tiles."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TILES"]

TESTS = "tests/session/test_tiles.py"

TILES = (
    Mutant(
        name="a-tile-that-was-used-is-not-out-of-date-when-its-parameter-is-written",
        file="parameters/bound.py",
        old="for record in (bound, *bound.tiles)]",
        new="for record in (bound,)]",
        tests=(f"{TESTS}::test_a_write_between_forward_and_backward_is_told",),
    ),
    Mutant(
        name="a-tile-that-was-used-is-not-out-of-date-when-its-parameter-is-written-in-place",
        file="parameters/changes.py",
        old="        if tiles:",
        new="        if False:",
        tests=(f"{TESTS}::test_a_change_in_place_between_forward_and_backward_is_told[in place-fp32]",),
    ),
    Mutant(
        name="tiles-of-a-parameter-share-a-version",
        file="parameters/bound.py",
        old="        leaf = nn.Parameter(torch.empty_like(nan), requires_grad=parameter.requires_grad)",
        new="        leaf = nn.Parameter(standin, requires_grad=parameter.requires_grad)",
        tests=(f"{TESTS}::test_without_a_bound_tiles_have_the_same_bits[in_backward]",),
    ),
    Mutant(
        name="tiles-stay-frozen-when-their-parameter-is-trained-after-all",
        file="parameters/attributes.py",
        old="                tile.parameter.requires_grad = value",
        new="                pass",
        tests=(f"{TESTS}::test_frozen_tiles_have_no_gradient_and_can_be_trained_after_all",),
    ),
    Mutant(
        name="padding-is-looked-for-in-the-wrong-row-of-its-tile",
        file="parameters/tiles.py",
        old="        own = padding - tile.first_row if",
        new="        own = padding if",
        tests=(f"{TESTS}::test_the_function_takes_its_padding_as_torch_does[-1]",),
    ),
    Mutant(
        name="an-id-beyond-the-table-gets-its-last-row",
        file="parameters/tiles.py",
        old="is_outside = ((ids < 0) | (ids >= rows)).any()",
        new="is_outside = (ids < 0).any()",
        tests=(f"{TESTS}::test_an_id_outside_of_the_table_is_an_index_error_as_in_torch",),
    ),
    Mutant(
        name="a-tile-adds-to-the-first-rows-of-a-gradient-of-the-users-own",
        file="parameters/gradient_access.py",
        old="                bound.of(own.detach()).add_(gradient)",
        new="                own.detach()[: bound.rows].add_(gradient)",
        tests=(f"{TESTS}::test_tiles_add_to_a_gradient_of_the_users_own",),
    ),
    Mutant(
        name="every-tile-counts-as-an-update-of-its-parameter",
        file="step/training.py",
        old="+ (owner not in self._updated)",
        new="+ 1",
        tests=(f"{TESTS}::test_without_a_bound_tiles_have_the_same_bits[in_backward]",),
    ),
    Mutant(
        name="what-a-failed-backward-left-of-a-tiles-gradient-is-added-to",
        file="step/training.py",
        old="        self._gradients.drop_incomplete()",
        new="        pass",
        tests=(f"{TESTS}::test_a_backward_that_fails_between_tiles_leaves_no_half_gradient",),
    ),
    Mutant(
        name="a-parameter-is-updated-from-its-tiles-while-a-gradient-of-the-whole-is-still-to-come",
        file="plan/touches.py",
        old="        return not (as_whole or in_tiles)",
        new="        return True",
        tests=(f"{TESTS}::test_other_uses_in_backward_update_each_parameter_once",),
    ),
    Mutant(
        name="tiles-that-lie-behind-each-other-are-numbered-from-the-first",
        file="core/layout.py",
        old="            before = tile.tensor_start - tiles[0].tensor_start - tile.offset",
        new="            before = tile.tensor_start - tile.offset",
        tests=("tests/core/test_layout.py::test_tiles_are_laid_out_as_tensors_and_their_parts_are_their_tensors",),
    ),
)
