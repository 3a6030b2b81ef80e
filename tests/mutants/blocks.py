"""Faults of blocks: when their parameters are ordinary ones, what of them is there in a backward, and which are bound at all."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import assign, drop, never, replace, without

FILE = "tests/session/test_blocks.py"
ORDINARY = f"{FILE}::test_parameters_are_ordinary_while_a_block_runs_and_placeholders_in_between"
KINDS = f"{FILE}::test_what_torch_does_inside_of_a_block_has_the_same_bits"
COMPILED = "tests/session/test_compiled.py"

BLOCKS: tuple[Mutant, ...] = (
    Fault("parameters-of-a-block-stay-of-our-class", "parameters.blocks:Blocks._enter").by(
        drop("bound.tensor().__class__ = ..."), ORDINARY
    ),
    Fault("a-block-that-is-left-leaves-its-parameters-ordinary", "parameters.blocks:Blocks._leave").by(
        drop("bound.tensor().__class__ = ..."), ORDINARY
    ),
    Fault("a-block-is-left-before-it-has-run", "parameters.weight_access:WeightAccess.enter").by(
        drop("bound.tensor().data = ..."), ORDINARY
    ),
    Fault("what-a-block-saves-holds-its-slots", "parameters.blocks:Blocks._call").by(
        replace("torch.is_grad_enabled()", "False", nth=2), ORDINARY
    ),
    Fault("a-change-in-a-block-is-not-noticed", "parameters.blocks:Blocks._call").by(
        drop("tell"), f"{KINDS}[changes in place-deferred]"
    ),
    Fault("other-memory-in-a-block-is-not-noticed", "parameters.blocks:Blocks._expect_same").by(
        never("before"), f"{FILE}::test_a_model_whose_blocks_do_what_only_uses_show_is_bound_by_use"
    ),
    Fault("what-a-block-passes-on-opens-it", "parameters.blocks:_nodes_of").by(
        replace("node._sequence_nr() >= first_node", "True"),
        f"{FILE}::test_what_a_block_only_passes_on_does_not_begin_its_backward",
    ),
    Fault("a-block-is-not-opened-by-its-backward", "parameters.blocks:Blocks.backward_begins").by(
        drop("_open"), f"{FILE}::test_what_a_block_only_passes_on_does_not_begin_its_backward"
    ),
    Fault("a-weight-whose-gradient-has-come-stays-in-its-block", "parameters.blocks:Blocks._arrives").by(
        drop("leave"), f"{FILE}::test_blocks_that_do_not_fit_are_bound_by_what_is_inside_of_them"
    ),
    Fault("what-a-block-shows-of-gradients-is-nothing", "parameters.gradient_access:GradientAccess.show").by(
        never("are_kept"), f"{FILE}::test_gradients_add_up_and_can_be_read_in_a_block"
    ),
    Fault("a-view-of-a-block-shows-the-old-weights", "step.training_deferred:DeferredTraining.step").by(
        never("blocks.bound"),
        "tests/session/test_faults_of_blocks.py::test_what_outlives_its_block_shows_what_its_weight_becomes_or_refuses[a view-deferred]",
    ),
    Fault("a-block-that-is-checkpointed-inside-reads-placeholders", "parameters.saved:SavedTensors.around_use").by(
        assign("is_inside", "False"), f"{KINDS}[checkpointed inside-deferred]"
    ),
    Fault("a-saved-output-holds-itself", "parameters.saved:SavedTensors.around_use").by(
        never("grad_fn"), f"{FILE}::test_a_graph_that_is_let_go_of_is_freed"
    ),
    Fault("blocks-that-do-not-fit-are-bound-all-the-same", "step.forwards:FittingBlocks._smaller").by(
        replace("beyond(...)", "[]"),
        f"{FILE}::test_blocks_that_do_not_fit_are_bound_by_what_is_inside_of_them",
    ),
    Fault("a-compiled-block-runs-uncompiled-where-it-does-not-fit", "parameters.blocks:Place.without").by(
        never("is_compiled"), f"{COMPILED}::test_a_compiled_block_that_does_not_fit_at_once_is_refused"
    ),
    Fault("gradients-that-come-in-parts-are-taken-for-whole", "tracing.twin:Twin.gradient").by(
        never("self._updated"), f"{FILE}::test_blocks_whose_gradients_come_in_parts_are_bound_by_use"
    ),
    Fault("a-block-is-compiled-with-us-in-it", "parameters.blocks:Blocks.__init__").by(
        drop("never_compile"),
        f"{COMPILED}::test_what_is_compiled_has_the_same_bits_and_all_graphs_after_two_steps[the model-before-eager-by block]",
    ),
    Fault("what-torch-compiles-meets-a-kernel-of-all-operations", "tracing.seen_operations:_install").by(
        drop("impl", nth=2),
        f"{COMPILED}::test_what_is_compiled_has_the_same_bits_and_all_graphs_after_two_steps[blocks-before-aot_eager-by block]",
    ),
    Fault("what-torch-tries-out-is-counted", "tracing.seen_operations:_show").by(
        replace("is_being_compiled()", "False"),
        "tests/tracing/test_seen_operations.py::test_what_torch_tries_out_to_compile_is_not_shown",
    ),
    Fault("a-block-without-room-runs-by-use-in-compiled-code", "parameters.blocks:Blocks._call").by(
        without("is_compiling()"),
        f"{COMPILED}::test_a_block_that_has_no_room_in_the_middle_of_compiled_code_is_refused_before_it_is_entered[the model]",
    ),
    Fault("a-model-of-blocks-cannot-be-pickled", "hooks:_telling").by(
        assign("make", "make", nth=1),
        f"{FILE}::test_what_needs_the_whole_model_and_can_have_it_has_the_same_bits[pickle]",
    ),
    Fault("what-somebody-holds-is-updated-in-its-chunk", "step.training_in_backward:InBackwardTraining._gather").by(
        never("held"),
        "tests/session/test_faults_of_blocks.py::test_what_outlives_its_block_shows_what_its_weight_becomes_or_refuses[a view-in_backward]",
    ),
)
