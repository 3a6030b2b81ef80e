"""How much of a disk's speed transfers have: the library's own road against raw sequential direct I/O.

    python benchmarks/disk.py [--directory DIR] [--pairs N] [--units N] [--unit-mib N] [--depth N] [--write]

Raw is a file for each direction, read and written from front to back by `--depth` threads, each of which moves the next unit with one call of
`preadv` or `pwritev` past the page cache. Ours is a pool of the same units in the same directory, moved over the session's own lanes, `--depth`
of them issued before the first is waited for, as a plan with slots for so many does. Every file is written once before anything is measured: what
was never written reads far too fast. Reads alone, writes alone, and both at once, each a raw and an own pass in turn, in an order that changes.
Prints bytes a second, and the ratio of ours to raw with the median's 90 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine
from overhead_sides import interval

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.memory.disk import DiskPool
from patrickstar.memory.lanes import Ticket
from patrickstar.memory.mapping import reserve
from patrickstar.memory.works_under_way import lanes_of

CASES = {"read": ("read",), "write": ("write",), "both": ("read", "write")}
_MIB = 1 << 20


class Raw:
    """Files of the system, read or written from front to back by threads that take the next unit each."""

    def __init__(self, directory: Path, units: int, nbytes: int, depth: int) -> None:
        self._units, self._nbytes = units, nbytes
        self._fds = {
            way: os.open(directory / f"raw.{way}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            for way in ("read", "write")
        }
        self._buffers = {way: _buffers(depth, nbytes) for way in self._fds}
        for fd in self._fds.values():
            os.posix_fallocate(fd, 0, units * nbytes)

    def fill(self) -> None:
        """Writes everything once."""
        for way, fd in self._fds.items():
            for number in range(self._units):
                os.pwritev(fd, self._buffers[way][:1], number * self._nbytes)

    def run(self, ways: Sequence[str]) -> None:
        """Moves every unit in each of these directions."""
        threads = []
        for way in ways:
            left = deque(range(self._units))
            threads += [threading.Thread(target=self._move, args=(way, left, buffer)) for buffer in self._buffers[way]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _move(self, way: str, left: deque[int], buffer: memoryview) -> None:
        call: Callable[[int, list[memoryview], int], int] = os.preadv if way == "read" else os.pwritev
        while True:
            try:
                at = left.popleft() * self._nbytes
            except IndexError:
                return
            moved = call(self._fds[way], [buffer], at)
            assert moved == self._nbytes, f"{moved} of {self._nbytes} bytes came"

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


class Ours:
    """A pool of the same units, and the lanes of a session."""

    def __init__(self, directory: Path, units: int, nbytes: int, depth: int) -> None:
        self._depth = depth
        self._units = {way: [PlaneRef(number, way) for number in range(units)] for way in ("read", "write")}
        sizes = {ref: nbytes for refs in self._units.values() for ref in refs}
        self._pool = DiskPool(directory, units=sizes, budget_bytes=sum(sizes.values()))
        make = lanes_of()
        self._lanes = {"read": make(Tier.DISK, Tier.HOST), "write": make(Tier.HOST, Tier.DISK)}
        self._buffers = {way: _buffers(depth, nbytes) for way in self._units}

    def fill(self) -> None:
        """Writes everything once."""
        for way, refs in self._units.items():
            for ref in refs:
                self._pool.writing(ref, self._buffers[way][0])()

    def run(self, ways: Sequence[str]) -> None:
        """Moves every unit in each of these directions."""
        under_way: dict[str, deque[Ticket]] = {way: deque() for way in ways}
        for number in range(len(self._units["read"])):
            for way in ways:
                if len(under_way[way]) == self._depth:
                    under_way[way].popleft().wait()
                under_way[way].append(self._issue(way, number))
        for tickets in under_way.values():
            for ticket in tickets:
                ticket.wait()

    def _issue(self, way: str, number: int) -> Ticket:
        buffer, ref = self._buffers[way][number % self._depth], self._units[way][number]
        work = (self._pool.reading if way == "read" else self._pool.writing)(ref, buffer)
        return self._lanes[way].issue(work, nbytes=buffer.nbytes)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._pool.close()


def _buffers(depth: int, nbytes: int) -> list[memoryview]:
    found = [memoryview(reserve(nbytes)).cast("B") for _ in range(depth)]
    for number, buffer in enumerate(found):
        buffer[:] = bytes([number + 1]) * nbytes  # pages that are there
    return found


def measured(sides: dict[str, Raw | Ours], ways: Sequence[str], nbytes: int, pairs: int) -> dict[str, Any]:
    """Bytes a second of both sides in turn, and processor seconds a GiB."""
    order = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(pairs + 1):
        order.reverse()
        for name in order:
            began, spent = time.perf_counter(), time.process_time()
            sides[name].run(ways)
            rates[name].append(nbytes * len(ways) / (time.perf_counter() - began))
            busy[name].append((time.process_time() - spent) / (nbytes * len(ways) / 2**30))
    ratios = [own / raw for own, raw in zip(rates["ours"][1:], rates["raw"][1:], strict=True)]
    return {
        "rates": {name: statistics.median(found[1:]) for name, found in rates.items()},
        "processor_seconds_a_gib": {name: statistics.median(found[1:]) for name, found in busy.items()},
        "ratio": {"median": statistics.median(ratios), "interval": interval(sorted(ratios))},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--unit-mib", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    nbytes = arguments.unit_mib * _MIB
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        sides = {
            kind.__name__.lower(): kind(Path(made), arguments.units, nbytes, arguments.depth) for kind in (Raw, Ours)
        }
        for side in sides.values():
            side.fill()
        cases = {case: measured(sides, ways, arguments.units * nbytes, arguments.pairs) for case, ways in CASES.items()}
        for side in sides.values():
            side.close()
    for case, found in cases.items():
        low, high = found["ratio"]["interval"]
        rates = ", ".join(f"{name} {rate / _MIB:.0f} MiB/s" for name, rate in found["rates"].items())
        print(f"{case:5} {rates}; {found['ratio']['median']:.3f} ({low:.3f} to {high:.3f})", flush=True)
    result = {
        "what": "transfers between host and disk against raw sequential direct I/O",
        "unit_bytes": nbytes,
        "units": arguments.units,
        "depth": arguments.depth,
        "pairs": arguments.pairs,
        "cases": cases,
        "command": " ".join(["python", "benchmarks/disk.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        (Path(__file__).parent / "results" / "disk.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
