"""What this machine reaches when it does one thing alone: products of matrices, reading and writing a disk. Rooflines are drawn from these."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from disk import CASES, Ours

from patrickstar.memory.works_under_way import DISK_REQUESTS

__all__ = ["disk_bandwidth", "matmul_peak"]

_MIB = 1 << 20
_SMALLEST = 256


def matmul_peak(dtype: torch.dtype, *, size: int = 2048, times: int = 3, seconds: float = 1.0) -> float:
    """Operations a second in products of square matrices, at best. They grow up to that size, or until the next would take longer than `seconds`.

    A processor without instructions for products of 16-bit types may take a minute where one that has them takes 10 ms.
    """
    best, width = 0.0, min(size, _SMALLEST)
    while True:
        left, right = torch.randn(width, width).to(dtype), torch.randn(width, width).to(dtype)
        fastest = min(_product(left, right) for _ in range(times))
        best = max(best, 2 * width**3 / fastest)
        larger = min(2 * width, size)
        if width == size or fastest * (larger / width) ** 3 > seconds:
            return best
        width = larger


def _product(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - began


def disk_bandwidth(directory: str, *, units: int = 64, times: int = 3) -> dict[str, float]:
    """Bytes a second over the lanes of a session, at best: reading, writing, and of both together when each direction is used; units of 4 MiB."""
    with tempfile.TemporaryDirectory(dir=directory) as made:
        disk = Ours(Path(made), units, 4 * _MIB, DISK_REQUESTS)
        disk.fill()
        found = {}
        for case, ways in CASES.items():
            seconds = []
            for _ in range(times):
                began = time.perf_counter()
                disk.run(ways)
                seconds.append(time.perf_counter() - began)
            found[case] = len(ways) * units * 4 * _MIB / min(seconds)
        disk.close()
    return found
