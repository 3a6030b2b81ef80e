"""Measured models of the Pollux artifact: step times by placement and local batch, gradient statistics by epoch.

The tables are the artifact's (`simulator/traces/<application>/`), read from a directory that the user gives; none comes with this package.
"""

from __future__ import annotations

import bisect
import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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


def courses(directory: Path, *, gpus: int, gpus_per_node: int) -> Callable[[str, int], PolluxCourse]:
    """Gives the course of a job of an application with a batch. Tables of the directory are each read when a job first needs them."""
    traces = directory / "traces" if (directory / "traces").is_dir() else directory
    application = cache(lambda name: Application(traces / name, gpus_per_node=gpus_per_node))

    @cache
    def course(name: str, own_batch: int) -> PolluxCourse:
        known = sorted(path.parent.name for path in traces.glob("*/placements.csv"))
        if name not in known:
            raise ConfigError(f"no tables for {name!r} in {traces}: {', '.join(known)}{nearest(name, known)}")
        low, high = application(name).batch_sizes[[0, -1]]
        if not low <= own_batch <= high:
            raise ConfigError(f"a batch of {own_batch} is outside the tables of {name}: {low:g} to {high:g}")
        return PolluxCourse(application(name), own_batch, gpus=gpus)

    return course


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
        tables = [_table(sizes[size], "progress", "grad_sqr", "grad_var") for size in sorted(sizes)]
        epochs = min(map(len, tables))
        progress, self._sqr, self._var = np.stack([table[:epochs] for table in tables]).transpose(2, 0, 1)
        self.progress = progress.min(axis=0)
        self._times(directory)
        self._speeds: dict[tuple[int, int, float], tuple[list[float], float]] = {}
        self._best: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}

    def step_seconds(self, gpus: int, nodes: int, batch: Numbers) -> Numbers:
        """Seconds of a step of each of these global batches; infinite where a GPU would have too little. [batches]"""
        step, sync = between({known: between(row, gpus) for known, row in self._known.items()}, nodes)
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
            batch = np.geomspace(min(low, self.batch_sizes[-1]), self.batch_sizes[-1], N_BATCHES)
            # More GPUs than the largest batch has samples for: no step at all, and no work.
            rates = self.gains(batch) / self.step_seconds(gpus, nodes, batch) * self.batch_sizes[0]
            self._best[gpus, nodes] = (rates.max(axis=1), batch[rates.argmax(axis=1)])
        return self._best[gpus, nodes]

    def _times(self, directory: Path) -> None:
        rows: dict[tuple[int, int], dict[float, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
        placed = _table(directory / "placements.csv", "placement", "local_bsz", "step_time", "sync_time")
        scaled = _table(
            directory / "scalability.csv", "num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"
        )
        for placement, local, *times in placed.tolist():
            on_nodes = [int(digit) for digit in str(int(placement))]  # a digit a node: its GPUs
            rows[len(on_nodes), sum(on_nodes)][local].append(times)
        for nodes, replicas, local, *times in scaled.tolist():
            rows[int(nodes), int(replicas)][local].append(times)
        self._grid = np.unique(placed[:, 1])
        self.local = (float(self._grid[0]), float(LARGEST_LOCAL_BATCH.get(self.name, self._grid[-1])))
        self._known: dict[int, dict[int, Numbers]] = defaultdict(dict)
        for (node, replica), by_local in sorted(rows.items()):
            locals_ = sorted(by_local)
            means = np.array([np.mean(by_local[local], axis=0) for local in locals_]).T
            self._known[node][replica] = np.stack([np.interp(self._grid, locals_, mean) for mean in means])


def between(rows: Mapping[int, Numbers], at: int) -> Numbers:
    """The row at a number, on the straight line between its neighbours; the first or the last beyond."""
    low = max((one for one in rows if one <= at), default=min(rows))
    high = min((one for one in rows if one >= at), default=max(rows))
    share = 0.0 if low == high else (at - low) / (high - low)
    return (1 - share) * rows[low] + share * rows[high]


class PolluxCourse:
    """Course of one job. Work is counted in samples of the application's smallest batch."""

    def __init__(self, application: Application, own_batch: int, *, gpus: int) -> None:
        self.application = application
        fixed = application.fixed
        self.max_gpus = 1 if fixed else min(gpus, int(application.batch_sizes[-1] // application.local[0]))
        self._ends: list[float] = (application.progress * application.batch_sizes[0]).tolist()
        pairs = [(size, -(-size // application.gpus_per_node)) for size in range(1, gpus + 1)]
        batch = np.array([float(own_batch)])
        gains = application.gains(batch)[:, 0] * application.batch_sizes[0]
        own = np.array([gains / application.step_seconds(*pair, batch) for pair in pairs]).T  # [epochs, GPUs]
        best = own if fixed else np.array([application.best(*pair)[0] for pair in pairs]).T
        rates = enumerate(zip(best, own, strict=True))
        self._speeds = [PolluxSpeed(application, own_batch, epoch, *both) for epoch, both in rates]

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
        """Work done at which the speed is next another one; all work where it stays."""
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


def _table(path: Path, *names: str) -> Numbers:
    """Columns of a table of numbers. [rows, columns]"""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return np.array([[float(row[name]) for name in names] for row in csv.DictReader(file)])
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not a table of the Pollux artifact: {type(error).__name__}: {error}") from None
