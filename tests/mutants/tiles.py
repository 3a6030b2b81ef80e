"""Faults of weights in tiles."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, returns, without

TESTS = "tests/session/test_tiles.py"
LINE = "tests/session/test_scripts.py::test_so_it_does_in_tiles"
OWN = "grad(2)=1 2[forward backward grad(2)] grad(4)=None step zero train"

TILES: tuple[Mutant, ...] = (
    Fault("a-tile-that-was-used-is-not-out-of-date-when-its-parameter-is-written", "parameters.bound:with_tiles").by(
        without("*bound.tiles"), f"{TESTS}::test_a_write_between_forward_and_backward_is_told"
    ),
    Fault(
        "a-tile-that-was-used-is-not-out-of-date-when-its-parameter-is-written-in-place",
        "parameters.changes:Changes._changed",
    ).by(never("tiles"), f"{TESTS}::test_a_change_in_place_between_forward_and_backward_is_told[in place-fp32]"),
    Fault("tiles-of-a-parameter-share-a-version", "parameters.bound:_tiles").by(
        replace("torch.empty_like(nan)", "standin"), f"{LINE}[in_backward-train(3) planned(3)-fp32-unbounded]"
    ),
    Fault(
        "tiles-stay-frozen-when-their-parameter-is-trained-after-all",
        "parameters.attributes:Attributes._set_requires_grad",
    ).by(
        drop("parameter.requires_grad"),
        f"{LINE}[deferred-freeze(2) train thaw(2) train(2) resume train copy-fp32-roomy]",
    ),
    Fault("padding-is-looked-for-in-the-wrong-row-of-its-tile", "parameters.tiles:_lookup").by(
        without("tile.first_row", nth=3), f"{TESTS}::test_the_function_takes_its_padding_as_torch_does[-1]"
    ),
    Fault("an-id-beyond-the-table-gets-its-last-row", "parameters.tiles:_expect_inside").by(
        without("ids >= rows"), f"{TESTS}::test_an_id_outside_of_the_table_is_an_index_error_as_in_torch"
    ),
    Fault(
        "a-tile-adds-to-the-first-rows-of-a-gradient-of-the-users-own",
        "parameters.gradient_access:GradientAccess._take",
    ).by(replace("bound.of(...)", "own.detach()[:bound.rows]"), f"{LINE}[deferred-{OWN}-fp32-roomy]"),
    Fault(
        "every-tile-counts-as-an-update-of-its-parameter", "step.training_in_backward:InBackwardTraining.gradient"
    ).by(
        assign("steps", "self.updates.steps.get(owner, 0) + 1"),
        f"{LINE}[in_backward-train(3) planned(3)-fp32-unbounded]",
    ),
    Fault("what-a-failed-backward-left-of-a-tiles-gradient-is-added-to", "step.training:Training.begin_forward").by(
        drop("in_chunks.drop"), f"{TESTS}::test_a_backward_that_fails_between_tiles_leaves_no_half_gradient"
    ),
    Fault(
        "a-parameter-is-updated-from-its-tiles-while-a-gradient-of-the-whole-is-still-to-come",
        "plan.touches:Touches.comes_whole",
    ).by(returns("True", nth=2), f"{TESTS}::test_other_uses_in_backward_update_each_parameter_once"),
    Fault("tiles-that-lie-behind-each-other-are-numbered-from-the-first", "core.layout:_parts_of").by(
        without("since"),
        "tests/core/test_layout.py::test_tiles_are_laid_out_as_tensors_and_their_parts_are_their_tensors",
    ),
)
