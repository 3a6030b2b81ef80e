"""A job that runs, or is to: what is known of it, what has been measured, and how a policy sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from patrickstar.cluster.four_numbers import FourNumbers
from patrickstar.cluster.job_view import Ids, JobView
from patrickstar.sharing.jobs_file import SharedJob

SERIAL: Final = 0.05
"""Share of a step that is taken to be serial, as in a trace, until two sizes are measured."""
_UNKNOWN_STEPS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of a job that was started. `gpu_ids`: of all its processes; `size`: ranks that train.

    `has_begun`: whether it is in steps, so that it can be resized and stopped. `exit_status`: None while it runs.
    """

    gpu_ids: Ids = ()
    size: int = 0
    step: int = 0
    has_begun: bool = False
    exit_status: int | None = None


@dataclass(slots=True, eq=False)
class LiveJob:
    """One job. Times are seconds since jobs were first shared.

    Attributes:
        state: waiting, running, stopping, done or failed. predicted: its end as it was expected when its speed was first known.
        target: GPUs that it is to have. is_ordered: whether it has been told so.
        losses: steps at which it was lost with nodes.
        measured: steps, and the seconds that they took, by size. mark: size, and the step that it has come to, when.
    """

    of: SharedJob
    submit: float

    state: str = "waiting"
    why: str = ""
    gpu_ids: Ids = ()
    target: int = 0
    is_ordered: bool = False
    step: int = 0
    has_begun: bool = False
    attained: float = 0.0
    ran: float = 0.0
    largest: int = 0
    start: float | None = None
    finish: float | None = None
    predicted: float | None = None
    resizes: int = 0
    epochs_at_change: int = 0
    losses: list[int] = field(default_factory=list)
    measured: dict[int, list[float]] = field(default_factory=dict)
    mark: tuple[int, int, float | None] = (0, 0, None)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> LiveJob:
        """The job as it stands in a file, once its processes have ended."""
        names = ("submit", "step", "attained", "ran", "largest", "start", "finish", "predicted", "resizes")
        job = cls(SharedJob(**record["of"]), **{name: record[name] for name in names})
        job.measured = {int(size): found for size, found in record["measured"].items()}
        job.state = "waiting" if job.finish is None else record["state"]
        return job

    @property
    def can_change(self) -> bool:
        """True where it can be resized and stopped."""
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
        self.step = standing.step if standing.has_begun else self.step

    def step_seconds(self, others: Iterable[LiveJob] = ()) -> tuple[float, float]:
        """Seconds of a step that are serial, and those of which n GPUs take an n-th each; of others on average where nothing is measured."""
        if not self.measured:
            known = [job.step_seconds() for job in others if job.measured] or [(SERIAL, 1 - SERIAL)]
            return sum(one[0] for one in known) / len(known), sum(one[1] for one in known) / len(known)
        sizes, (steps, seconds) = np.array([*self.measured], dtype=float), np.array([*self.measured.values()]).T
        parallel, serial = 1 - SERIAL, SERIAL
        if len(sizes) > 1:
            parallel, serial = np.polyfit(1 / sizes, seconds / steps, 1, w=np.sqrt(steps)).clip(0)
        # The line through what is measured, or one of the slope that is usual: it takes as long in all as has been measured.
        scale = seconds.sum() / (steps * (serial + parallel / sizes)).sum()
        return float(serial * scale), float(parallel * scale)

    def rest(self, others: Iterable[LiveJob]) -> float:
        """Steps still to be done: known, or as many as those that have ended had on average from there on, or as many again."""
        if self.of.steps is not None:
            return float(max(1, self.of.steps - self.step))
        longer = [job.step - self.step for job in others if job.state == "done" and job.step > self.step]
        return sum(longer) / len(longer) if longer else float(self.step or _UNKNOWN_STEPS)

    def view(self, others: Iterable[LiveJob]) -> JobView:
        """The job as a policy sees it. Its work is counted in seconds on one GPU."""
        of, (serial, parallel), rest = self.of, self.step_seconds(others), self.rest(others)
        alone = serial + parallel
        done, speed = self.step * alone, FourNumbers(gpus=1, duration=(self.step + rest) * alone, serial=serial / alone)
        gpu_ids = () if self.state == "stopping" else self.gpu_ids
        so_far = {name: getattr(self, name) for name in ("submit", "attained", "ran", "largest", "epochs_at_change")}
        return JobView(
            name=of.name,
            user=of.user,
            priority=of.priority,
            gpus=of.max,
            min_gpus=of.min,
            max_gpus=of.max,
            gpu_ids=gpu_ids,
            pinned=bool(gpu_ids) and not self.can_change,
            speed=speed,
            rest=rest * alone,
            done=done,
            samples=done,
            epoch_samples=speed.epoch_samples,
            epochs=speed.epochs(done),
            **so_far,
        )
