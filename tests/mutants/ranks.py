"""Faults in what ranks exchange, in which order, and in what becomes of them where one is gone."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, assign, drop, replace, returns, without

HERE = "tests/comm/test_collectives.py"
FAILURES = "tests/comm/test_failures.py"
OF_THREE = (f"{HERE}::test_a_reduce_has_the_bits_of_the_formula[3-dtype2-True]",)
DIFFERENT = f"{FAILURES}::test_ranks_that_do_different_things_raise_on_all_and_exchange_nothing"
SESSION = "tests/session/test_ranks.py"
BITS = f"{SESSION}::test_ranks_train_with_the_bits_of_one_process_that_has_all_gradients"
WORLD = "tests/cli/test_world.py"
ROWS = f"{WORLD}::test_each_rank_has_its_rows_of_the_batch_and_the_log_the_mean_of_their_losses"
ENDS = f"{WORLD}::test_an_error_is_said_once_and_all_ranks_end_alike"
FORECASTS = "tests/session/test_forecasts_of_ranks.py"
SENT = f"{FORECASTS}::test_what_a_rank_sends_is_foreseen_to_the_byte"
KILLED = f"{FAILURES}::test_a_rank_that_is_killed_is_named_by_all_others"

RANKS: tuple[Mutant, ...] = (
    Fault("ranks are summed in another order", "comm.collectives:sum_in_rank_order").by(
        replace("pieces[1:]", "_.flip(0)"), *OF_THREE
    ),
    Fault("a sum over ranks is divided by their number", "comm.collectives:sum_in_rank_order").by(
        replace("total.mul_(1 / size)", "total.div_(size)"), *OF_THREE
    ),
    Fault("what out holds is not added to", "comm.collectives:sum_in_rank_order").by(drop("target.add_"), *OF_THREE),
    Fault("announcements are not compared", "comm.collectives:Collectives._announce").by(
        always("len(set(rows)) == 1"), f"{DIFFERENT}[another name]"
    ),
    Fault("announcements are compared as far as they can be read", "comm.collectives:Collectives._announce").by(
        without("hashlib.sha256(text).digest()[:_DIGEST_BYTES]"),
        f"{DIFFERENT}[names that are the same up to their end]",
    ),
    Fault("flags of other ranks are dropped", "comm.collectives:Collectives.reduce").by(
        drop("flags.bitwise_or_"), f"{HERE}::test_flags_are_those_of_any_rank"
    ),
    Fault("a collective does not wait for what it comes after", "comm.collectives:Collectives._do").by(
        drop("ticket.wait"),
        f"{HERE}::test_a_collective_begins_when_what_it_comes_after_has_ended_and_so_has_the_one_before",
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
    Fault("weights stay gathered after a step", "step.training_deferred:DeferredTraining.step").by(
        drop("self.gathering.gathered.forget"), f"{BITS}[2 ranks-mlp-1-None-True-arguments0]"
    ),
    Fault("what rank 0 has no gradient of has none", "step.gathering:Gathering._agree").by(
        replace("any(there)", "there[0]"), f"{BITS}[2 ranks-experts-2-0.001-False-arguments3]"
    ),
    Fault("gradients that wait are not added to", "step.gathering:Gathering._with_kept").by(
        drop("add_"), f"{BITS}[2 ranks-mlp-3-None-False-arguments2]"
    ),
    Fault("a norm is of a rank's own share", "step.training_deferred:DeferredTraining._take_norm").by(
        replace("self.gathering is not None", "False"), f"{BITS}[2 ranks-mlp-2-0.001-True-arguments1]"
    ),
    Fault("each rank has the budget of its machine", "step.budgets:find_budgets").by(
        replace("local_ranks", "1", nth=1), f"{BITS}[2 ranks-mlp-1-None-True-arguments5]"
    ),
    Fault("all ranks keep the first share", "core.shard_layout:ShardLayout.tiles").by(
        replace("self.rank", "0"),
        "tests/core/test_shard_layout.py::test_the_parts_of_all_ranks_are_each_tensor_once",
    ),
    Fault("ranks need not be alike", "session.alike:expect_alike").by(
        replace("others", "()", nth=2), f"{SESSION}::test_ranks_that_are_not_alike_are_refused_by_manage"
    ),
    Fault("all ranks have the first rows of a batch", "cli.world:World.rows").by(replace("each * rank", "0"), ROWS),
    Fault("the log has the loss of one rank", "cli.world:World.mean").by(returns("value"), ROWS),
    Fault("an error of one rank is its own", "cli.world:World.together").by(
        assign("first", "error"), f"{ENDS}[arguments4-2-only-of-1.txt: no such file]"
    ),
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
        replace("sum(others, first).mul(1 / len(of_ranks))", "first"), ROWS
    ),
    Fault("ranks share each machine's budget as if it were theirs alone", "session.forecast:_given").by(
        replace("which.local_size", "1"),
        f"{FORECASTS}::test_the_smallest_budget_that_is_foreseen_is_the_machines_and_fits[2 ranks]",
    ),
    Fault("the block called last is gathered anew for its backward", "session.forecast:_sent_bytes").by(
        replace("block != last", "True"), f"{SENT}[2 ranks-gpt2]"
    ),
    Fault("a frozen block sends gradients", "session.forecast:_sent_bytes").by(
        replace("not layout.is_frozen(c)", "True"), f"{SENT}[2 ranks-frozen_llama]"
    ),
    Fault("a config's whole batch is one rank's", "engine.initialize:initialize_engine").by(
        without("ranks="),
        "tests/session/test_engine_of_ranks.py::test_the_loop_has_the_bits_of_one_process_with_all_gradients",
    ),
)
