"""Growth of this process while it trains: what `host_memory` promises to bound."""

from __future__ import annotations

from torch import nn

from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes


class ResidentGrowth:
    """The process's size above the one that `host_memory` is counted from: its size when `manage` is called, less the
    weights that the session takes over.

    The weights were built before: where the budget is smaller than they are, the first moments of `manage` cannot keep
    it. So what `manage` needs counts from the size that it found, everything later from the one without weights.
    """

    def __init__(self, model: nn.Module) -> None:
        storages = [p.untyped_storage() for p in model.parameters() if p.device.type == "cpu"]
        weights = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # tied ones once
        reset_peak()
        self._before = resident_bytes()
        self._base = self._before - weights
        self.in_manage = 0
        """What `manage` took above what was there when it was called."""

    def managed(self) -> None:
        """The session has the weights now."""
        self.in_manage = max(0, peak_resident_bytes() - self._before)
        reset_peak()

    def resident(self) -> int:
        """The size of the whole process now."""
        return resident_bytes()

    def now(self) -> int:
        """Bytes that the process has grown by now."""
        return max(0, resident_bytes() - self._base)

    def peak(self) -> int:
        """Bytes that the process has grown by at most."""
        return max(self.in_manage, peak_resident_bytes() - self._base)
