"""Faults of changes in place: what a forward does to its own weights, and operations of whose names nothing tells that they write."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, never, replace, returns, without

LINE = "tests/session/test_scripts.py::test_a_line_means_what_it_means_in_plain_pytorch"
TESTS = "tests/session/test_forward_changes.py"
CARRIED = f"{TESTS}::test_a_weight_that_the_forward_changes_has_the_bits_of_plain_pytorch"

CHANGES: tuple[Mutant, ...] = (
    Fault("a-function-that-writes-is-taken-for-one-that-reads", "parameters.functions:effects_of").by(
        replace("not writes", "True"), f"{CARRIED}[clamp-bf16-deferred-emulated]"
    ),
    Fault("a-forwards-own-change-is-not-in-the-trace", "tracing.twin:Twin.changed").by(
        replace("self.moment", "lambda *_: None"), f"{CARRIED}[embedding-fp32-deferred-cpu+disk]"
    ),
    Fault("a-plan-goes-on-after-a-change-that-its-trace-has-not", "step.events:Events.changed").by(
        never("STEP"), f"{TESTS}::test_a_change_that_depends_on_more_than_shapes[fp32-done and not foreseen]"
    ),
    Fault("a-change-is-no-part-of-a-stretch", "step.executor:Executor.change_phase").by(
        returns("Phase.STEP", nth=2), f"{CARRIED}[clamp-bf16-deferred-emulated]"
    ),
    Fault("a-lookup-that-shortens-rows-is-taken-to-read", "parameters.functions:writes_to").by(
        replace("_RENORMALISE", "()"), f"{CARRIED}[embedding-bf16-deferred-emulated]"
    ),
    Fault("what-torch-passes-by-name-is-not-seen-to-be-written", "parameters.functions:writes_to").by(
        replace("list(...)", "None"),
        "tests/session/test_sixteen_bits.py::test_a_change_by_hand_is_carried_into_the_master[bf16-by_init]",
    ),
    Fault("an-unseen-change-keeps-every-elements-master", "parameters.changes:Changes._carry").by(
        never("before"),
        f"{TESTS}::test_a_change_that_could_not_be_carried_into_a_master_is_refused_before_the_first_step",
    ),
    Fault("what-batch-norm-averages-into-is-taken-to-be-read", "parameters.functions:uncounted").by(
        always("first"), f"{TESTS}::test_a_parameter_that_batch_norm_averages_into[fp32]"
    ),
    Fault("what-a-recomputation-changes-again-is-out-of-date", "parameters.saved:SavedTensors.unpack").by(
        replace("saved.is_recomputed and self.access.recomputed.get(...) == now", "False"),
        f"{TESTS}::test_a_block_that_is_computed_again_changes_its_weights_again[fp32-non-reentrant]",
    ),
    Fault("under-checkpointing-no-change-is-noticed", "parameters.saved:SavedTensors.unpack").by(
        without("self.access.recomputed.get(...) == now"),
        f"{TESTS}::test_a_weight_changed_by_hand_before_a_checkpointed_block_is_computed_again_is_an_error",
    ),
    Fault("a-view-is-used-before-what-is-pending-is-done", "parameters.binding:Binding._use_bound").by(
        never("aliases"),
        f"{LINE}[hold(2) forward backward step held(2)*=.5 zero train held(2) free train-fp32-emulated]",
    ),
    Fault("torch-sees-a-hook-where-it-computes-in-one-go", "hooks:_without_hooks").by(
        replace("all(...)", "False"),
        f"{TESTS}::test_an_encoder_is_computed_in_one_go_where_plain_pytorch_does_that[True-False-True]",
    ),
    Fault("a-change-whose-master-was-not-reached-stays", "step.weight_masters:Masters.carry").by(
        replace("before is not None", "before is None"),
        f"{TESTS}::test_a_change_by_hand_whose_master_cannot_be_reached_is_no_change",
    ),
    Fault("a-trial-run-brings-parts-of-a-gradient-one-by-one", "tracing.twin:Twin.gradient").by(
        never("adds_up"), f"{CARRIED}[clamp-bf16-fp32-deferred-emulated]"
    ),
)
