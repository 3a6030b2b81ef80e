"""Writes down a step, moment by moment, while it happens: for real, or on a twin of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from patrickstar.core.plane import PlaneRef
from patrickstar.core.trace import Moment, Phase, Rows, Touch, Trace

__all__ = ["TraceRecorder"]


class TraceRecorder:
    """Collects moments into a trace.

    Args:
        restart_peak: gives the peak of non-model bytes since it was called last; a moment's bytes are those until the next one.
    """

    def __init__(self, restart_peak: Callable[[], int]) -> None:
        self._restart_peak = restart_peak
        self._moments: list[Moment] = []
        self._before_first = 0

    def moment(
        self,
        phase: Phase,
        label: str,
        touches: Iterable[Touch],
        held: Iterable[PlaneRef],
        rows: Rows | None = None,
    ) -> None:
        """The next moment begins."""
        self._settle()
        touches = tuple(sorted(touches, key=lambda touch: touch.ref))
        touched = {touch.ref for touch in touches}
        held = tuple(sorted(ref for ref in held if ref not in touched))
        self._moments.append(Moment(phase, label, touches, held, rows=rows))

    def _settle(self) -> None:
        peak = self._restart_peak()
        if not self._moments:
            self._before_first = peak  # what comes before the first moment is part of it
            return
        if len(self._moments) == 1:
            peak = max(peak, self._before_first)
        self._moments[-1] = replace(self._moments[-1], nonmodel_bytes=peak)

    def trace(self) -> Trace:
        """What has been written down; the last moment ends now."""
        self._settle()
        return Trace(tuple(self._moments))
