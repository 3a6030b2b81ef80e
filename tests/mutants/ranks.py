"""Faults in what ranks exchange, in which order, and in what becomes of them where one is gone."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, drop, replace, without

HERE = "tests/comm/test_collectives.py"
FAILURES = "tests/comm/test_failures.py"
OF_THREE = (f"{HERE}::test_a_reduce_has_the_bits_of_the_formula[3-dtype2-True]",)
DIFFERENT = f"{FAILURES}::test_ranks_that_do_different_things_raise_on_all_and_exchange_nothing"
SESSION = "tests/session/test_ranks.py"
SAVED = "tests/session/test_rank_checkpoints.py"
RESUMED = f"{SAVED}::test_ranks_that_stop_and_resume_have_the_bits_of_not_stopping[2 ranks-host]"
FAILS = f"{SAVED}::test_what_fails_on_one_rank_is_an_error_on_all_and_they_go_on"
LOADED = f"{SAVED}::test_what_not_all_ranks_can_load_changes_nothing_on_any"
BITS = f"{SESSION}::test_ranks_train_with_the_bits_of_one_process_that_has_all_gradients"
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
    Fault("ranks load the random state of rank 0", "session.saving:Saving._random_states").by(
        replace("of_all[self.all_ranks.rank]", "of_all[0]"), RESUMED
    ),
    Fault("a rank is sent another's chunk", "session.delivery:Delivery._send").by(
        replace("refs[collectives.ranks.rank]", "refs[0]"), RESUMED
    ),
    Fault("one chunk is sent for all that follow", "session.delivery:Delivery._sent").by(
        replace("rounds.there != PlaneRef(chunk, plane)", "rounds.there is None"), RESUMED
    ),
    Fault("all ranks write their own buffers", "session.saving:Saving._writers").by(
        replace("frozenset(buffers)", "frozenset()"), f"{SAVED}::test_an_export_has_the_buffers_of_rank_0"
    ),
    Fault("one rank writes all", "comm.all_ranks:share_out").by(
        replace("min(has)", "has[0]"),
        f"{SAVED}::test_each_rank_writes_its_share_of_the_bytes_and_sends_each_byte_once[2 ranks]",
    ),
    Fault("a rank that cannot write leaves the rounds", "session.delivery:Delivery.rounds").by(
        drop("self._send"), f"{FAILS}[no room 1]"
    ),
    Fault("an error of another rank is not raised", "comm.all_ranks:AllRanks.tell").by(
        replace("theirs is not None", "False"), f"{FAILS}[no room 1]"
    ),
    Fault("nobody looks whether all see the directory", "checkpoint.staged_files:_expect_there").by(
        replace("io.status(path) is None", "False"), f"{FAILS}[another directory 1]"
    ),
    Fault("ranks may load different checkpoints", "checkpoint.reader:StepReader.verify").by(
        replace("checksum != of_all[0][1]", "False"), f"{LOADED}[['run', 'other']-rank 1 another one, of step 2]"
    ),
    Fault("a copy is taken for the same file", "checkpoint.reader:StepReader.verify").by(
        replace("all(theirs == of_all[0] for theirs in of_all)", "True"), f"{LOADED}[['run', 'damaged']-checksum]"
    ),
    Fault("ranks may begin from different files", "session.loading:Loading.prepare").by(
        always("is_shared", nth=1), f"{SAVED}::test_ranks_begin_from_the_weights_of_files_that_all_have"
    ),
)
