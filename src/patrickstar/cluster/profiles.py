"""Measured models of the Pollux artifact: step times by placement and local batch, gradient statistics by epoch.

The tables are the artifact's (`simulator/traces/<application>/`), read from a directory that the user gives; none comes with this package.
"""

from __future__ import annotations

import bisect
import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import numpy as np

from patrickstar.cluster.job_view import Numbers
from patrickstar.errors import ConfigError, nearest

LARGEST_LOCAL_BATCH: Final = MappingProxyType({"yolov3": 8})
"""Where the artifact's simulator uses less than its tables have."""
ONE_GPU: Final = frozenset({"ncf"})
"""Applications that the artifact's simulator never gives a second GPU or another batch."""
N_BATCHES: Final = 50


class Profiles:
    """Tables of a directory, each read when a job first needs it. Fills caches; what it answers never changes."""

    def __init__(self, directory: Path, *, gpus: int, gpus_per_node: int) -> None:
        self._directory = directory / "traces" if (directory / "traces").is_dir() else directory
        self._gpus = gpus
        self._gpus_per_node = gpus_per_node
        self._applications: dict[str, Application] = {}
        self._courses: dict[tuple[str, int], PolluxCourse] = {}

    def course(self, name: str, own_batch: int) -> PolluxCourse:
        """The course of a job of an application with this batch."""
        known = sorted(path.parent.name for path in self._directory.glob("*/placements.csv"))
        if name not in known:
            raise ConfigError(f"no tables for {name!r} in {self._directory}: {', '.join(known)}{nearest(name, known)}")
        if name not in self._applications:
            self._applications[name] = Application(self._directory / name, gpus_per_node=self._gpus_per_node)
        application = self._applications[name]
        low, high = application.batch_sizes[0], application.batch_sizes[-1]
        if not low <= own_batch <= high:
            raise ConfigError(f"a batch of {own_batch} is outside the tables of {name}: {low:g} to {high:g}")
        return self._courses.setdefault((name, own_batch), PolluxCourse(application, own_batch, gpus=self._gpus))


class Application:
    """Tables of one model.

    Attributes:
        batch_sizes: global batches with gradient statistics, ascending.
        progress: iterations with the smallest batch at the end of each epoch. [epochs]
        local: the least and the most samples of a GPU at a time.
    """

    def __init__(self, directory: Path, *, gpus_per_node: int) -> None:
        self.name = directory.name
        self.fixed = self.name in ONE_GPU
        self.gpus_per_node = gpus_per_node
        sizes = {int(path.stem.partition("-")[2]): path for path in directory.glob("validation-*.csv")}
        if not sizes:
            raise ConfigError(f"no validation-*.csv in {directory}")
        self.batch_sizes = np.array(sorted(sizes), dtype=np.float64)
        tables = [_columns(sizes[size], ("progress", "grad_sqr", "grad_var")) for size in sorted(sizes)]
        epochs = min(len(table["progress"]) for table in tables)
        self.progress, self._sqr, self._var = (
            np.array([table[name][:epochs] for table in tables]) for name in ("progress", "grad_sqr", "grad_var")
        )
        self.progress = self.progress.min(axis=0)
        self._times(directory)
        self._curves: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}
        self._speeds: dict[tuple[int, int, float], tuple[list[float], float]] = {}
        self._best: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}

    def step_seconds(self, gpus: int, nodes: int, batch: Numbers) -> Numbers:
        """Seconds of a step of each of these global batches; infinite where a GPU would have too little. [batches]"""
        step, sync = self._curve(nodes, gpus)
        local = np.ceil(batch / gpus - 1e-8)
        accumulated = np.ceil(local / self.local[1] - 1e-8) - 1
        if gpus == 1:
            # From one small batch alone the artifact's jobs could not tell the gradients' noise.
            accumulated = np.where(batch > self.batch_sizes[0] + 1e-8, np.maximum(accumulated, 1), accumulated)
        atomic = np.ceil(local / (accumulated + 1) - 1e-8)
        whole, exchange = np.interp(atomic, self._grid, step), np.interp(atomic, self._grid, sync)
        return np.where(atomic < self.local[0], np.inf, whole + accumulated * (whole - exchange))

    def gains(self, batch: Numbers) -> Numbers:
        """Iterations with the smallest batch that one with each of these is worth, by epoch. [epochs, batches]"""
        scale = batch / self.batch_sizes[0]
        at = np.interp(batch, self.batch_sizes, np.arange(len(self.batch_sizes)))
        low = np.floor(at).astype(int)
        high, share = np.minimum(low + 1, len(self.batch_sizes) - 1), at - low
        sqr, var = (((1 - share) * one[low].T + share * one[high].T) for one in (self._sqr, self._var))
        return cast(Numbers, (var + sqr) / (var / scale + sqr))

    def speeds(self, gpus: int, nodes: int, batch: float) -> tuple[list[float], float]:
        """Work a second by epoch, and samples a second, with a batch raised to what these GPUs take at least."""
        key = gpus, nodes, min(max(batch, self.local[0] * gpus), float(self.batch_sizes[-1]))
        if key not in self._speeds:
            size = np.array(key[2:])
            seconds = self.step_seconds(gpus, nodes, size)
            useful = self.gains(size)[:, 0] * self.batch_sizes[0] / seconds
            self._speeds[key] = useful.tolist(), float((size / seconds)[0])
        return self._speeds[key]

    def best(self, gpus: int, nodes: int) -> tuple[Numbers, Numbers]:
        """Work a second with the best batch, and that batch, by epoch. [epochs] each"""
        if (gpus, nodes) not in self._best:
            low = max(self.batch_sizes[0], self.local[0] * gpus)
            if low > self.batch_sizes[-1]:
                self._best[gpus, nodes] = (np.zeros(len(self.progress)), np.full(len(self.progress), low))
            else:
                batch = np.geomspace(low, self.batch_sizes[-1], N_BATCHES)
                rates = self.gains(batch) / self.step_seconds(gpus, nodes, batch) * self.batch_sizes[0]
                at = rates.argmax(axis=1)
                self._best[gpus, nodes] = (rates.max(axis=1), batch[at])
        return self._best[gpus, nodes]

    def _times(self, directory: Path) -> None:
        rows: dict[tuple[int, int], dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        wanted = ("local_bsz", "step_time", "sync_time")
        placed = _columns(directory / "placements.csv", ("placement", *wanted))
        scaled = _columns(directory / "scalability.csv", ("num_nodes", "num_replicas", *wanted))
        per_node = [[int(digit) for digit in str(int(placement))] for placement in placed["placement"]]
        pairs = [(len(digits), sum(digits)) for digits in per_node]
        pairs += [(int(n), int(r)) for n, r in zip(scaled["num_nodes"], scaled["num_replicas"], strict=True)]
        columns = [np.concatenate([placed[name], scaled[name]]) for name in wanted]
        for pair, local, step, sync in zip(pairs, *columns, strict=True):
            rows[pair][local].append((step, sync))
        largest = LARGEST_LOCAL_BATCH.get(self.name, placed["local_bsz"].max())
        self._grid = np.unique(placed["local_bsz"])
        self.local = (float(self._grid[0]), float(largest))
        self._known: dict[int, dict[int, Numbers]] = defaultdict(dict)
        for (nodes, replicas), by_local in sorted(rows.items()):
            locals_ = sorted(by_local)
            means = np.array([np.mean(by_local[local], axis=0) for local in locals_])
            self._known[nodes][replicas] = np.stack([np.interp(self._grid, locals_, means[:, at]) for at in (0, 1)])

    def _curve(self, nodes: int, gpus: int) -> tuple[Numbers, Numbers]:
        """Step and exchange times over the grid of local batches, interpolated over GPUs and then over nodes."""
        if (nodes, gpus) not in self._curves:
            known = sorted(self._known)
            low = max((one for one in known if one <= nodes), default=known[0])
            high = min((one for one in known if one >= nodes), default=known[-1])
            share = 0.0 if low == high else (nodes - low) / (high - low)
            found = (1 - share) * self._on_nodes(low, gpus) + share * self._on_nodes(high, gpus)
            self._curves[nodes, gpus] = (found[0], found[1])
        return self._curves[nodes, gpus]

    def _on_nodes(self, nodes: int, gpus: int) -> Numbers:
        row = self._known[nodes]
        sizes = sorted(row)
        at = float(np.interp(gpus, sizes, np.arange(len(sizes))))
        low = math.floor(at)
        return (1 - at + low) * row[sizes[low]] + (at - low) * row[sizes[min(low + 1, len(sizes) - 1)]]


class PolluxCourse:
    """Course of one job. Work is counted in samples of the application's smallest batch."""

    def __init__(self, application: Application, own_batch: int, *, gpus: int) -> None:
        self.application = application
        fixed = application.fixed
        self.max_gpus = 1 if fixed else min(gpus, int(application.batch_sizes[-1] // application.local[0]))
        self._ends: list[float] = (application.progress * application.batch_sizes[0]).tolist()
        sizes = np.arange(1, gpus + 1)
        nodes = -(-sizes // application.gpus_per_node)
        batch = np.array([float(own_batch)])
        gains = application.gains(batch)[:, 0] * application.batch_sizes[0]
        pairs = list(zip(sizes.tolist(), nodes.tolist(), strict=True))
        own = np.array([gains / application.step_seconds(*pair, batch) for pair in pairs]).T  # [epochs, GPUs]
        best = own if fixed else np.array([application.best(*pair)[0] for pair in pairs]).T
        self._speeds = [
            PolluxSpeed(application, own_batch, *each) for each in zip(range(len(own)), best, own, strict=True)
        ]

    @property
    def work(self) -> float:
        return self._ends[-1]

    @property
    def epoch_samples(self) -> float:
        return self.work / len(self._ends)

    def at(self, done: float) -> PolluxSpeed:
        return self._speeds[min(self.epochs(done), len(self._ends) - 1)]

    def epochs(self, done: float) -> int:
        return bisect.bisect_right(self._ends, done)

    def change_after(self, done: float) -> float:
        return self._ends[min(self.epochs(done), len(self._ends) - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class PolluxSpeed:
    """Speed of a job in one epoch; `best` and `own` are its rates by number of GPUs, from one on. [GPUs] each"""

    application: Application
    own_batch: int
    epoch: int
    best: Numbers
    own: Numbers

    def batches(self) -> tuple[float, float]:
        sizes = self.application.batch_sizes
        return (1.0, 1.0) if self.application.fixed else (sizes[0] / self.own_batch, sizes[-1] / self.own_batch)

    def samples_per_s(self, gpus: int, *, batch: float, nodes: int = 0) -> float:
        return self._step(gpus, batch, nodes)[1]

    def useful_per_s(self, gpus: int, *, batch: float, nodes: int = 0) -> float:
        return self._step(gpus, batch, nodes)[0][self.epoch]

    def best_batch(self, gpus: int, *, nodes: int = 0) -> float:
        if self.application.fixed:
            return 1.0
        return float(self.application.best(gpus, self._nodes(gpus, nodes))[1][self.epoch]) / self.own_batch

    def best_rates(self, sizes: Sequence[int]) -> Numbers:
        return cast(Numbers, self.best[np.asarray(sizes) - 1])

    def own_rates(self, sizes: Sequence[int]) -> Numbers:
        return cast(Numbers, self.own[np.asarray(sizes) - 1])

    def _step(self, gpus: int, batch: float, nodes: int) -> tuple[list[float], float]:
        return self.application.speeds(gpus, self._nodes(gpus, nodes), batch * self.own_batch)

    def _nodes(self, gpus: int, nodes: int) -> int:
        return nodes or -(-gpus // self.application.gpus_per_node)


def _columns(path: Path, names: Sequence[str]) -> dict[str, Numbers]:
    """Columns of a table of numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {name: np.array([float(row[name]) for row in rows]) for name in names}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not a table of the Pollux artifact: {type(error).__name__}: {error}") from None
