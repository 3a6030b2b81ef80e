"""Shortages of memory on a device: who is told before torch raises, and may raise something that says more."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache

import torch

from patrickstar.torch_private import attach_out_of_memory_observer

Listener = Callable[[int, int, int], None]
"""Is told that a device has no memory for so many bytes, how many are free, and of how many, in the thread that asks. It may raise there."""


def tell_when_out_of_memory(device: torch.device, listener: Listener) -> None:
    """Tells a listener, for as long as it lives, of tensors that a device has no memory for."""
    _listeners().setdefault(device.index or 0, weakref.WeakSet()).add(listener)


@cache
def _listeners() -> dict[int, weakref.WeakSet[Listener]]:
    """Listeners by number of the device. torch takes observers and never lets go of one: one of ours is in a process, from the first session on."""
    found: dict[int, weakref.WeakSet[Listener]] = {}

    def tell(device: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        for listener in list(found.get(device, ())):
            listener(asked_bytes, free_bytes, total_bytes)

    attach_out_of_memory_observer(tell)
    return found
