"""Workloads for tests: drawn ones, and short ones by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from patrickstar.cluster.four_numbers import FourNumbers
from patrickstar.cluster.job_view import JobView
from patrickstar.cluster.workload import Submission


def submission(name: str = "a", submit: float = 0.0, gpus: int = 1, duration: float = 100.0, **rest: Any) -> Submission:
    numbers = {key: rest.pop(key) for key in ("serial", "noise", "grow") if key in rest}
    course = FourNumbers(gpus=gpus, duration=duration, n_epochs=rest.pop("epochs", 10), **numbers)
    return Submission(name=name, submit=submit, gpus=gpus, course=course, **{"max_gpus": 64, **rest})


def view(name: str = "a", gpus: int = 1, duration: float = 100.0, **rest: Any) -> JobView:
    """A job as a policy sees it, with all its work to do."""
    numbers = {key: rest.pop(key) for key in ("serial", "noise", "grow") if key in rest}
    speed = FourNumbers(gpus=gpus, duration=duration, **numbers)
    return JobView(name=name, gpus=gpus, speed=speed, **{"submit": 0.0, "rest": speed.work, **rest})


@st.composite
def workloads(draw: st.DrawFn, *, gpus: int) -> tuple[Submission, ...]:
    """Up to a dozen jobs on a cluster of so many GPUs, some at the same moment, some that need several GPUs."""
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        asked = draw(st.integers(1, gpus))
        jobs.append(
            submission(
                f"job-{number}",
                draw(st.sampled_from([0.0, 1.0, 30.0, 60.0, 61.5])) * draw(st.integers(0, 20)),
                asked,
                draw(st.floats(1, 1000)),
                min_gpus=draw(st.integers(1, asked)),
                max_gpus=draw(st.integers(asked, gpus)),
                serial=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
                noise=draw(st.sampled_from([0.0, 2.0, 80.0])),
                grow=draw(st.sampled_from([1.0, 2.0, 8.0])),
                epochs=draw(st.sampled_from([1, 10, 200])),
                priority=draw(st.integers(0, 2)),
            )
        )
    return tuple(jobs)
