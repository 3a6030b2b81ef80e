"""Writes down a step, moment by moment, while it happens: for real, or on a twin of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Phase, Rows, Touch, Trace

__all__ = ["TraceRecorder"]


class TraceRecorder:
    """Collects moments into a trace.

    Args:
        restart_peak: gives the peak of non-model bytes since it was called last; a moment's bytes are those until the next one.
    """

    def __init__(self, restart_peak: Callable[[], int]) -> None:
        self._restart_peak = restart_peak
        self._seen: list[tuple[Phase, str, Sequence[Touch], tuple[PlaneRef, ...], Rows | None]] = []
        self._nonmodel_bytes: list[int] = []

    def moment(
        self,
        phase: Phase,
        label: str,
        touches: Sequence[Touch],
        held: Iterable[PlaneRef],
        rows: Rows | None = None,
    ) -> None:
        """The next moment begins."""
        self._nonmodel_bytes.append(self._restart_peak())
        self._seen.append((phase, label, touches, tuple(held), rows))

    def trace(self) -> Trace:
        """What has been written down; the last moment ends now."""
        self._nonmodel_bytes.append(self._restart_peak())
        before_first, *peaks = self._nonmodel_bytes
        if not peaks:
            return Trace(())
        peaks[0] = max(peaks[0], before_first)  # what comes before the first moment is part of it
        return Trace(
            tuple(
                Moment(
                    phase,
                    label,
                    tuple(touches),
                    tuple(ref for ref in held if ref not in {touch.ref for touch in touches}),
                    nonmodel_bytes=peak,
                    rows=rows,
                )
                for (phase, label, touches, held, rows), peak in zip(self._seen, peaks, strict=True)
            )
        )
