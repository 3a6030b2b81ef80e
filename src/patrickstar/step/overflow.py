"""Overflow: which gradients have arrived with an Inf or NaN. On a device the host waits for that only when it asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from patrickstar.core.cuda_blocks import cuda_block_bytes

_BLOCK = 128  # flags of 4 bytes: together what an allocator of a device gives out for one


@dataclass(slots=True, eq=False)
class OverflowFlag:
    """The answer to a look at a piece of a parameter's gradient. `on_device`: the answer there, until the host has read it."""

    name: str
    on_device: Tensor | None
    is_finite: bool = True

    @classmethod
    def of(cls, name: str, is_finite: Tensor) -> OverflowFlag:
        """A flag of no dimensions, read at once where it is on the host."""
        return cls(name, None, bool(is_finite)) if is_finite.is_cpu else cls(name, is_finite)


def read(flags: Iterable[OverflowFlag], numbers: Tensor | None = None) -> list[float]:
    """Reads what is still on a device, and numbers beside it (1-D, fp64), which are given: the host waits once for all of them."""
    unread = [flag for flag in flags if flag.on_device is not None]
    found = [flag.on_device for flag in unread if flag.on_device is not None]
    if not found:
        return [] if numbers is None else numbers.tolist()
    answers = torch.stack(found)
    values = answers.tolist() if numbers is None else torch.cat([answers.to(numbers.dtype), numbers]).tolist()
    for flag, value in zip(unread, values, strict=False):
        flag.on_device, flag.is_finite = None, bool(value)
    return values[len(unread) :]


def overflow_bytes(looks: int) -> int:
    """The most bytes of a device that so many looks take: for the flags, a block that is begun, and what `read` makes of them."""
    return cuda_block_bytes(4 * (looks + _BLOCK)) + cuda_block_bytes(4 * looks) + 2 * cuda_block_bytes(8 * looks)


def names_of(flags: Sequence[OverflowFlag]) -> list[str]:
    """The names of those that have overflowed, first come first. Waits for a device once, where something is still there."""
    read(flags)
    return list(dict.fromkeys(flag.name for flag in flags if not flag.is_finite))


class Overflow:
    """The parameters whose gradients have overflowed, as far as they are still there.

    Flags on a device lie side by side in blocks, and take no more of its memory than they are. Each block is for one stream, so that none writes
    before another has made the block.
    """

    def __init__(self) -> None:
        self._flags: list[OverflowFlag] = []
        self._block: Tensor | None = None
        self._used = 0
        self._place: tuple[torch.device, torch.Stream | None] | None = None

    @contextmanager
    def look(self, name: str, device: torch.device) -> Iterator[Tensor]:
        """Gives a flag (0-dim, int32) that is 1, for a look at a piece of a parameter's gradient, and notes what that makes of it (`Passes.look`)."""
        is_finite = self._new_flag(device)
        yield is_finite
        flag = OverflowFlag.of(name, is_finite)
        if flag.on_device is not None or not flag.is_finite:
            self._flags.append(flag)

    def _new_flag(self, device: torch.device) -> Tensor:
        place = (device, None if device.type == "cpu" else torch.accelerator.current_stream(device))
        if self._block is None or self._used == _BLOCK or place != self._place:
            self._block, self._used, self._place = torch.ones(_BLOCK, dtype=torch.int32, device=device), 0, place
        self._used += 1
        return self._block[self._used - 1]

    def forget(self, *names: str) -> None:
        """Forgets gradients, which have been let go or written anew."""
        self._flags = [flag for flag in self._flags if flag.name not in names]

    def flags(self) -> list[OverflowFlag]:
        """The flags so far, read or not, first come first, but for those of pieces that are known to be finite."""
        return [flag for flag in self._flags if flag.on_device is not None or not flag.is_finite]
