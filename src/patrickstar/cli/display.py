"""Words of a run: for a person, progress bars in a terminal, a plain line now and then elsewhere, a table at the end; and the log, for programs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from patrickstar.units import format_bytes

# Where nobody looks at a terminal, a line this often tells a log's reader that the run lives.
PLAIN_EVERY_S: Final = 10.0

Row = Mapping[str, Any]
Budgets = Mapping[str, int]


Advance = Callable[..., None]
"""Says how much more is done, and what it has come to: `advance(more, text="")`."""


class Display(logging.Handler):
    """Says things to a person, in a way that fits where the person looks: the library's messages too, above a progress bar instead of through it."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.INFO)
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self.note(f"{prefix}{record.getMessage()}")

    @contextmanager
    def progress(self, title: str, total: int, *, done: int = 0) -> Iterator[Advance]:
        """A context for long work of known length, of which some may be done already.

        A plain line comes now and then, and where there is text to show, at both ends.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        last = TextColumn("{task.fields[text]}", markup=False)
        is_terminal, told = self._console.is_terminal, self._clock()
        how: dict[str, Any] = {"console": self._console, "transient": True, "disable": not is_terminal}
        with Progress(*columns, last, get_time=self._clock, **how) as progress:
            progress.add_task(title, total=total, completed=done, text="")
            (task,) = progress.tasks

            def advance(more: int, text: str = "") -> None:
                nonlocal told
                begins = task.completed == done
                progress.update(task.id, advance=more, text=text)
                due = bool(text) if begins or task.finished else self._clock() - told >= PLAIN_EVERY_S
                if due and not is_terminal:
                    told = self._clock()
                    left = timedelta(seconds=task.time_remaining or 0)
                    rate = f", {task.speed:.3g}/s, {left} left" if task.speed else ""
                    self.note(f"{title} {task.completed:.0f}/{total}{rate}  {text}".rstrip())

            yield advance

    def summary(self, summary: Row, *, budgets: Budgets) -> None:
        """A table of what the run came to, of the log's last row: memory and traffic, predicted beside measured."""
        columns = [Column(name, justify="right") for name in ("predicted", "measured", "budget")]
        table = Table("", *columns, title="predicted and measured", title_justify="left", title_style="bold")
        peaks, moved = summary["predicted"]["peak"], summary["predicted"]["moved"]
        tiers = [tier for tier in ("device", "host", "disk") if summary["peak"].get(tier) or peaks.get(tier)]
        for tier in tiers:
            sizes = [format_bytes(peak.get(tier, 0)) for peak in (peaks, summary["peak"])]
            table.add_row(f"{tier} peak", *sizes, _of(budgets, tier))
        expected = format_bytes(peaks.get("host", 0)) if tiers and "device" not in tiers else ""
        table.add_row("peak RSS increase", expected, format_bytes(summary["rss_peak_growth"]), _of(budgets, "host"))
        for link in sorted(summary["moved_per_step"].keys() | moved.keys()):
            nbytes = [by_link.get(link, 0) for by_link in (moved, summary["moved_per_step"])]
            if any(nbytes):
                table.add_row(f"{link} per step", *map(format_bytes, nbytes), "")
        self._console.print(table)
        names = ("first_loss", "last_loss", "first_validation_loss", "validation_loss")
        first, last, before, after = ("-" if summary[name] is None else f"{summary[name]:.4f}" for name in names)
        self.note(f"loss {first} -> {last}, validation {before} -> {after}")
        self.note(
            f"{summary['steps']} steps, {summary['tokens_per_second']:.0f} tokens/s, {timedelta(seconds=round(summary['seconds']))}; "
            f"{summary['parameters'] / 1e6:.1f}M parameters, model states {format_bytes(summary['model_data_bytes'])}"
        )


def step_text(step: Row, held: Mapping[str, int], budgets: Budgets) -> str:
    """A step's row in a line: its loss and speed, and what each tier holds now."""
    budgeted = {tier: f" of {_of(budgets, tier)}" for tier in budgets}
    tiers = [f"{tier} {format_bytes(n)}{budgeted.get(tier, '')}" for tier, n in held.items() if n]
    return "  ".join([f"loss {step['loss']:.4f}", f"{step['tokens_per_second']:.0f} tokens/s", *tiers])


def _of(budgets: Budgets, tier: str) -> str:
    return format_bytes(budgets[tier]) if tier in budgets else ""


def print_table(rows: list[tuple[str, ...]], *, flush_left: int = 2) -> None:
    """Prints columns, so many of them flush left, so that `grep` and `awk` see plain lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:{'<' if at < flush_left else '>'}{widths[at]}}" for at, cell in enumerate(row)]
        click.echo("  ".join(cells).rstrip())


class EventLog(ExitStack):
    """`--log-json`: begun anew, or appended to where a run goes on. Without a file it takes rows and writes nothing.

    What was there before goes when the first row comes: a run that fails on the way to it has destroyed no log.
    """

    def __init__(self, path: Path | None, *, append: bool) -> None:
        super().__init__()
        self._file: TextIO | None = None
        self._begins_anew = not append
        if path is not None:
            self._file = self.enter_context(path.open("a", encoding="utf-8"))
            if append and path.read_bytes()[-1:] not in (b"", b"\n"):  # the run was killed while writing its last line
                self._file.write("\n")

    def write(self, row: Row) -> None:
        """Appends a row and flushes it."""
        if self._file is not None:
            if self._begins_anew:
                self._file.truncate(0)
                self._begins_anew = False
            plain = json.loads(json.dumps(row), parse_constant=lambda _: None)  # null where JSON has no number
            self._file.write(json.dumps(plain) + "\n")
            self._file.flush()
