"""Faults of steps in parts, and of ranks that come and go."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import drop, replace

RESIZES = "tests/elastic/test_resizes.py"
ONE = f"{RESIZES}::test_one_process_computes_what_plain_torch_does"
THREE = f"{RESIZES}::test_a_fixed_size_has_the_bits_of_one[4-3]"
TWO = f"{RESIZES}::test_a_fixed_size_has_the_bits_of_one[4-2]"
COMES = f"{RESIZES}::test_the_first_rank_keeps_its_process[2-3-1]"
GROWN = "tests/elastic/test_batches_that_grow.py"
LINEAR = f"{GROWN}::test_any_batches_have_the_bits_of_plain_torch[linear]"
BROKEN = f"{GROWN}::test_a_job_that_is_broken_goes_on_with_the_batch_that_it_had"
BESIDE = "tests/elastic/test_elastic_run.py::test_processes_beside_the_ranks_may_end"

ELASTIC: tuple[Mutant, ...] = (
    Fault("the mean of parts is not taken", "session.step_parts:StepParts.complete").by(
        drop("if self._count > 1: ..."), ONE
    ),
    Fault("ranks train outside of steps", "session.build:Ground.parts").by(
        drop("if is_elastic and collectives is not None: ..."), f"{RESIZES}::test_ranks_train_in_steps_alone"
    ),
    Fault("a second loop begins with the end of the first", "comm.job:ElasticJob.begins_loop").by(
        replace("self._given.add(...)", "0"), f"{RESIZES}::test_what_is_refused"
    ),
    Fault("a process that waits is a rank", "elastic.supervisor:Supervisor._ended").by(
        replace("member in members or self._ends_with is not None or self._read('over') is not None", "True"), BESIDE
    ),
    Fault("a size asked for early is forgotten", "elastic.supervisor:Supervisor._follow_program").by(
        replace("self._ask(...)", "None"), BESIDE
    ),
    Fault("all parts draw the same", "session.sample_order:Draws.seed_of").by(
        replace("keyed_seed(...)", "self.seed"), ONE
    ),
    Fault("an epoch begins with the samples of the last", "session.sample_order:SampleOrder.indices").by(
        replace("keyed_seed(...)", "self.seed"),
        "tests/elastic/test_sample_order.py::test_each_sample_is_seen_once_an_epoch",
    ),
    Fault("a rank without a part in the last round does nothing", "session.step_parts:StepParts.complete").by(
        drop("if self._serves: ..."), THREE
    ),
    Fault("what a rank that serves has not is added as zeros", "parameters.exchange:Exchange._rows").by(
        replace("tuple(...)", "tuple(range(self.layout.size))", nth=1), THREE
    ),
    Fault("parts of a round are added from the last", "step.gradients:Gradients.add_shares").by(
        replace("enumerate(rows_of[name])", "enumerate(rows_of[name][::-1])"), TWO
    ),
    Fault("a rank that joins begins without counts of updates", "session.resizing:Resizing._install").by(
        replace("new.steps.update(...)", "None"), COMES
    ),
    Fault("moments of those that go are lost", "session.resizing:_units").by(
        replace("ref.plane != GRAD", "ref.plane == WEIGHT"), COMES
    ),
    Fault("a rank that joins begins its schedule anew", "session.steps:StepsToDo._resize").by(
        drop("if joins: ..."), COMES
    ),
    Fault("a loss leaves a schedule where it was", "session.steps:StepsToDo._load").by(
        drop("_load_states"), f"{BROKEN}[rank killed]"
    ),
    Fault("a batch that has grown has the rates of the first", "session.steps:StepsToDo._begin_step").by(
        replace("self._draws.lr_factor(self.step)", "1.0"), LINEAR
    ),
    Fault("rates of a grown batch are there at once", "session.sample_order:Draws.lr_factor").by(
        replace("not before or seen >= self.warm_up", "True"), LINEAR
    ),
    Fault("a loss takes a batch back to what it was at first", "elastic.supervisor:Supervisor._recover").by(
        replace("read_generation(...).batches", "()"), f"{BROKEN}[rank killed]"
    ),
    Fault("a job that begins again has the batch of its beginning", "session.steps:StepsToDo._load").by(
        replace("extra['batches']", "()"), f"{BROKEN}[stopped]"
    ),
    Fault("Ctrl-C comes between notes of a backward's gradients", "step.late_planes:LatePlanes.open").by(
        replace("InterruptionsPutOff()", "__import__('contextlib').nullcontext()"),
        "tests/session/test_lanes.py::test_an_interruption_at_any_line_loses_nothing[cpu+disk-homes-0]",
    ),
    Fault("a moment that lasts is not looked at in its middle", "step.room:HostRoom.look_again").by(
        drop("if self._is_bounded: ..."),
        "tests/elastic/test_memory_of_resizes.py::test_no_rank_holds_more_than_its_share_in_a_resize[280-True]",
    ),
    Fault("all that come are put at the end", "core.resharding:order_of_least_movement").by(
        replace("tuple(...)", "(*present, *joining)[:size]"),
        "tests/elastic/test_resharding.py::test_the_first_stays_and_little_more_than_must_be_is_moved[3-2]",
    ),
)
