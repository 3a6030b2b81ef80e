"""Faults of steps in parts, and of ranks that come and go."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import drop, replace

RESIZES = "tests/elastic/test_resizes.py"
ONE = f"{RESIZES}::test_one_process_computes_what_plain_torch_does"
THREE = f"{RESIZES}::test_a_fixed_size_has_the_bits_of_one[4-3]"
TWO = f"{RESIZES}::test_a_fixed_size_has_the_bits_of_one[4-2]"
COMES = f"{RESIZES}::test_the_first_rank_keeps_its_process[2-3-1]"

ELASTIC: tuple[Mutant, ...] = (
    Fault("the mean of parts is not taken", "session.step_parts:StepParts.complete").by(
        drop("if self._count > 1: ..."), ONE
    ),
    Fault("all parts draw the same", "session.sample_order:Draws.seed_of").by(
        replace("keyed_seed(...)", "self.seed"), ONE
    ),
    Fault("an epoch begins with the samples of the last", "session.sample_order:SampleOrder._from").by(
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
    Fault("all that come are put at the end", "core.resharding:order_of_least_movement").by(
        replace("tuple(...)", "(*present, *joining)[:size]"),
        "tests/elastic/test_resharding.py::test_the_first_stays_and_little_more_than_must_be_is_moved[3-2]",
    ),
)
