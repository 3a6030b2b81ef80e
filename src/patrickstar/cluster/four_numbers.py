"""The job model of traces: a duration on the GPUs asked for, a serial share, a noise scale, and how far the batch may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from patrickstar.cluster.job_view import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class FourNumbers:
    """Speed of a job that takes `duration` seconds on `gpus` GPUs with its own batch; its course too, of epochs of equal work.

    On n GPUs with k times its batch it takes

        duration * (noise + k) / (k (noise + 1)) * (serial + (1 - serial) k / n) / (serial + (1 - serial) / gpus)

    seconds: more samples where a batch is larger than the noise of its gradients needs (McCandlish et al., arXiv:1812.06162), and a
    step that is `serial` at any number of GPUs. Its work is `duration * gpus`, so that a sample is a GPU-second as it was asked for.
    Placement makes no difference. Speeds and batches are those of one number of GPUs, or of each in an array.
    """

    gpus: int
    duration: float
    serial: float = 0.05
    noise: float = 0.0
    grow: float = 1.0
    n_epochs: int = 10

    @property
    def work(self) -> float:
        return self.duration * self.gpus

    @property
    def epoch_samples(self) -> float:
        return self.work / self.n_epochs

    def at(self, done: float) -> FourNumbers:  # noqa: ARG002 - the same everywhere
        return self

    def epochs(self, done: float) -> int:
        return int(done / self.work * self.n_epochs + 1e-9)

    def change_after(self, done: float) -> float:  # noqa: ARG002 - the same everywhere
        """Work done at which the speed is next another one; all work where it stays."""
        return self.work

    def batches(self) -> tuple[float, float]:
        return (1 / self.gpus if self.grow > 1 else 1.0), self.grow

    def samples_per_s(self, gpus: Any, *, batch: Any, nodes: int = 0) -> Any:  # noqa: ARG002
        step = self.serial + (1 - self.serial) * batch / gpus
        return self.gpus * batch * (self.serial + (1 - self.serial) / self.gpus) / step

    def useful_per_s(self, gpus: Any, *, batch: Any, nodes: int = 0) -> Any:  # noqa: ARG002
        return self.samples_per_s(gpus, batch=batch) * (self.noise + 1) / (self.noise + batch)

    def best_batch(self, gpus: Any, *, nodes: int = 0) -> Any:  # noqa: ARG002
        # Work a second, k / ((serial + p k) (noise + k)) with p = (1 - serial) / n, is largest where serial * noise = p k^2.
        least, most = self.batches()
        if self.serial == 1:
            return float(most)
        return np.clip(np.sqrt(self.serial * self.noise * gpus / (1 - self.serial)), least, most)

    def best_rates(self, sizes: Sequence[int]) -> Numbers:
        return _rates(self, tuple(sizes))[0]

    def own_rates(self, sizes: Sequence[int]) -> Numbers:
        return _rates(self, tuple(sizes))[1]


@lru_cache(maxsize=1 << 14)
def _rates(speed: FourNumbers, sizes: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Work a second at these sizes with the best batch and with the own one, found once: every decision asks for them. [sizes] each"""
    gpus = np.array(sizes, dtype=np.float64)
    best, own = speed.useful_per_s(gpus, batch=speed.best_batch(gpus)), speed.samples_per_s(gpus, batch=1.0)
    best.flags.writeable = own.flags.writeable = False
    return best, own
