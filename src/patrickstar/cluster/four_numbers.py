"""The job model of traces: a duration on the GPUs asked for, a serial share, a noise scale, and how far the batch may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from patrickstar.cluster.job_view import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class FourNumbers:
    """Speed of a job that takes `duration` seconds on `gpus` GPUs with its own batch.

    On n GPUs with k times its batch it takes

        duration * (noise + k) / (k (noise + 1)) * (serial + (1 - serial) k / n) / (serial + (1 - serial) / gpus)

    seconds: more samples where a batch is larger than the noise of its gradients needs (McCandlish et al., arXiv:1812.06162), and a
    step that is `serial` at any number of GPUs. Its work is `duration * gpus`, so that a sample is a GPU-second as it was asked for.
    """

    gpus: int
    duration: float
    serial: float = 0.05
    noise: float = 0.0
    grow: float = 1.0

    @property
    def work(self) -> float:
        return self.duration * self.gpus

    def batches(self) -> tuple[float, float]:
        return (1 / self.gpus if self.grow > 1 else 1.0), self.grow

    def samples_per_s(self, gpus: int, *, batch: float, nodes: int = 0) -> float:  # noqa: ARG002 - placement makes no difference here
        return float(self.samples(np.float64(gpus), np.float64(batch)))

    def useful_per_s(self, gpus: int, *, batch: float, nodes: int = 0) -> float:
        return self.samples_per_s(gpus, batch=batch, nodes=nodes) * (self.noise + 1) / (self.noise + batch)

    def best_batch(self, gpus: int, *, nodes: int = 0) -> float:  # noqa: ARG002 - placement makes no difference here
        return float(self.best_batches(np.float64(gpus)))

    def best_rates(self, sizes: Sequence[int]) -> Numbers:
        return _rates(self, tuple(sizes))[0]

    def own_rates(self, sizes: Sequence[int]) -> Numbers:
        return _rates(self, tuple(sizes))[1]

    def samples(self, gpus: Numbers, batch: Numbers) -> Numbers:
        step = self.serial + (1 - self.serial) * batch / gpus
        return self.gpus * batch * (self.serial + (1 - self.serial) / self.gpus) / step

    def best_batches(self, gpus: Numbers) -> Numbers:
        # Work a second, k / ((serial + p k) (noise + k)) with p = (1 - serial) / n, is largest where serial * noise = p k^2.
        least, most = self.batches()
        if self.serial == 1:
            return np.full_like(gpus, most)
        return np.clip(np.sqrt(self.serial * self.noise * gpus / (1 - self.serial)), least, most)


@lru_cache(maxsize=1 << 14)
def _rates(speed: FourNumbers, sizes: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Work a second at these sizes with the best batch and with the own one, found once: every decision asks for them. [sizes] each"""
    gpus = np.array(sizes, dtype=np.float64)
    batch = speed.best_batches(gpus)
    best = speed.samples(gpus, batch) * (speed.noise + 1) / (speed.noise + batch)
    own = speed.samples(gpus, np.ones_like(gpus))
    best.flags.writeable = own.flags.writeable = False
    return best, own
