"""Jobs of a workload, read from a CSV: our own format, or a workload of the Pollux artifact.

Source of the second: Qiao et al., "Pollux" (OSDI 2021), branch osdi21-artifact of petuum/adaptdl.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from patrickstar.cluster.four_numbers import FourNumbers
from patrickstar.cluster.profiles import PolluxCourse, courses
from patrickstar.errors import ConfigError, nearest

REQUIRED: Final = ("job", "submit", "gpus", "duration")
OF_POLLUX: Final = ("name", "time", "application", "num_replicas", "batch_size")


Course: TypeAlias = FourNumbers | PolluxCourse
"""Speed and epochs of a job over what it does from beginning to end. Work is counted as its speeds count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One job of a workload."""

    name: str
    submit: float
    gpus: int
    min_gpus: int = 1
    max_gpus: int
    priority: int = 0
    user: str = ""
    course: Course


def read_workload(path: Path, *, gpus: int, gpus_per_node: int, profiles: Path | None = None) -> tuple[Submission, ...]:
    """The jobs of a CSV, in its order.

    Args:
        gpus, gpus_per_node: those of the cluster; no job may need more.
        profiles: the directory of the Pollux artifact's tables, for one of its workloads.
    Raises:
        ConfigError: a column, a value or a job that cannot be taken; names file, line and column.
    """
    rows = _rows(path)
    line, header = rows[0][0], [name.strip() for name in rows[0][1]]
    at, of_pollux = f"{path}: line {line}:", set(OF_POLLUX) <= set(header)
    known, required = (OF_POLLUX, OF_POLLUX) if of_pollux else ((*REQUIRED, *DEFAULTS), REQUIRED)
    unknown, missing = [one for one in header if one not in known], [one for one in required if one not in header]
    hints = [f"; {one!r} is there{hint.replace(';', ':')}" for one in unknown if (hint := nearest(one, missing))]
    if missing:
        raise ConfigError(f"{at} no column {', '.join(map(repr, missing))}{''.join(hints[:1])}")
    if unknown:
        raise ConfigError(f"{at} column {unknown[0]!r} is none of {', '.join(known)}{nearest(unknown[0], known)}")
    if twice := [one for one in known if header.count(one) > 1]:
        raise ConfigError(f"{at} column {twice[0]!r} is there twice")
    if of_pollux and profiles is None:
        raise ConfigError(f"{at} a workload of the Pollux artifact: give its tables by --profiles DIR")
    if len(rows) == 1:
        raise ConfigError(f"{path}: line {line + 1}: no job; give a line for each")
    course = courses(profiles, gpus=gpus, gpus_per_node=gpus_per_node) if of_pollux and profiles else None
    jobs: list[Submission] = []
    lines: dict[str, int] = {}
    for number, cells in rows[1:]:
        if len(cells) != len(header):
            raise ConfigError(f"{path}: line {number}: {len(cells)} cells under {len(header)} columns")
        row = _Row(path, number, dict(zip(header, map(str.strip, cells), strict=True)), gpus)
        job = row.of_pollux(course) if course else row.job()
        if (first := lines.setdefault(job.name, number)) != number:
            raise row.error("name" if course else "job", f"{job.name!r} is there twice, first in line {first}")
        jobs.append(job)
    return tuple(jobs)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Lines that are not blank, with their numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: line 1: empty; give a header with {', '.join(REQUIRED)}, and a line for each job")
    return rows


@dataclass(frozen=True, slots=True)
class _Row:
    path: Path
    line: int
    cells: Mapping[str, str]
    cluster_gpus: int

    def error(self, column: str, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: line {self.line}: column {column}: {what}")

    def number(self, column: str, *, least: float = -math.inf, most: float = math.inf, above: bool = False) -> float:
        """The number in a cell, or the column's default where it is empty or not there."""
        text = self.cells.get(column, "")
        if not text:
            if column in DEFAULTS:
                return DEFAULTS[column]
            raise self.error(column, "nothing there; give a number")
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, f"{text!r} is no number") from None
        if not abs(value) <= _LARGEST:
            raise self.error(column, f"{text!r} is no finite number up to {_LARGEST:g}")
        if value < least or value > most or (above and value == least):
            bound = f"{'above' if above else 'at least'} {least:g}" + (f", at most {most:g}" if most < math.inf else "")
            raise self.error(column, f"{text} is out of range: {bound}")
        return value

    def whole(self, column: str, *, least: float = -math.inf) -> int:
        value = self.number(column, least=least)
        if value != int(value):
            raise self.error(column, f"{self.cells[column]!r} is no whole number")
        return int(value)

    def name(self, column: str) -> str:
        if not self.cells[column]:
            raise self.error(column, "a job without a name")
        return self.cells[column]

    def asked(self, column: str) -> int:
        gpus = self.whole(column, least=1)
        if gpus > self.cluster_gpus:
            raise self.error(column, f"{gpus} GPUs, more than the {self.cluster_gpus} that there are (--gpus)")
        return gpus

    def job(self) -> Submission:
        gpus, min_gpus = self.asked("gpus"), self.asked("min_gpus")
        max_gpus = self.whole("max_gpus", least=min_gpus) if self.cells.get("max_gpus") else self.cluster_gpus
        if not min_gpus <= gpus <= max_gpus:
            raise self.error("gpus", f"{gpus} is not between min_gpus {min_gpus} and max_gpus {max_gpus}")
        duration = self.number("duration", least=0, most=_LONGEST_S, above=True)
        serial, grow = self.number("serial", least=0, most=1), self.number("grow", least=1)
        noise = self.number("noise", least=0)
        times: dict[str, Any] = {"duration": duration, "n_epochs": self.whole("epochs", least=1)}
        course = FourNumbers(gpus=gpus, serial=serial, noise=noise, grow=grow, **times)
        of: dict[str, Any] = {"priority": self.whole("priority"), "user": self.cells.get("user", ""), "course": course}
        sizes: dict[str, Any] = {"gpus": gpus, "min_gpus": min_gpus, "max_gpus": min(max_gpus, self.cluster_gpus)}
        return Submission(name=self.name("job"), submit=self.number("submit", least=0), **sizes, **of)

    def of_pollux(self, find: Callable[[str, int], PolluxCourse]) -> Submission:
        try:
            course = find(self.cells["application"], int(self.number("batch_size", least=1)))
        except ConfigError as error:
            raise self.error("application", str(error)) from None
        gpus = self.asked("num_replicas")
        if not course.at(0.0).own_rates([gpus])[0]:
            raise self.error("num_replicas", f"{gpus} GPUs are too many for a batch of {self.cells['batch_size']}")
        name, submit = self.name("name"), self.number("time", least=0)
        return Submission(name=name, submit=submit, gpus=gpus, max_gpus=course.max_gpus, course=course)


_LARGEST: Final = 1e12
_LONGEST_S: Final = 1e8  # three years, in ticks of a minute
DEFAULTS: Final[Mapping[str, float]] = MappingProxyType(
    {"min_gpus": 1, "max_gpus": math.inf, "serial": 0.05, "noise": 0, "grow": 1, "epochs": 10, "user": 0, "priority": 0}
)
"""Columns that may be left out, and what they then hold; a user is a text."""
