"""Ranks that come and go in the processes that are there: no size, and no change of it, changes a bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import patrickstar
from tests.elastic.jobs import MOST, Plan, Run, Samples, build, expect_run, in_job, plain, refusal, train, train_here
from tests.ranks import Ended, Teams, all_well, team

pytestmark = [pytest.mark.sampled]

MEMORY: Mapping[str, Mapping[str, Any]] = {
    "roomy": {"host_memory": "1GiB"},
    "clipped": {"host_memory": "1GiB", "max_grad_norm": 0.05},
    "bf16": {"host_memory": "1GiB", "precision": "bf16"},
    "disk": {"host_memory": "3000KiB", "disk_memory": "64MiB"},
    "emulated": {"host_memory": "64MiB", "device": "emulated", "device_memory": "760KiB", "max_grad_norm": 0.05},
}


@lru_cache(maxsize=16)
def fixed_one(team_of: Teams, parts: int, samples: int, kind: str = "roomy") -> Run:
    """The run of one process by itself, with all the memory that it needs."""
    memory = {name: value for name, value in MEMORY[kind].items() if name in ("precision", "max_grad_norm")}
    plan = Plan(parts=parts, samples=samples, memory={"host_memory": "1GiB", **memory})
    run: Run = all_well(team_of(1).run(_alone, plan))[0]
    return run


def _alone(_: int, plan: Plan) -> Run:
    return train_here(plan, plan.memory)


def run_job(team_of: Teams, plan: Plan) -> list[Run]:
    return all_well(team_of(MOST).run(train, plan, within_s=120))


def test_one_process_computes_what_plain_torch_does(team_of: Teams) -> None:
    plan = Plan()
    expect_run(plain(plan, [plan.parts] * plan.total), [fixed_one(team_of, plan.parts, plan.samples)])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [4, 6])
def test_a_fixed_size_has_the_bits_of_one(size: int, parts: int, team_of: Teams) -> None:
    runs = run_job(team_of, Plan(begins=size, least=size, most=size, parts=parts))
    expect_run(fixed_one(team_of, parts, Plan().samples), runs)
    assert [set(run.sizes) for run in runs] == [{size}] * size + [set()] * (MOST - size)


def test_a_size_that_is_asked_for_at_the_end_calls_nobody(team_of: Teams) -> None:
    plan = Plan(sizes={0: 2, 2: 3, 3: 4}, parts=6, samples=7)
    expect_run(fixed_one(team_of, plan.parts, plan.samples), run_job(team_of, plan))


plans = st.builds(
    lambda begins, sizes, parts, samples, kind: (Plan(sizes=sizes, begins=begins, parts=parts, samples=samples), kind),
    st.integers(1, MOST),
    st.dictionaries(st.integers(0, 3), st.integers(1, MOST), min_size=1, max_size=3),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([7, 29]),
    st.sampled_from(sorted(MEMORY)),
)


def check_plan(team_of: Teams, plan: Plan, kind: str) -> None:
    runs = run_job(team_of, replace(plan, memory=MEMORY[kind]))
    expect_run(fixed_one(team_of, plan.parts, plan.samples, kind), runs)
    assert runs[0].sizes
    assert len({run.process for run in runs}) == MOST, "processes are the same before and after"


# Each example is four processes at work: what fails is looked at as it is.
_AS_FOUND = [hypothesis.Phase.explicit, hypothesis.Phase.generate]


@hypothesis.settings(max_examples=5, phases=_AS_FOUND)
@hypothesis.given(plans)
def test_no_plan_of_sizes_changes_a_bit(team_of: Teams, given: tuple[Plan, str]) -> None:
    check_plan(team_of, *given)


@pytest.mark.campaign
@hypothesis.settings(max_examples=40, phases=_AS_FOUND)
@hypothesis.given(plans)
def test_no_plan_of_many_changes_a_bit(team_of: Teams, given: tuple[Plan, str]) -> None:
    check_plan(team_of, *given)


@pytest.mark.parametrize("sizes", [{0: 2, 1: 3, 2: 1}, {0: 4, 2: 2}, {0: 3, 2: 4}], ids=["2-3-1", "4-2", "3-4"])
def test_the_first_rank_keeps_its_process(sizes: dict[int, int], team_of: Teams) -> None:
    plan = Plan(sizes=sizes)
    runs = run_job(team_of, plan)
    assert runs[0].sizes[0] == 1
    assert len(runs[0].sizes) == plan.total
    assert len(set(runs[0].sizes)) > 1
    expect_run(fixed_one(team_of, plan.parts, plan.samples), runs)


def refused(rank: int, plan: Plan, what: str) -> str:
    """What a job of one rank is told where it does something wrong."""
    with in_job(rank, plan):
        torch.set_num_threads(1)
        model = build(with_statistics=what == "statistics")
        session = patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), host_memory="1GiB")
        arguments: dict[str, Any] = {"batch_size": 8, "parts": 4, "total": 2}
        arguments |= {"few parts": {"parts": 2}, "uneven": {"batch_size": 10}, "no end": {"total": None}}.get(what, {})

        def run() -> None:
            before = {"resize": lambda: session.resize(9), "again": lambda: session.steps(Samples(9), **arguments)}
            before.get(what, lambda: None)()
            for parts in session.steps([] if what == "empty" else Samples(9), **arguments):
                with parts:
                    for _, batch in parts:
                        loss = model(batch).square().mean()
                        loss.backward()
                        if what == "twice":
                            model(batch).square().mean().backward()
                        if what == "early":
                            session.optimizer.step()
                        if what == "left":
                            break
                    if what != "left":
                        session.optimizer.step()
                    if what == "more":
                        session.optimizer.zero_grad()
                        model(batch).square().mean().backward()
                        session.optimizer.step()

        with session:
            return refusal(run)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("few parts", "ConfigError: steps: parts=2: as many as the job may have ranks are expected, 4"),
        ("uneven", "ConfigError: steps: batch_size=10: a multiple of parts=4 is expected"),
        ("no end", "ConfigError: steps: total=None, epochs=None: one of them is expected"),
        ("empty", "ConfigError: steps: dataset: it has no samples"),
        ("resize", "ConfigError: resize(9): this job has 1 to 4 ranks"),
        ("statistics", "LayoutError: the forward changes the buffer 4.running_mean (3 in all)"),
        ("early", "StateError: step 0: gradients are used before part 1 of 4 has run backward"),
        ("left", "StateError: step 0 was left after part 0 of 4"),
        ("twice", "StateError: step 0, part 0 of 4 has run backward 2 times"),
        ("more", "StateError: step 0, part 3 of 4 has run backward 2 times"),
        ("again", "StateError: an elastic job has one loop over session.steps()"),
        ("nothing", "StateError: step 1 begins with gradients from before: call optimizer.zero_grad()"),
    ],
)
def test_what_is_refused(what: str, says: str, team_of: Teams) -> None:
    (answer,) = team_of(1).run(refused, Plan(), what)
    assert answer.startswith(says), answer


def test_a_rank_that_skips_a_part_ends_the_others() -> None:
    with team(2) as pair:  # which is broken after it
        first, second = pair.run(_skipping, Plan(begins=2, least=2, most=2), within_s=60)
    assert isinstance(second, patrickstar.StateError)
    assert "step 0: gradients are used before part 3 of 4 has run backward" in str(second)
    assert isinstance(first, patrickstar.RankError)


def _skipping(rank: int, plan: Plan) -> str:
    with in_job(rank, plan):
        model = build()
        with patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), host_memory="1GiB") as session:
            for parts in session.steps(Samples(9), batch_size=8, parts=4, total=2):
                for _, batch in parts:
                    model(batch).square().mean().backward()
                    if rank == 1:
                        break
                session.optimizer.step()
                session.optimizer.zero_grad()
    return "nothing"


def test_ranks_train_in_steps_alone(team_of: Teams) -> None:
    for answer in team_of(2).run(_plainly, Plan(begins=2, least=2, most=2)):
        assert answer.startswith("StateError: ranks of an elastic job train in session.steps() alone"), answer


def _plainly(rank: int, plan: Plan) -> str:
    with in_job(rank, plan):
        model = build()
        with patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), host_memory="1GiB") as session:
            model(torch.ones(2, 48)).square().mean().backward()
            return refusal(session.optimizer.step)


def test_a_size_that_does_not_fit_leaves_the_job_as_it_was(team_of: Teams, caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(sizes={1: 2}, memory={"host_memory": "64MiB", "device": "emulated", "device_memory": "400KiB"})
    runs = run_job(team_of, plan)
    expect_run(fixed_one(team_of, plan.parts, plan.samples), runs)
    assert set(runs[0].sizes) == {1}
    assert not any(isinstance(run, Ended) for run in runs)
