"""Sides that take turns: rounds of a comparison, and their ratios."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.gpu.results import Result, spread
from benchmarks.gpu.side import Side, Turn
from benchmarks.gpu.sides import work
from benchmarks.worker import Worker, WorkerError

__all__ = ["Sides", "compare", "host_bytes", "tflops"]


class Sides:
    """Processes by name, and why those that are not there are not. A context: at its end all of them are ended."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._workers: dict[str, Worker] = {}
        self.missing: dict[str, str] = {}
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.end()

    def begin(self, name: str, side: Side, *, within_s: float) -> dict[str, Any] | None:
        """Starts one; gives what it is ready with, or None where it is not, which is noted."""
        worker = Worker(work, side)
        try:
            said = worker.hear(within_s=within_s)
        except WorkerError as error:
            said = str(error)
        if isinstance(said, str):
            worker.end()
            self.missing[name] = said
            self._result.say(f"{name}: not measured: {said[:400]}")
            self._result.set(missing=self.missing)
            return None
        self._workers[name], self.ready[name] = worker, said
        self._result.say(f"{name}: ready after {said['setup_seconds']:.0f} s")
        self._result.set(ready=self.ready)
        return dict(said)

    def turn(self, name: str, turn: Turn, *, within_s: float = 300) -> dict[str, Any] | None:
        """A turn of one; None where it fails, which is noted and ends it."""
        if name not in self._workers:
            return None
        try:
            row = self._workers[name].ask(turn, within_s=within_s)
        except WorkerError as error:
            row = str(error)
        if isinstance(row, str):
            self.missing[name] = row
            self._result.say(f"{name}: failed: {row[:600]}")
            self.finish(name)
            self._result.set(missing=self.missing)
            return None
        return dict(row)

    def finish(self, name: str) -> None:
        """Ends one, whose memory others need."""
        if name in self._workers:
            self._workers.pop(name).end()

    def __contains__(self, name: str) -> bool:
        return name in self._workers


def compare(
    sides: Sides, names: tuple[str, ...], turn: Turn, *, result: Result, key: str, rounds: int, warm_up: int = 2
) -> Mapping[str, list[float]]:
    """Rounds of turns in alternating order, of which the last step counts; the result has a row for each side, and ratios to the first.

    A ratio above 1 is of a side that is faster than the first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for number in range(warm_up + rounds):
        took = dict[str, float]()
        for name in names if number % 2 else reversed(names):
            # First steps trace, plan and allocate; a plan that was too low is made again after them.
            row = sides.turn(name, replace(turn, steps=3) if number == 0 else turn)
            if row is not None:
                took[name], rows[name] = row["seconds"][-1], row
        result.say(f"{key}, round {number + 1}: " + ", ".join(f"{name} {s:.3f} s" for name, s in took.items()))
        if number >= warm_up:
            for name, s in took.items():
                seconds[name].append(s)
        first, shares = seconds[names[0]], {}
        for name in names[1:]:
            both = list(zip(first, seconds[name], strict=False))
            if both and len(both) == len(seconds[name]):
                shares[name] = spread([plain / ours for plain, ours in both])
        result.set(
            **{
                key: {
                    "tokens_a_step": turn.sequences * turn.tokens,
                    "seconds": seconds,
                    "speed_over_first": shares,
                    "last_rows": rows,
                }
            }
        )
        if not took:
            break
    for name, share in result.found[key]["speed_over_first"].items():
        result.say(
            f"{key}: {name} has {share['median']:.3f} ({share['least']:.3f} to {share['most']:.3f}) of {names[0]}"
        )
    return seconds


def tflops(numel: int, tokens: int, seconds: float) -> float:
    """Model TFLOP/s: six operations a parameter and token."""
    return 6 * numel * tokens / seconds / 1e12


def host_bytes(arguments: Namespace, share: float = 0.9) -> int | None:
    """What a side may hold of the host: as given, or this share of what is available."""
    if arguments.device != "cuda":
        return None
    if arguments.host_memory is not None:
        return int(arguments.host_memory * 2**30)
    with open("/proc/meminfo") as file:  # noqa: PTH123
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return int(share * kib * 1024)
