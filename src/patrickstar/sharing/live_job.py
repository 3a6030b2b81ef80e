"""A job that runs, or is to: what is known of it, what has been measured, and how a policy sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

import numpy as np

from patrickstar.cluster.four_numbers import FourNumbers
from patrickstar.cluster.job_view import Ids, JobView
from patrickstar.sharing.jobs_file import SharedJob

SERIAL: Final = 0.05
"""Share of a step that is taken to be serial, as in a trace, until two sizes are measured."""

_EPOCHS: Final = 10
_UNKNOWN_STEPS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a job that was started stands.

    Attributes:
        gpu_ids: those of all its processes. size: ranks that train. has_begun: whether it is in steps that can be resized and stopped.
        exit_status: None while it runs.
    """

    gpu_ids: Ids = ()
    size: int = 0
    step: int = 0
    has_begun: bool = False
    exit_status: int | None = None


@dataclass(slots=True, eq=False)
class LiveJob:
    """One job. Times are seconds since jobs were first shared; `state`: waiting, running, stopping, done or failed."""

    of: SharedJob
    submit: float

    state: str = "waiting"
    why: str = "not submitted yet"
    gpu_ids: Ids = ()
    target: int = 0
    """GPUs that it is to have."""
    is_ordered: bool = False
    """Whether it has been told so."""
    step: int = 0
    has_begun: bool = False
    attained: float = 0.0
    ran: float = 0.0
    largest: int = 0
    start: float | None = None
    finish: float | None = None
    predicted: float | None = None
    """Its end, as it was expected when its speed was first known."""
    resizes: int = 0
    epochs_at_change: int = 0
    measured: dict[int, list[float]] = field(default_factory=dict)
    """Steps, and the seconds that they took, by size."""
    mark: tuple[int, int, float | None] = (0, 0, None)
    """Size, and the step that it has come to, at what time."""

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> LiveJob:
        """The job of what `record` has given, once its processes have ended."""
        names = ("submit", "step", "attained", "ran", "largest", "start", "finish", "predicted", "resizes")
        job = cls(SharedJob(**record["of"]), **{name: record[name] for name in names})
        job.measured = {int(size): found for size, found in record["measured"].items()}
        job.state = "waiting" if job.finish is None else record["state"]
        return job

    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return asdict(self)

    @property
    def can_change(self) -> bool:
        """Whether it can be resized and stopped."""
        return self.state == "running" and self.has_begun and not self.of.pinned

    def take(self, standing: Standing, now: float) -> None:
        """Takes up how it stands, and measures: from a new step to a new step at the same size."""
        size, step, at = self.mark
        if standing.size != size or standing.step < step:
            self.mark = (standing.size, standing.step, None)
        elif standing.step > step:
            if at is not None:
                steps, seconds = self.measured.get(size, (0.0, 0.0))
                self.measured[size] = [steps + standing.step - step, seconds + now - at]
            self.mark = (size, standing.step, now)
        self.has_begun = standing.has_begun
        if standing.has_begun:
            self.step = standing.step

    def step_seconds(self) -> tuple[float, float] | None:
        """Seconds of a step that are serial, and those that n GPUs take an n-th of; None before anything is measured."""
        if not self.measured:
            return None
        sizes = np.array(list(self.measured), dtype=np.float64)
        steps, seconds = np.array(list(self.measured.values())).T
        per_step = seconds / steps
        if len(sizes) == 1:
            alone = per_step[0] / (SERIAL + (1 - SERIAL) / sizes[0])
            return float(SERIAL * alone), float((1 - SERIAL) * alone)
        parallel, serial = np.polyfit(1 / sizes, per_step, 1, w=np.sqrt(steps))
        if parallel < 0:
            parallel, serial = 0.0, per_step.mean()
        elif serial < 0:
            parallel, serial = (per_step * sizes).mean(), 0.0
        return float(serial), float(parallel)

    def view(self, jobs: Sequence[LiveJob]) -> JobView:
        """The job as a policy sees it, among all. Its work is counted in seconds on one GPU."""
        serial, parallel = self.expected_step_seconds(jobs)
        alone = serial + parallel
        total = self.step + self.expected_rest(jobs)
        speed, rest = FourNumbers(gpus=1, duration=total * alone, serial=serial / alone), (total - self.step) * alone
        of, done = self.of, speed.work - rest
        asked = {"name": of.name, "submit": self.submit, "priority": of.priority, "user": of.user, "gpus": of.max}
        sizes = {"min_gpus": of.min, "max_gpus": of.max, "gpu_ids": () if self.state == "stopping" else self.gpu_ids}
        names = ("attained", "ran", "largest", "epochs_at_change")
        so_far: dict[str, Any] = {**asked, **sizes, **{name: getattr(self, name) for name in names}}
        epochs: dict[str, Any] = {"epoch_samples": speed.work / _EPOCHS, "epochs": self.epochs(total)}
        pinned = bool(sizes["gpu_ids"]) and not self.can_change
        return JobView(speed=speed, rest=rest, done=done, samples=done, pinned=pinned, **epochs, **so_far)

    def epochs(self, total: float) -> int:
        """Tenths of all its steps that are done: epochs, where a policy asks for them."""
        return int(_EPOCHS * self.step / total)

    def expected_step_seconds(self, jobs: Sequence[LiveJob]) -> tuple[float, float]:
        """`step_seconds`, of all jobs on average where it is not known."""
        known = self.step_seconds()
        others = [found for job in jobs if (found := job.step_seconds())]
        return known or (cast(Any, tuple(np.mean(others, axis=0).tolist())) if others else (SERIAL, 1 - SERIAL))

    def expected_rest(self, jobs: Sequence[LiveJob]) -> float:
        """Steps still to be done: known, or as many as those that have ended had on average from there on, or as many again."""
        if self.of.steps is not None:
            return float(max(1, self.of.steps - self.step))
        longer = [job.step - self.step for job in jobs if job.state == "done" and job.step > self.step]
        return float(np.mean(longer)) if longer else float(self.step or _UNKNOWN_STEPS)
