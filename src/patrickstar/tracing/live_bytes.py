"""Counts the bytes of tensors that are no chunk, operation by operation.

Each operation shows what it returns (`seen_operations.py`; in a trial run, `trial_operations.py`). A storage that has not been seen is new: it counts
from then until it dies. Views and in-place results are no new storage, and neither is anything over a slot. Works on fake tensors as on real
ones. It does not see what a kernel allocates and frees inside, nor what an allocator keeps; that a tensor takes a block of one it counts.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.core.planes import EXP_AVG, PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.tracing.seen_operations import show_to, shown_to


class LiveBytes:
    """The bytes of living tensors made while it counts.

    Args:
        is_slot: whether a tensor lies over a slot, and so is no non-model data.
        at_change: called with the bytes now alive, after each operation that made something.
        on_device: whether they take blocks of the allocator of a device.

    Attributes:
        live: bytes alive now. peak: the most since `restart_peak`. counts: whether new tensors are counted.
    """

    def __init__(
        self, is_slot: Callable[[Tensor], bool], at_change: Callable[[int], object] = int, *, on_device: bool = False
    ) -> None:
        self._is_slot = is_slot
        self._at_change = at_change
        self._on_device = on_device

        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # each with its bytes
        self._dead: deque[int] = deque()
        self._live = 0
        self.peak = 0
        self.counts = True
        self._makes_new: dict[Any, bool] = {}

    @property
    def live(self) -> int:
        """Bytes alive now."""
        while self._dead:
            self._live -= self._alive.pop(self._dead.popleft())[0]
        return self._live

    def restart_peak(self) -> int:
        """The peak in bytes so far; begins another peak, of what follows."""
        peak = max(self.peak, self.live)
        self.peak = self.live
        return peak

    def __call__(self, func: Any, result: Any) -> None:
        """Takes note of what an operation has returned."""
        if not self.counts:
            return
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = any(returned.alias_info is None for returned in func._schema.returns)
        if makes_new and self.note(result):
            live = self.live
            self.peak = max(self.peak, live)
            self._at_change(live)

    def note(self, value: Any) -> bool:
        """Counts a tensor, or those in a list, as far as they are new and no slots; tells whether there are any."""
        if isinstance(value, list | tuple):
            return max([self.note(item) for item in value], default=False)  # all of them: no shortcut
        if not isinstance(value, Tensor) or value.layout is not torch.strided or self._is_slot(value):
            return False
        storage = value.untyped_storage()
        key = storage._cdata
        if self._dead:
            _ = self.live  # settle: a new storage may have the address of one that has died
        if key in self._alive:
            return False
        nbytes = cuda_block_bytes(storage.nbytes()) if self._on_device else storage.nbytes()
        death = weakref.ref(storage, lambda _, key=key, dead=self._dead: dead.append(key))  # type: ignore[misc]
        self._alive[key] = nbytes, death
        self._live += nbytes
        return True

    def switch_on(self) -> None:
        """Counts what is made on this thread from now on, and in backwards that begin there."""
        show_to((*shown_to(), self))

    def retire(self) -> None:
        """Ends counting."""
        self.counts = False
        self.leave_retired()

    @staticmethod
    def leave_retired() -> None:
        """Shows nothing more to meters that have ended; those that ended in a backward, which put back what was before it, are seen here again."""
        show_to(tuple(seer for seer in shown_to() if seer.counts))

    @staticmethod
    def is_shared() -> bool:
        """Tells whether several meters count on this thread: then each counts what is made for the others too."""
        return sum(seer.counts for seer in shown_to()) > 1


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
        refs = {touch.ref for touch in touches}
        # Where a gradient updates its parameter, who holds that may not be touched: it is told to be held as well.
        used = set() if any(ref.plane == EXP_AVG for ref in refs) else refs
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
