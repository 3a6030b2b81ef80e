"""fp32 masters of 16-bit training: blocks of them, and the split master.

The split master is an fp32 value as a 16-bit weight and what is left over of its bit pattern, an integer. The sum of the two is the master again,
bit for bit:

    bits(master) = bits(fp32(weight)) + rest

A bf16 weight is the master rounded to the nearest, ties away from zero, and the rest has 16 bits, signed. (With ties to even one remainder would
need a seventeenth bit.) An fp16 weight is the master rounded to the nearest, ties to even, and the rest has 32 bits: below the smallest normal fp16
each halving takes a bit from the weight. A rest of zero is the weight itself as the master.

A master that is NaN becomes the NaN that torch makes, in bf16 the same everywhere and with its sign. One above the largest weight rounds to
infinity, as rounding does, and is a finite master again when joined.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK_NUMEL = 1 << 16
"""Elements that are widened at once: scratch that stays in a core's cache."""

GRAIN_NUMEL = 1 << 15  # that torch gives a thread at least
_LEAST_NUMEL = 1 << 10

_HALF = 0x8000
_NAN = 0x7FC00000


def blocks(numel: int, *, of: int = BLOCK_NUMEL) -> Iterator[slice]:
    """Slices of so many elements at a time, the last one shorter."""
    for start in range(0, numel, of):
        yield slice(start, min(start + of, numel))


def block_numel(numel: int, *, most: int) -> int:
    """Elements of so many that a pass takes at once on a device: a quarter, so that scratch is little beside the chunks, but no tiny blocks."""
    return min(most, max(_LEAST_NUMEL, numel // 4))


def scaled_blocks(piece: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """A 1-D piece in fp32, multiplied with the factors in their order (0-dim fp32), block by block; the piece itself where it is that already."""
    if not factors:
        yield piece
        return
    for span in blocks(piece.numel()):
        block = piece[span].to(torch.float32, copy=True)
        for factor in factors:
            block.mul_(factor)
        yield block


class Scratch(threading.local):
    """Blocks of these types to be written over: each thread has its own."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self._dtypes = dtypes
        self._on_host: tuple[Tensor, ...] = ()

    def blocks(self, device: torch.device, numel: int = BLOCK_NUMEL) -> tuple[Tensor, ...]:
        """A block of each type, until the next call. Those of a GPU, of so many elements, are its allocator's again in the stream's order."""
        if device.type == "cpu" and self._on_host and len(self._on_host[0]) >= numel:
            return self._on_host
        made = tuple(torch.empty(numel, dtype=dtype, device=device) for dtype in self._dtypes)
        if device.type == "cpu":
            self._on_host = made
        return made


def rest_type(weight: torch.dtype) -> torch.dtype:
    """The type of what completes weights of a 16-bit type to their masters."""
    return torch.int16 if weight is torch.bfloat16 else torch.int32


def split(master: Tensor, weight: Tensor, rest: Tensor, *, scratch: Tensor | None = None) -> None:
    """Writes an fp32 master into its parts: a bf16 or fp16 weight, and a rest of that one's `rest_type`. All contiguous and of one length.

    `scratch`: int32, to be written over; made where there is none.
    """
    bits = master.view(torch.int32)
    # On the host one pass, where looking for NaN takes ten: a finite sum has none. A device would have to be waited for.
    may_be_nan = not master.is_cpu or not bool(torch.isfinite(master.sum()))
    if may_be_nan:
        bits = torch.where(torch.isnan(master), (bits & -0x80000000) | _NAN, bits)
    if weight.dtype is torch.float16:
        weight.copy_(bits.view(torch.float32))
        shown = torch.empty_like(bits) if scratch is None else scratch
        shown.view(torch.float32).copy_(weight)
        torch.sub(bits, shown, out=rest)
        if may_be_nan:
            rest.masked_fill_(torch.isnan(weight), 0)  # torch widens one NaN to different ones
        return
    rest.copy_(bits)  # the lower 16 bits are the remainder of rounding the rest, as a signed number
    upper = torch.add(bits, _HALF, out=scratch).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper)


def join(weight: Tensor, rest: Tensor, master: Tensor, *, scratch: Tensor | None = None) -> None:
    """Writes what two parts come to: the inverse of `split`, with the same arguments."""
    master.copy_(weight)
    wide = rest
    if rest.dtype is torch.int16:
        wide = rest.to(torch.int32) if scratch is None else scratch.copy_(rest)  # adding one type to another is slow
    master.view(torch.int32).add_(wide)
