"""Counts the bytes of tensors that are no chunk, operation by operation.

A dispatch mode sees every tensor that an operation returns. A storage it has not seen is new: it counts from then until it dies. Views and
in-place results are no new storage, and neither is anything over a slot. Works on fake tensors as on real ones. It does not see what a kernel
allocates and frees inside, nor what an allocator keeps; that a tensor takes a block of one it counts.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.torch_private import Plain, backward_id, push_lowest, without_dispatch_modes

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """The bytes of living tensors made while the mode is on.

    Args:
        is_slot: whether a tensor lies over a slot, and so is no non-model data.
        at_change: called with the bytes now alive, after each operation that made something.
        on_device: whether they take blocks of the allocator of a device.

    Attributes:
        live: bytes alive now. peak: the most since `restart_peak`. counts: whether new tensors are counted.
    """

    def __init__(
        self,
        is_slot: Callable[[Tensor], bool],
        at_change: Callable[[int], None] | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        super().__init__()
        self._is_slot = is_slot
        self._at_change = at_change
        self._on_device = on_device

        self._bytes: dict[int, int] = {}
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._dead: deque[int] = deque()
        self._live = 0
        self.peak = 0
        self.counts = True
        self._retired = False
        self._is_lowest = False
        self._makes_new: dict[Any, bool] = {}

    @property
    def live(self) -> int:
        """Bytes alive now."""
        while self._dead:
            key = self._dead.popleft()
            self._live -= self._bytes.pop(key)
            del self._deaths[key]
        return self._live

    def restart_peak(self) -> int:
        """The peak in bytes so far; begins another peak, of what follows."""
        peak = max(self.peak, self.live)
        self.peak = self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Down here operations are torch's own (an accumulator asks a fake parameter for its metadata, with that parameter's lock held): what
        # they touch is no use of a parameter.
        with Plain():
            result = func(*args, **(kwargs or {}))
        if not self.counts:
            return result
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = any(returned.alias_info is None for returned in func._schema.returns)
        if makes_new and self._note(result):
            live = self.live
            self.peak = max(self.peak, live)
            if self._at_change is not None:
                self._at_change(live)
        return result

    def _note(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return max([self._note(item) for item in value], default=False)  # all of them: no shortcut
        if not isinstance(value, Tensor) or value.layout is not torch.strided or self._is_slot(value):
            return False
        storage = value.untyped_storage()
        key = storage._cdata
        if self._dead:
            _ = self.live  # settle: a new storage may have the address of one that has died
        if key in self._bytes:
            return False
        nbytes = cuda_block_bytes(storage.nbytes()) if self._on_device else storage.nbytes()
        self._bytes[key] = nbytes
        self._deaths[key] = weakref.ref(storage, lambda _, key=key, dead=self._dead: dead.append(key))  # type: ignore[misc]
        self._live += nbytes
        return True

    def switch_on(self) -> None:
        """Switches the mode on: below those of the user's, which may be left while it is on."""
        self._is_lowest = bool(_get_current_dispatch_mode_stack())
        if self._is_lowest:
            push_lowest(self)
        else:
            self.__enter__()

    def retire(self) -> None:
        """Ends counting; the mode is left at once where it is the lowest or the innermost one of this thread, else when it is that."""
        self.counts, self._retired = False, True
        self.leave_retired()

    @staticmethod
    def leave_retired() -> None:
        """Leaves retired modes that can be left now. From inside a backward none can: the engine puts the stack back as it was."""
        if backward_id() != -1:
            return
        modes = _get_current_dispatch_mode_stack()
        over = [mode for mode in modes if isinstance(mode, LiveBytes) and mode._retired]
        if any(mode._is_lowest for mode in over):
            without_dispatch_modes(lambda mode: isinstance(mode, LiveBytes) and mode._retired and mode._is_lowest)
            modes = _get_current_dispatch_mode_stack()
        while modes and modes[-1] in over:
            modes.pop().__exit__(None, None, None)

    @staticmethod
    def is_shared() -> bool:
        """Tells whether several meters count on this thread: then each counts what is made for the others too."""
        counting = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, LiveBytes) and mode.counts]
        return len(counting) > 1
