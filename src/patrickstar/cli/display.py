"""Display of a run for a person: a live panel in a terminal, a plain line now and then elsewhere, a table at the end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from patrickstar.cli.event_log import StepRecord, Summary
from patrickstar.units import format_bytes

# Where nobody looks at a terminal, a line this often tells a log's reader that the run lives.
PLAIN_EVERY_S: Final = 10.0
# Steps whose mean duration the estimate is made from: the first ones are slower, and machines change their mind.
RECENT: Final = 10
_BARS: Final = "▁▂▃▄▅▆▇█"

Budgets = Mapping[str, int]


class TrainingView:
    """The numbers of a running training, and the lines that show them."""

    def __init__(
        self,
        *,
        done: int,
        steps: int,
        budgets: Budgets,
        validation: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self.budgets = budgets
        self.validation = validation
        self._clock = clock

        self.done = done
        self.losses: list[float] = []
        self._latest: StepRecord | None = None
        self._held: Mapping[str, int] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._shown_at = -PLAIN_EVERY_S

    def step(self, record: StepRecord, *, held: Mapping[str, int]) -> None:
        """A step is done; `held` is what each tier holds now."""
        self.done = record.step
        self.losses.append(record.loss)
        self._latest, self._held = record, held
        self._recent.append(record.seconds)

    def line_due(self) -> bool:
        """Tells whether a plain line should be printed now: the first and the last step, and now and then between."""
        if len(self.losses) > 1 and self.done < self.steps and self._clock() - self._shown_at < PLAIN_EVERY_S:
            return False
        self._shown_at = self._clock()
        return True

    def left_s(self) -> float | None:
        """Seconds that the remaining steps will take, as the latest ones did."""
        return (self.steps - self.done) * sum(self._recent) / len(self._recent) if self._recent else None

    def line(self) -> str:
        """The view in one line."""
        parts = [f"step {self.done}/{self.steps}"]
        if self._latest is not None:
            parts += [f"loss {self._latest.loss:.4f}", f"{self._latest.tokens_per_second:.0f} tokens/s"]
            parts += [f"{_duration(self.left_s())} left"]
            parts += [_usage(tier, nbytes, self.budgets) for tier, nbytes in self._held.items() if nbytes]
        return "  ".join(parts)

    def panel(self) -> RenderableType:
        """Progress, loss, speed and time left, and a bar for every tier against its budget."""
        latest = self._latest
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(width=40)
        grid.add_column()
        left = f"{_duration(self.left_s())} left" if latest else "first step: tracing and planning"
        grid.add_row(
            "step", ProgressBar(total=self.steps, completed=self.done, width=40), f"{self.done}/{self.steps}  {left}"
        )
        if latest is not None:
            held_out = f"  held-out text {self.validation:.4f} at the start" if self.validation is not None else ""
            line = Text(sparkline(self.losses, width=40), style="cyan")
            grid.add_row("loss", line, f"{latest.loss:.4f}{held_out}")
            grid.add_row("speed", "", f"{latest.tokens_per_second:.0f} tokens/s  {latest.seconds:.2f} s a step")
        for tier, nbytes in self._held.items():
            budget = self.budgets.get(tier)
            if nbytes or budget:
                bar = ProgressBar(total=budget or max(nbytes, 1), completed=nbytes, width=40, complete_style="green")
                of = f" of {format_bytes(budget)}" if budget else ""
                peak = max(nbytes, latest.peak.get(tier, 0) if latest else 0)
                grid.add_row(tier, bar, f"{format_bytes(nbytes)}{of}  peak {format_bytes(peak)}")
        return Group(grid)


class Display:
    """Says things to a person, in a way that fits where the person looks."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self.live = self._console.is_terminal

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A context for long work of known length before and after training; call what it gives with how much more is done."""
        if not self.live:
            started = told = time.monotonic()
            done = 0

            def tell(more: int) -> None:
                nonlocal done, told
                done += more
                now = time.monotonic()
                if now - told >= PLAIN_EVERY_S and done < total:
                    told = now
                    rate = done / (now - started)
                    self.note(f"{title}: {done}/{total}, {rate:.1f}/s, {_duration((total - done) / rate)} left")

            yield tell
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda more: progress.advance(task, more)

    @contextmanager
    def training(self, view: TrainingView) -> Iterator[Callable[[], None]]:
        """A context that shows the view while the view changes; call what it gives after every step."""
        if not self.live:
            yield lambda: self.note(view.line()) if view.line_due() else None
            return
        with Live(get_renderable=view.panel, console=self._console, refresh_per_second=4) as panel:
            yield panel.refresh

    def summary(self, summary: Summary, *, budgets: Budgets) -> None:
        """A table of what the run came to: memory and traffic, predicted beside measured."""
        table = Table(title="predicted and measured", title_justify="left", title_style="bold")
        table.add_column("")
        for column in ("predicted", "measured", "budget"):
            table.add_column(column, justify="right")
        for name, predicted, measured, budget in _memory_rows(summary, budgets):
            table.add_row(name, predicted, measured, budget)
        for link in sorted(summary.moved_per_step.keys() | summary.predicted.moved.keys()):
            expected, found = summary.predicted.moved.get(link, 0), summary.moved_per_step.get(link, 0)
            if expected or found:
                table.add_row(f"{link} a step", format_bytes(expected), format_bytes(found), "")
        self._console.print(table)
        for line in _closing(summary):
            self.note(line)


class NoteHandler(logging.Handler):
    """Sends the library's messages where everything else is said, above a live panel instead of through it."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._display.note(f"{prefix}{record.getMessage()}")


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Values as bars of eight heights; means where there are more values than places, blanks where one is no number."""
    if not values:
        return ""
    places = min(width, len(values))
    cuts = [index * len(values) // places for index in range(places + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(cuts)]
    real = [value for value in means if abs(value) < float("inf")]  # neither inf nor NaN
    if not real:
        return " " * places
    low, span = min(real), max(real) - min(real)
    heights = [round((value - low) / span * 7) if value in real and span else 0 for value in means]
    return "".join(_BARS[height] if value in real else " " for value, height in zip(means, heights, strict=True))


def _memory_rows(summary: Summary, budgets: Budgets) -> Iterator[tuple[str, str, str, str]]:
    tiers = [tier for tier in ("device", "host", "disk") if summary.peak.get(tier) or summary.predicted.peak.get(tier)]
    for tier in tiers:
        budget = format_bytes(budgets[tier]) if tier in budgets else ""
        expected = format_bytes(summary.predicted.peak.get(tier, 0))
        yield f"{tier} peak", expected, format_bytes(summary.peak.get(tier, 0)), budget
    on_host = tiers and "device" not in tiers
    expected = format_bytes(summary.predicted.peak.get("host", 0)) if on_host else ""
    budget = format_bytes(budgets["host"]) if "host" in budgets else ""
    yield "process growth", expected, format_bytes(summary.rss_peak_growth), budget


def _closing(summary: Summary) -> Iterator[str]:
    def fall(first: float | None, last: float | None) -> str:
        return f"{_number(first)} -> {_number(last)}"

    validation = fall(summary.first_validation_loss, summary.validation_loss)
    yield f"loss {fall(summary.first_loss, summary.last_loss)}, validation {validation}"
    data = format_bytes(summary.model_data_bytes)
    yield (
        f"{summary.steps} steps, {summary.tokens_per_second:.0f} tokens/s, {_duration(summary.seconds)}; "
        f"{summary.parameters / 1e6:.1f}M parameters, model data {data}"
    )


def _usage(tier: str, nbytes: int, budgets: Budgets) -> str:
    return f"{tier} {format_bytes(nbytes)}" + (f" of {format_bytes(budgets[tier])}" if tier in budgets else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
