"""Faults in what ranks exchange, in which order, and in what becomes of them where one is gone."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, drop, replace, without

HERE = "tests/comm/test_collectives.py"
FAILURES = "tests/comm/test_failures.py"
OF_THREE = (f"{HERE}::test_a_reduce_has_the_bits_of_the_formula[3-dtype2-True]",)
DIFFERENT = f"{FAILURES}::test_ranks_that_do_different_things_raise_on_all_and_exchange_nothing"
SESSION = "tests/session/test_ranks.py"
BITS = f"{SESSION}::test_ranks_train_with_the_bits_of_one_process_that_has_all_gradients"
TREE = "tests/core/test_norm_tree.py"
SHARED = "tests/optim/test_shared_norm.py"
WRAPPED = "tests/session/test_wrapped.py::test_a_wrapper_around_a_managed_model_is_refused_before_anything_is_changed"
FAULTS = "tests/session/test_faults_of_ranks.py"
ODD = f"{FAULTS}::test_a_rank_that_does_something_else_is_an_error_on_all"
ALIKE = f"{FAULTS}::test_ranks_that_are_not_alike_are_refused_before_anything_is_changed"
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
    Fault("sums of subtrees are put one after the other", "optim.shared_norm:SharedNorm._whole").by(
        replace("[row for row, _ in share.subtrees]", "list(range(len(share.subtrees)))"),
        f"{SHARED}::test_every_rank_has_the_sums_of_one",
    ),
    Fault("the rows of a rank take the place of another's", "optim.shared_norm:SharedNorm._whole").by(
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
    Fault("a mesh shares over all ranks of the program", "session.assemble:assemble").by(
        replace("Ranks(group)", "Ranks()"),
        "tests/session/test_meshes.py::test_sessions_of_one_process_have_groups_of_their_own",
    ),
    Fault("a model that DDP calls is called", "step.events:Events.before_forward").by(
        drop("expect_no_wrapper"),
        f"{WRAPPED}[DistributedDataParallel-True-Sequential was called by DistributedDataParallel]",
    ),
    Fault("DDP is given a model that lies in chunks", "parameters.attributes:Attributes._detach").by(
        drop("expect_no_wrapper"),
        f"{WRAPPED}[DistributedDataParallel-False-by DistributedDataParallel, around a managed model]",
    ),
    Fault("a gradient that is assigned is averaged by nobody", "parameters.gradient_access:GradientAccess.set").by(
        replace("self.are_shared", "False"),
        f"{FAULTS}::test_a_gradient_that_is_assigned_is_refused_and_may_be_changed_in_place",
    ),
    Fault("ranks may take other steps", "comm.collectives:Collectives._issue").by(
        replace("self.past", "''"), f"{ODD}[another_rate-after step 2 by hyper-parameters-1]"
    ),
    Fault("a weight that one rank reads is gathered for a forward", "step.events:_notice_use").by(
        always("in_forward", nth=2), f"{ODD}[reads_a_weight-for 0.0.weight outside of a forward-0]"
    ),
    Fault("a forward is refused by one rank", "step.gathering:Gathering.refused").by(
        replace("self.collectives.agree(...)", "[b'%d' % enough]"),
        f"{FAULTS}::test_a_budget_refused_on_one_rank_is_refused_on_all",
    ),
    Fault("the budget that is enough is one rank's", "plan.fit:of_machine").by(
        replace("ranks * enough", "enough"),
        f"{FAULTS}::test_a_budget_refused_on_all_ranks_says_which_is_enough",
    ),
    Fault("other ranks do not hear of what manage refuses", "session.assemble:assemble").by(
        replace("collectives.close(...)", "None"),
        f"{ALIKE}[small-rank 1: manage() has ended with BudgetError: host memory is-BudgetError]",
    ),
    Fault("a deferred model has the values of its random state now", "deferred.recipe:digest").by(
        replace("call.random_state", "torch.get_rng_state()"), f"{FAULTS}::test_a_deferred_model_is_drawn_alike"
    ),
    Fault("other ranks do not hear of an exception", "session.session:Session.__exit__").by(
        drop("collectives.agree"), f"{FAULTS}::test_an_exception_on_one_rank_is_one_on_all[in_forward-Mine]"
    ),
    Fault("ranks need not be alike", "session.alike:expect_alike").by(
        replace("others", "()", nth=2), f"{SESSION}::test_ranks_that_are_not_alike_are_refused_by_manage"
    ),
)
