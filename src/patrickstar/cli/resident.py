"""Growth of this process while it trains: what `host_memory` promises to bound."""

from __future__ import annotations

from torch import nn

from patrickstar.deferred.deferred_init import present_and_absent_bytes
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes


class ResidentGrowth:
    """The process's size above the one that `host_memory` is counted from: its size when `manage` is called, which follows,
    less the weights that are in memory and that the session takes over.
    """

    def __init__(self, model: nn.Module) -> None:
        present, _ = present_and_absent_bytes(model.parameters())
        reset_peak()
        self._base = resident_bytes() - present

    def now(self) -> int:
        """Bytes that the process has grown by now."""
        return max(0, resident_bytes() - self._base)

    def peak(self) -> int:
        """Bytes that the process has grown by at most."""
        return max(0, peak_resident_bytes() - self._base)
