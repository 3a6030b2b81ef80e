"""Batches that grow while a job runs: whole parts come, learning rates follow, and the bits are those of plain PyTorch in the same batches."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import patrickstar
from patrickstar.cli.main import cli
from patrickstar.session.sample_order import Draws, SampleOrder
from tests.elastic.jobs import MOST, Plan, build, digest, expect_run, in_job, plain, refusal, train
from tests.elastic.running import digests, running
from tests.ranks import Teams, all_well

SAMPLES = 29


def square_root(parts: Sequence[int], step: int) -> float:
    return math.sqrt(parts[step] / parts[0])


def warmed_up(parts: Sequence[int], step: int) -> float:
    """In proportion to the batch, which is come to in an epoch; a part has two samples."""
    last, target, seen = 1.0, 1.0, SAMPLES

    def now() -> float:
        return target if seen >= SAMPLES else last + (target - last) * seen / SAMPLES

    for at in range(1, step + 1):
        seen += 2 * parts[at - 1]
        if parts[at] != parts[at - 1]:
            last, target, seen = now(), parts[at] / parts[0], 0
    return now()


def of_users(times: float) -> float:
    return 1 + times / 8


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ("sqrt", square_root),
        ("linear", warmed_up),
        (of_users, lambda parts, step: of_users(parts[step] / parts[0])),
    ],
    ids=["sqrt", "linear", "own"],
)
def test_any_batches_have_the_bits_of_plain_torch(
    scaling: Any, factor: Callable[[Sequence[int], int], float], team_of: Teams
) -> None:
    plan = Plan(
        sizes={0: 2, 2: 3, 5: 1},
        batches={1: 16, 2: 12, 4: 24, 7: 8},
        growth={"batch": "grow", "max_batch": 24, "lr_scaling": scaling},
        total=11,
    )
    runs = all_well(team_of(MOST).run(train, plan, within_s=120))
    counts = Counter(step for run in runs for step, *_ in run.parts)
    parts = [counts[step] for step in range(plan.total)]
    assert {4, 12} <= set(parts), parts  # those of between as well, unless processes come late
    assert len({size for run in runs for size in run.sizes}) > 1
    expect_run(plain(plan, parts, lambda step: factor(parts, step)), runs)


def test_epochs_end_after_as_many_samples() -> None:
    draws = Draws(SampleOrder(SAMPLES, 3), 2, ((0, 8), (2, 12), (3, 24)), 0, samples=3 * SAMPLES)
    assert [draws.first(step) for step in range(5)] == [0, 8, 16, 28, 52]
    assert draws.total == 6  # of 87 samples the last begins with number 76
    seen = [index for draw in draws.of_rank(0, 0, 1) for index in draw.indices]
    assert len(seen) == 100
    assert all(Counter(seen[at : at + SAMPLES]) == Counter(range(SAMPLES)) for at in (0, SAMPLES, 2 * SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["rank killed", pytest.param("stopped", marks=pytest.mark.campaign)])
def test_a_job_that_is_broken_goes_on_with_the_batch_that_it_had(how: str, tmp_path: Path) -> None:
    total, flags = 30, ("--min", "1", "--max", "2", "--size", "2", "--save-every", "5")
    with running(tmp_path, total, *flags, max_batch=[24]) as job:
        job.wait_for(2)
        told = CliRunner().invoke(cli, ["elastic", "resize", str(tmp_path), "2", "--batch", "23"])
        assert "23 samples: those of this job have 12 to 24 samples, in whole parts of 2" in str(told.exception)
        assert not CliRunner().invoke(cli, ["elastic", "resize", str(tmp_path), "2", "--batch", "24"]).exit_code
        found = job.wait_for(8)
        if how == "stopped":
            job.process.send_signal(signal.SIGTERM)
        else:
            os.kill(found["ranks"][0]["pid"], signal.SIGKILL)
        status, output = job.end()
    if how == "stopped":
        assert status == 143
        with running(tmp_path, total, *flags, seconds=0, max_batch=[24]) as again:
            status, output = again.end()
    (grown,) = (event for event in job.events() if event["event"] == "batch")
    assert (grown["from"], grown["to"], grown["lr_factor"], grown["why"]) == (12, 24, math.sqrt(2), "asked")
    assert f"batches of 24 samples in place of 12 from step {grown['step']} on" in output or how == "stopped"
    parts = [6] * grown["step"] + [12] * (total - grown["step"])
    run = plain(Plan(parts=6), parts, lambda step: square_root(parts, step))
    want = digest(value for name, value in run.tensors.items() if "/" not in name)
    assert (status, digests(output)) == (0, {want}), output


def refused(rank: int, growth: dict[str, Any], batch: int | None) -> str:
    with in_job(rank, Plan()):
        model = build()
        with patrickstar.manage(model, torch.optim.AdamW(model.parameters()), host_memory="1GiB") as session:
            asked = {"batch_size": 8, "parts": 4, "total": 1, **growth}
            return refusal(lambda: (session.steps([0.0] * 9, **asked), session.resize(1, batch)))


@pytest.mark.parametrize(
    ("growth", "batch", "says"),
    [
        ({"batch": "grows"}, None, 'ConfigError: steps: batch=\'grows\': "fixed" or "grow" is expected'),
        ({"batch": "grow"}, None, "ConfigError: steps: max_batch=None: "),
        ({"batch": "grow", "max_batch": 6}, None, "ConfigError: steps: max_batch=6: "),
        ({"max_batch": 16}, None, "ConfigError: steps: max_batch=16: "),
        ({"extra": {"a": 1}}, None, "ConfigError: steps: extra['a']=int: state_dict() and load_state_dict()"),
        ({"lr_scaling": "cubic"}, None, "ConfigError: steps: lr_scaling='cubic': one of sqrt, linear, or a function"),
        ({"batch": "grow", "max_batch": 17}, 18, "ConfigError: a batch of 18 samples: those of this job have 8 to 16"),
        ({}, 16, "ConfigError: a batch of 16 samples: those of this job have one size"),
        ({"batch": "grow", "max_batch": 16}, 12, "nothing"),
    ],
)
def test_what_is_refused(growth: dict[str, Any], batch: int | None, says: str, team_of: Teams) -> None:
    (answer,) = team_of(1).run(refused, growth, batch)
    assert answer.startswith(says), answer
