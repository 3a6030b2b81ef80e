"""Display of a run for a person: progress bars in a terminal, a plain line now and then elsewhere, a table at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from patrickstar.cli.event_log import StepRecord, Summary
from patrickstar.units import format_bytes

# Where nobody looks at a terminal, a line this often tells a log's reader that the run lives.
PLAIN_EVERY_S: Final = 10.0

Budgets = Mapping[str, int]


class Advance(Protocol):
    """Says how much more is done, and what it has come to."""

    def __call__(self, more: int, text: str = "") -> None: ...


class Display:
    """Says things to a person, in a way that fits where the person looks."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, title: str, total: int, *, done: int = 0) -> Iterator[Advance]:
        """A context for long work of known length, of which some may be done already.

        A plain line comes now and then, and where there is text to show, at both ends.
        """
        if not self._console.is_terminal:
            yield self._plain(title, total, done)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        last = TextColumn("{task.fields[text]}", markup=False)
        with Progress(*columns, last, console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=total, completed=done, text="")

            def advance(more: int, text: str = "") -> None:
                progress.update(task, advance=more, text=text)

            yield advance

    def _plain(self, title: str, total: int, done: int) -> Advance:
        first, started = done, self._clock()
        told = started

        def advance(more: int, text: str = "") -> None:
            nonlocal done, told
            begins = done == first
            done += more
            now = self._clock()
            due = bool(text) if begins or done >= total else now - told >= PLAIN_EVERY_S
            if due:
                told = now
                rate = (done - first) / max(now - started, 1e-9)
                shown = f"{title} {done}/{total}, {rate:.3g}/s, {_duration((total - done) / rate)} left"
                self.note(f"{shown}  {text}".rstrip())

        return advance

    def summary(self, summary: Summary, *, budgets: Budgets) -> None:
        """A table of what the run came to: memory and traffic, predicted beside measured."""
        table = Table(title="predicted and measured", title_justify="left", title_style="bold")
        table.add_column("")
        for column in ("predicted", "measured", "budget"):
            table.add_column(column, justify="right")
        predicted = summary.predicted
        tiers = [tier for tier in ("device", "host", "disk") if summary.peak.get(tier) or predicted.peak.get(tier)]
        for tier in tiers:
            sizes = [format_bytes(peak.get(tier, 0)) for peak in (predicted.peak, summary.peak)]
            table.add_row(f"{tier} peak", *sizes, _of(budgets, tier))
        on_host = tiers and "device" not in tiers
        expected = format_bytes(predicted.peak.get("host", 0)) if on_host else ""
        table.add_row("process growth", expected, format_bytes(summary.rss_peak_growth), _of(budgets, "host"))
        for link in sorted(summary.moved_per_step.keys() | predicted.moved.keys()):
            moved = [by_link.get(link, 0) for by_link in (predicted.moved, summary.moved_per_step)]
            if any(moved):
                table.add_row(f"{link} a step", *map(format_bytes, moved), "")
        self._console.print(table)
        validation = f"{_number(summary.first_validation_loss)} -> {_number(summary.validation_loss)}"
        self.note(f"loss {_number(summary.first_loss)} -> {_number(summary.last_loss)}, validation {validation}")
        self.note(
            f"{summary.steps} steps, {summary.tokens_per_second:.0f} tokens/s, {_duration(summary.seconds)}; "
            f"{summary.parameters / 1e6:.1f}M parameters, model data {format_bytes(summary.model_data_bytes)}"
        )


class NoteHandler(logging.Handler):
    """Sends the library's messages where everything else is said, above a progress bar instead of through it."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._display.note(f"{prefix}{record.getMessage()}")


def step_text(record: StepRecord, held: Mapping[str, int], budgets: Budgets) -> str:
    """A step in a line: its loss and speed, and what each tier holds now."""
    parts = [f"loss {record.loss:.4f}", f"{record.tokens_per_second:.0f} tokens/s"]
    for tier, nbytes in held.items():
        if nbytes:
            budget = _of(budgets, tier)
            parts.append(f"{tier} {format_bytes(nbytes)}" + (f" of {budget}" if budget else ""))
    return "  ".join(parts)


def _of(budgets: Budgets, tier: str) -> str:
    return format_bytes(budgets[tier]) if tier in budgets else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
