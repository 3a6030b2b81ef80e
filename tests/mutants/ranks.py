"""Faults in what ranks exchange, in which order, and in what becomes of them where one is gone."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, never, replace, returns, without
from tests.parity.cover import few_ranks
from tests.parity.matrix import RANKS as OF_RANKS

HERE = "tests/comm/test_collectives.py"
FAILURES = "tests/comm/test_failures.py"
OF_THREE = (f"{HERE}::test_a_reduce_has_the_bits_of_the_formula[3-dtype2]",)
DIFFERENT = f"{FAILURES}::test_ranks_that_do_different_things_raise_on_all_and_exchange_nothing"
SESSION = "tests/session/test_ranks.py"
SAVED = "tests/session/test_rank_checkpoints.py"
RESUMED = f"{SAVED}::test_ranks_that_stop_and_resume_have_the_bits_of_not_stopping[2 ranks-host]"
FAILS = f"{SAVED}::test_what_fails_on_one_rank_is_an_error_on_all_and_they_go_on"
LOADED = f"{SAVED}::test_what_not_all_ranks_can_load_changes_nothing_on_any"
BITS = f"{SESSION}::test_ranks_train_with_the_bits_of_one_process_that_has_all_gradients"
TREE = "tests/core/test_norm_tree.py"
SHARED = "tests/optim/test_shared_norm.py"
WRAPPED = "tests/session/test_wrapped.py::test_a_wrapper_around_a_managed_model_is_refused_before_anything_is_changed"
BYTES = (
    "tests/session/test_exchange.py"
    "::test_a_rank_sends_each_weight_once_in_a_forward_and_once_in_a_backward_and_each_gradient_once"
)
ORDER = "tests/parameters/test_call_order.py"
STEP = "a_step_gathers_one_block_ahead_and_sends_a_block_when_the_next_backward_begins"
FAULTS = "tests/session/test_faults_of_ranks.py"
ODD = f"{FAULTS}::test_a_rank_that_does_something_else_is_an_error_on_all"
ALIKE = f"{FAULTS}::test_ranks_that_are_not_alike_are_refused_before_anything_is_changed"
WORLD = "tests/cli/test_world.py"
ROWS = f"{WORLD}::test_each_rank_has_its_rows_of_the_batch_and_the_log_the_mean_of_their_losses"
ENDS = f"{WORLD}::test_an_error_is_said_once_and_all_ranks_end_alike"
FORECASTS = "tests/session/test_forecasts_of_ranks.py"
SENT = f"{FORECASTS}::test_what_a_rank_sends_is_foreseen_to_the_byte"
KILLED = f"{FAILURES}::test_a_rank_that_is_killed_is_named_by_all_others"


def of_a_row(*words: str) -> str:
    """The test of the first of the few rows of ranks with these words."""
    row = next(row for row in few_ranks(OF_RANKS) if all(word in str(row) for word in words))
    return f"tests/parity/test_worlds.py::test_no_bit_depends_on_how_ranks_share_model_data[{row}]"


LONG = "tests/session/test_long_sequences.py"

RANKS: tuple[Mutant, ...] = (
    Fault("ranks are summed in another order", "comm.collectives:sum_in_rank_order").by(
        replace("pieces[1:]", "_.flip(0)"), *OF_THREE
    ),
    Fault("a sum over ranks is divided by their number", "comm.collectives:sum_in_rank_order").by(
        replace("total.mul_(1 / averaged)", "total.div_(averaged)"), *OF_THREE
    ),
    Fault("announcements are not compared", "comm.collectives:Collectives._announce").by(
        always("len(set(rows)) == 1"), f"{DIFFERENT}[another name]"
    ),
    Fault("announcements are compared as far as they can be read", "comm.collectives:Collectives._announce").by(
        without("hashlib.sha256(text).digest()[:_DIGEST_BYTES]"),
        f"{DIFFERENT}[names that are the same up to their end]",
    ),
    Fault("flags of other ranks are dropped", "comm.collectives:Collectives.exchange").by(
        drop("mine.bitwise_or_"), f"{HERE}::test_flags_are_those_of_any_rank"
    ),
    Fault("a failure of one rank's own is kept to itself", "comm.collectives:Collectives._do").by(
        drop("self._watch.note"),
        f"{FAILURES}::test_a_rank_whose_own_work_fails_keeps_its_error_and_the_others_hear_it",
    ),
    Fault("a rank that has left fails what it took part in", "comm.watch:Watch.leave").by(
        without("self.position.done"), f"{HERE}::test_a_rank_that_is_done_and_gone_does_not_fail_what_it_took_part_in"
    ),
    Fault("processes are not looked at", "comm.watch:Watch._run").by(
        drop("self._look_at_processes"), f"{KILLED}[1-between]", f"{KILLED}[1-in it]"
    ),
    Fault("a zombie is alive", "comm.watch:Process.is_gone").by(
        replace("'ZX'", "'X'"),
        f"{FAILURES}::test_a_process_is_gone_once_it_has_ended_whoever_asks_for_its_status",
    ),
    Fault("a forked child says that its rank has left", "comm.collectives:Collectives.close").by(
        without("os.getpid() != self._process"), f"{HERE}::test_the_end_of_a_forked_child_is_not_that_of_a_rank"
    ),
    Fault("the end of a program waits for what torch has under way", "comm.ranks:Ranks.close").by(
        drop("ctypes.pythonapi.Py_IncRef"), f"{FAILURES}::test_a_program_that_has_lost_a_rank_comes_to_its_end"
    ),
    Fault("weights stay gathered after a step", "parameters.call_order:CallOrder.forget").by(
        drop("self.there.clear"), f"{BITS}[2 ranks-mlp-1-None-True-arguments0]"
    ),
    Fault("what rank 0 has no gradient of has none", "parameters.exchange:Exchange._rows").by(
        replace("enumerate(flags)", "enumerate(flags[:1])"), f"{BITS}[2 ranks-experts-2-0.001-False-arguments3]"
    ),
    Fault("what rank 0 has no gradient of has none in its block", "parameters.exchange:Exchange.receive").by(
        replace("self._rows(...)", "self._rows(self._sent_names, of_all if self.layout.rank else [bytes(size)])"),
        f"{BITS}[2 ranks-experts-2-0.001-False-arguments3]",
    ),
    Fault("gradients that wait are not added to", "parameters.exchange:Exchange._ready").by(
        drop("add_"), f"{BITS}[2 ranks-mlp-3-None-False-arguments2]"
    ),
    Fault("gradients of what no block owns go with the next block", "parameters.exchange:Exchange.send").by(
        replace("self._ready(names)", "self._ready(list(self.layout.slices))"), of_a_row("scalars-none-x4")
    ),
    Fault("a block is sent when its own backward begins", "parameters.call_order:CallOrder.begin_backward").by(
        replace("self._send(left)", "self._send(block)"), f"{ORDER}::test_{STEP}"
    ),
    Fault(
        "the block that was called last is let go of before its backward", "parameters.call_order:CallOrder._keep"
    ).by(without("('', block)", nth=1), f"{ORDER}::test_{STEP}"),
    Fault("nothing is gathered ahead", "parameters.call_order:CallOrder._begin").by(
        never("ahead"), f"{ORDER}::test_two_blocks_are_there_at_most_and_the_last_one_stays"
    ),
    Fault(
        "a block is sent before all of its calls have come back", "parameters.call_order:CallOrder.begin_backward"
    ).by(
        without("not self._calls.get(left)"),
        f"{ORDER}::test_a_block_with_calls_that_are_still_to_come_back_waits_for_them",
    ),
    Fault("what is used while it comes is not waited for", "parameters.call_order:BlockWeights.wait").by(
        drop("coming.wait"), f"{BITS}[2 ranks-mlp-1-None-True-arguments0]"
    ),
    Fault("a norm is of a rank's own share", "step.training_deferred:DeferredTraining._begin_norm").by(
        replace("self.gathering is not None", "False"), f"{BITS}[2 ranks-mlp-2-0.001-True-arguments1]"
    ),
    Fault("sums are those of smaller subtrees than there are", "core.norm_tree:subtrees").by(
        replace("row % (2 << level) == 0", "level < 3"),
        f"{TREE}::test_subtrees_are_aligned_disjoint_and_as_large_as_they_can_be",
    ),
    Fault("a row that a cut goes through is summed with its neighbours", "core.norm_tree:subtrees").by(
        replace("first_whole <= row < end_whole", "True"),
        f"{TREE}::test_subtrees_are_aligned_disjoint_and_as_large_as_they_can_be",
    ),
    Fault("sums of subtrees are put one after the other", "optim.norm:SharedNorm._whole").by(
        replace("[row for row, _ in share.subtrees]", "list(range(len(share.subtrees)))"),
        f"{SHARED}::test_every_rank_has_the_sums_of_one",
    ),
    Fault("the rows of a rank take the place of another's", "optim.norm:SharedNorm._whole").by(
        replace("area.view(-1, ROW_NUMEL).index_add_", "area.view(-1, ROW_NUMEL).index_copy_"),
        f"{SHARED}::test_cuts_may_go_through_a_row[2-16]",
    ),
    Fault("each rank has the budget of its machine", "step.budgets:find_budgets").by(
        replace("local_ranks", "1", nth=1), f"{BITS}[2 ranks-mlp-1-None-True-arguments5]"
    ),
    Fault("all ranks keep the first share", "core.shard_layout:ShardLayout.tiles").by(
        replace("self.rank", "0"),
        "tests/core/test_shard_layout.py::test_the_parts_of_all_ranks_are_each_tensor_once",
    ),
    Fault("a mesh shares over all ranks of the program", "comm.ranks:ranks_of").by(
        replace("partial(Ranks.of_group, members, averaged=mesh['dp'].size())", "Ranks.of_group"),
        "tests/session/test_meshes.py::test_sessions_of_one_process_have_groups_of_their_own",
    ),
    Fault("gradients are averaged over ranks that share a batch", "comm.ranks:ranks_of").by(
        replace("mesh['dp'].size()", "None"), f"{LONG}::test_ranks_with_parts_of_a_batch_train_as_one[1-2-ring]"
    ),
    Fault("a model that works together with others is managed alone", "comm.ranks:ranks_of").by(
        never("sizes.get(name, 1) != size"), f"{LONG}::test_a_model_is_managed_over_the_ranks_that_it_works_with"
    ),
    Fault("a model that DDP calls is called", "step.events:Events.before_forward").by(
        drop("expect_no_wrapper"),
        f"{WRAPPED}[before]",
    ),
    Fault("DDP is given a model that lies in chunks", "parameters.attributes:Attributes._detach").by(
        drop("expect_no_wrapper"),
        f"{WRAPPED}[after]",
    ),
    Fault("what stays fp32 whole is gathered with the rest", "core.shard_layout:ShardLayout.group_of").by(
        replace("self.is_whole(chunk)", "False"),
        "tests/core/test_shard_layout.py::test_what_stays_fp32_whole_is_gathered_apart_from_the_rest_of_its_block",
    ),
    Fault("gradients of one backward travel unrounded", "parameters.exchange:Exchange._reduce").by(
        replace("self._travel.sent", "torch.float32"), of_a_row("fp16-fp32-world", "-x1-")
    ),
    Fault("sums of several backwards travel rounded", "parameters.exchange:Exchange._reduce").by(
        replace("self.has_waited", "False"), of_a_row("-fp32-world", "nosync")
    ),
    Fault("an overflow in what ranks share is not found", "step.gradients:Gradients._put").by(
        never("finds_overflow"),
        f"{SESSION}::test_an_overflow_on_any_rank_skips_the_step_on_all[2 ranks-on rank 1-True]",
    ),
    Fault("an overflow is a rank's own", "step.training_deferred:DeferredTraining.overflowed").by(
        replace("shared is None", "True"),
        f"{SESSION}::test_an_overflow_on_any_rank_skips_the_step_on_all[2 ranks-in an element-False]",
    ),
    Fault("a change by hand shows unrounded values", "step.gathering:Gathering.changed").by(
        drop("wait"),
        f"{SESSION}::test_a_change_by_hand_becomes_the_masters_of_the_elements_that_change[2 ranks-bf16-fp32]",
    ),
    Fault("weights are widened over those that are still to be", "parameters.call_order:_widen").by(
        replace("(numel - start) // 2", "numel - start - 1"),
        f"{SESSION}::test_a_change_by_hand_becomes_the_masters_of_the_elements_that_change[2 ranks-bf16-fp32]",
    ),
    Fault(
        "gradients that wait are left out by who clips", "step.training_deferred:DeferredTraining._expect_gradients"
    ).by(
        never("self.gathering.kept"),
        f"{SESSION}::test_gradients_are_those_of_all_ranks_outside_of_no_sync_and_nobodys_inside",
    ),
    Fault("a gradient that is assigned is averaged by nobody", "parameters.gradient_access:GradientAccess.set").by(
        replace("self.are_shared", "False"),
        f"{FAULTS}::test_a_gradient_that_is_assigned_is_refused_and_may_be_changed_in_place",
    ),
    Fault("ranks may take other steps", "comm.collectives:Collectives._issue").by(
        replace("self.past", "''"), f"{ODD}[another_rate]"
    ),
    Fault("a weight that one rank reads is gathered for a forward", "step.events:_gathered").by(
        never("is_outside", nth=2), f"{ODD}[reads_a_weight]"
    ),
    Fault("a forward is refused by one rank", "step.gathering:Gathering.refused").by(
        replace("self.collectives.agree(...)", "[enough]"),
        f"{FAULTS}::test_a_budget_refused_on_one_rank_is_refused_on_all",
    ),
    Fault("the budget that is enough is one rank's", "plan.fit:of_machine").by(
        replace("ranks * enough", "enough"),
        f"{FAULTS}::test_a_budget_refused_on_all_ranks_says_which_is_enough",
    ),
    Fault("other ranks do not hear of what manage refuses", "session.manage:assemble").by(
        replace("one.close(...)", "None"),
        f"{ALIKE}[small-rank 1: manage() has ended with BudgetError: host memory is-BudgetError]",
    ),
    Fault("a deferred model has the values of its random state now", "deferred.recipe:digest").by(
        replace("call.random_state", "torch.get_rng_state()"), f"{FAULTS}::test_a_deferred_model_is_drawn_alike"
    ),
    Fault("other ranks do not hear of an exception", "session.session:Session.__exit__").by(
        drop("collectives.agree"), f"{FAULTS}::test_what_ends_one_rank_is_an_error_on_all[in_forward]"
    ),
    Fault("ranks need not be alike", "session.checks:expect_alike").by(
        replace("others", "()", nth=2), f"{ALIKE}[clipping-the options differ-RankError]"
    ),
    Fault("ranks load the random state of rank 0", "session.saving:Saving._random_states").by(
        replace("of_all[self.all_ranks.rank]", "of_all[0]"), RESUMED
    ),
    Fault("a rank is sent another's chunk", "session.delivery:Delivery._all").by(
        replace("refs[collectives.ranks.rank]", "refs[0]"), RESUMED
    ),
    Fault("one chunk is sent for all that follow", "session.delivery:Delivery._sent").by(
        replace("self._there != PlaneRef(chunk, plane)", "self._there is None"), RESUMED
    ),
    Fault("all ranks write their own buffers", "session.saving:Saving._writers").by(
        replace("frozenset(buffers)", "frozenset()"),
        f"{SAVED}::test_an_export_by_all_ranks_loads_with_equal_logits_and_has_the_buffers_of_rank_0",
    ),
    Fault("one rank writes all", "comm.all_ranks:share_out").by(
        replace("min(has)", "has[0]"),
        f"{SAVED}::test_each_rank_writes_its_share_of_the_bytes_and_sends_each_byte_once",
    ),
    Fault("a rank that cannot write leaves the rounds", "session.delivery:Delivery.rounds").by(
        drop("for _ in self._left: ..."),
        FAILS,
        "tests/session/test_blocks_2d.py::test_what_fails_on_one_rank_in_saving_and_loading_is_an_error_on_all_and_they_go_on",
    ),
    Fault("an error of another rank is not raised", "comm.all_ranks:AllRanks.together").by(
        replace("theirs is not None", "False"),
        FAILS,
        f"{ENDS}[arguments4-2-only-of-1.txt: no such file]",
    ),
    Fault("nobody looks whether all see the directory", "checkpoint.staged_files:_expect_there").by(
        replace("io.status(path) is None", "False"), FAILS
    ),
    Fault("ranks may load different checkpoints", "checkpoint.reader:StepReader.verify").by(
        replace("checksum != of_all[0][1]", "False"), LOADED
    ),
    Fault("a copy is taken for the same file", "checkpoint.reader:StepReader.verify").by(
        replace("all(theirs == of_all[0] for theirs in of_all)", "True"), LOADED
    ),
    Fault("ranks may begin from different files", "session.loading:Loading.prepare").by(
        always("is_shared", nth=1), f"{SAVED}::test_ranks_begin_from_the_weights_of_files_that_all_have"
    ),
    Fault("all ranks have the first rows of a batch", "cli.world:World.rows").by(replace("each * group", "0"), ROWS),
    Fault("the log has the loss of one rank", "cli.world:World.mean").by(returns("value"), ROWS),
    Fault("all ranks say an error", "cli.world:World.tells").by(
        returns("True", nth=2), f"{ENDS}[arguments2-3-what fits is for the 2 ranks of a machine]"
    ),
    Fault("ranks may have other texts", "cli.run:run").by(
        drop("world.expect_alike"), f"{ENDS}[arguments3-2-of rank 1 and of rank 0 differ]"
    ),
    Fault("a signal to one rank stops that one", "cli.loop:TrainingRun._is_to_stop").by(
        assign("asked", "[self.signals.requested]"),
        f"{WORLD}::test_a_signal_to_one_rank_stops_all_after_the_same_step",
    ),
    Fault("plain steps have the gradients of the first rank", "cli.plain:PlainRun._add").by(
        replace("sum(others, first).mul(1 / len(of_ranks))", "first"),
        f"{WORLD}::test_under_torchrun_it_has_the_bits_of_one_process_and_speaks_with_one_voice",
    ),
    Fault("ranks share each machine's budget as if it were theirs alone", "session.forecast:_given").by(
        replace("which.local_size", "1"),
        f"{FORECASTS}::test_the_smallest_budget_that_is_foreseen_is_the_machines_and_fits",
    ),
    Fault("a frozen block sends gradients", "parameters.exchange:Exchange.send").by(
        replace("self.binding.by_name[name].parameter.requires_grad", "True"), f"{BYTES}[2 ranks-frozen]"
    ),
    Fault("gradients are not foreseen to be sent", "parameters.exchange:Nobody.reduce").by(
        drop("self.sent_bytes"), f"{SENT}[2 ranks-gpt2]"
    ),
    Fault("a config's whole batch is one rank's", "engine:initialize_engine").by(
        without("ranks="),
        "tests/session/test_engine_of_ranks.py::test_the_loop_has_the_bits_of_one_process_with_all_gradients",
    ),
)
