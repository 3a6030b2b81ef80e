"""The log of a run: one JSON object a line, each written out before the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as it was: the mean loss of the step's micro-batches, and what the step took."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    grad_norm: float | None
    peak: Mapping[str, int]
    rss: int

    def row(self) -> dict[str, Any]:
        """The step as logged. `loss_hex` has every bit of the loss, and `nan` and `inf`, for which JSON has no number."""
        return {"event": "step", **_plain(self), "loss_hex": self.loss.hex()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction made before the first step: peak by tier; of one step, bytes by link and (later) seconds."""

    peak: Mapping[str, int]
    moved: Mapping[str, int]
    step_seconds: float | None = None

    def row(self) -> dict[str, Any]:
        return dict(_plain(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run. `moved` is all that was moved, evaluation included; `moved_per_step` what its last step moved."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    first_validation_loss: float | None
    validation_loss: float | None
    peak: Mapping[str, int]
    rss_peak_growth: int
    moved: Mapping[str, int]
    moved_per_step: Mapping[str, int]
    predicted: Predicted
    model_data_bytes: int
    parameters: int
    seconds: float
    tokens_per_second: float

    def row(self) -> dict[str, Any]:
        return {"event": "summary", **_plain(self)}


class EventLog:
    """`--log-json`: begun anew, or appended to where a run goes on. Without a file it takes rows and writes nothing.

    What was there before goes when the first row comes: a run that fails on the way to it has destroyed no log.
    """

    def __init__(self, path: Path | None, *, append: bool) -> None:
        self._file: TextIO | None = None
        self._begins_anew = not append
        if path is not None:
            self._file = path.open("a", encoding="utf-8")
            if append and path.read_bytes()[-1:] not in (b"", b"\n"):  # the run was killed while writing its last line
                self._file.write("\n")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, row: Row) -> None:
        """Appends a row and flushes it."""
        if self._file is not None:
            if self._begins_anew:
                self._file.truncate(0)
                self._begins_anew = False
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()


def _plain(value: Any) -> Any:
    """The value as JSON has it: null where it has no number for it."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
