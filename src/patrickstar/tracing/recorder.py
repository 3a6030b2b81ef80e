"""A recorder that writes down a step, moment by moment, while it happens: for real, or on a twin of fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from patrickstar.core.planes import EXP_AVG, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.tracing.live_bytes import LiveBytes


class TraceRecorder:
    """Collects moments into a trace. `meter`: of non-model bytes; a moment's are those until the next moment."""

    def __init__(self, meter: LiveBytes) -> None:
        self._meter = meter
        self._seen: list[tuple[Phase, str, tuple[Touch, ...], tuple[PlaneRef, ...]]] = []
        self._peaks: list[int] = []
        self._live: list[int] = []

    def moment(self, phase: Phase, label: str, touches: Sequence[Touch], held: Iterable[PlaneRef]) -> None:
        """Writes down a moment, which begins now."""
        self._peaks.append(self._meter.restart_peak())
        self._live.append(self._meter.live)
        used = _only_used(touches)
        self._seen.append((phase, label, tuple(touches), tuple(ref for ref in held if ref not in used)))

    def trace(self) -> Trace:
        """The trace of what has been written down; the last moment ends now."""
        self._peaks.append(self._meter.restart_peak())
        before_first, *peaks = self._peaks
        if not peaks:
            return Trace(())
        peaks[0] = max(peaks[0], before_first)  # what comes before the first moment is part of it
        moments = zip(self._seen, peaks, self._live, strict=True)
        return Trace(tuple(Moment(*seen, nonmodel_bytes=peak, live_bytes=live) for seen, peak, live in moments))


def _only_used(touches: Sequence[Touch]) -> set[PlaneRef]:
    """The units of touches that need not be told to be held as well: where a gradient updates its parameter, who holds that may not be touched."""
    refs = {touch.ref for touch in touches}
    return set() if any(ref.plane == EXP_AVG for ref in refs) else refs
