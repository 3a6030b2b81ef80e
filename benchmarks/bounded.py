"""What a bound on the process costs where nothing has to move: a step under `host_memory` against the same step in plain PyTorch.

    python benchmarks/bounded.py [--pairs N] [--bounds 1.6 1.1 tightest] [--layers N] [--tokens N] [--write]

GPT-2 (124M unless flags say otherwise) in fp32, dropout off, one sequence of `--tokens`, `AdamW(fused=True)`. Each side has a process of
its own, since what a session asks of the allocator holds for its whole process, and they take a step in turn, in alternating order: a pair.
Bounds are multiples of the planned peak, or `tightest`: the smallest `host_memory` with which a forecast moves nothing. Every loss must have
the same bits on both sides.

Prints the median of the pairs' ratios with its interval of 90 %; `--write` keeps the result beside this file. Times want idle cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from machine import describe_machine
from overhead import build
from overhead_sides import LR, WARM_UP, interval, managed_step, plain_step
from worker import Worker

import patrickstar
from patrickstar.memory.allocator import allocator
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes
from patrickstar.session.forecast import Forecast, forecast
from patrickstar.units import MIB

WANTED: Final = 1.10
RESULT: Final = Path(__file__).parent / "results" / "bounded.json"
TIGHTEST: Final = "tightest"
ROOMY: Final = 1 << 40


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory() as disk:
        foreseen = foresee(arguments, Path(disk))
        peak = foreseen(ROOMY).peak["host"]
        rows = []
        for bound in arguments.bounds:
            nbytes = tightest(foreseen, peak) if bound == TIGHTEST else int(float(bound) * peak)
            row, different = compare(arguments, bound, nbytes, Path(disk))
            if different:
                print(different, file=sys.stderr)
                return 1
            row["of_planned_peak"] = nbytes / peak
            rows.append(row)
            show(row)
    result = {
        "what": "a step under host_memory and a disk over the same step in plain PyTorch with AdamW(fused=True), fp32, nothing moves",
        "wanted": {"1.6": WANTED},
        "planned_peak_bytes": peak,
        "bounds": rows,
        "command": " ".join(["python", "benchmarks/bounded.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    out = arguments.out or (RESULT if arguments.write else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument(
        "--bounds", nargs="+", default=["1.6", "1.1", TIGHTEST], help="multiples of the planned peak, or tightest"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--write", action="store_true", help="keep the result beside this file")
    parser.add_argument("--out", type=Path, help="keep it in a file of yours")
    arguments = parser.parse_args()
    arguments.precision = "fp32"
    return arguments


def foresee(arguments: argparse.Namespace, disk: Path) -> Callable[[int], Forecast]:
    """The forecast of a step under a bound."""
    with torch.device("meta"):
        model = build(arguments)
    tokens = torch.zeros(1, arguments.tokens, dtype=torch.int64)

    def under(host_memory: int) -> Forecast:
        batch = {"input_ids": tokens, "labels": tokens}
        return forecast(model, batch, device="cpu", precision="fp32", host_memory=host_memory, disk=disk)

    return under


def tightest(foreseen: Callable[[int], Forecast], peak: int) -> int:
    """The smallest bound, to a MiB, with which nothing moves: less than where parameters are whole, whose gradients have no slots."""
    low, high = max(1, peak // (2 * MIB)), 2 * peak // MIB + 256
    while low < high:
        middle = (low + high) // 2
        known = foreseen(middle * MIB)
        if known.fits and not any(known.moved.values()):
            high = middle
        else:
            low = middle + 1
    return high * MIB


def compare(arguments: argparse.Namespace, bound: str, nbytes: int, disk: Path) -> tuple[dict[str, Any], str]:
    """The row of a bound; and which losses differ, which none must."""
    sides = {"plain": Worker(work, arguments, None, disk), "managed": Worker(work, arguments, nbytes, disk)}
    for side in sides.values():
        side.hear()
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(arguments.pairs + WARM_UP):
        answers = {name: sides[name].ask(number) for name in (sides if number % 2 else reversed(sides))}
        if answers["plain"]["loss"] != answers["managed"]["loss"]:
            return {}, f"bound {bound}, pair {number}: losses differ: {answers}"
        if number >= WARM_UP:
            for name, answer in answers.items():
                taken[name].append(answer)
    for side in sides.values():
        side.dismiss()
        side.join()
    seconds = {name: [answer["seconds"] for answer in answers] for name, answers in taken.items()}
    ratios = sorted(one / other for one, other in zip(seconds["managed"], seconds["plain"], strict=True))
    low, high = interval(ratios)
    last = taken["managed"][-1]
    return {
        "bound": bound,
        "host_memory_bytes": nbytes,
        "grown_bytes": max(answer["grown"] for answer in taken["managed"]),
        "median_ratio": statistics.median(ratios),
        "interval_90": [low, high],
        "seconds": seconds,
        "ratios": ratios,
        "faults": {name: statistics.median(answer["faults"] for answer in answers) for name, answers in taken.items()},
        "moved_bytes": last["moved"],
        "reactive_steps": last["reactive"],
        "allocator": last["allocator"],
    }, ""


def work(pipe: Connection, arguments: argparse.Namespace, host_memory: int | None, disk: Path) -> None:
    """A side, in a process of its own: a step for each number of a batch that it is sent."""
    model = build(arguments)
    session, base = None, 0
    if host_memory is None:
        step = plain_step(model, "fp32")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        base = resident_bytes() - sum(parameter.nbytes for parameter in model.parameters())
        session = patrickstar.manage(
            model, optimizer, device="cpu", precision="fp32", host_memory=host_memory, disk=disk / "managed"
        )
        step = managed_step(model, session)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(0, arguments.vocabulary, (1, arguments.tokens), generator=generator)
        reset_peak()
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        loss = step(batch)
        seconds = time.perf_counter() - began
        stats = None if session is None else session.stats()
        pipe.send(
            {
                "seconds": seconds,
                "loss": loss.item(),
                "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
                "grown": peak_resident_bytes() - base,
                "moved": {} if stats is None else {over: nbytes for over, nbytes in stats.moved.items() if nbytes},
                "reactive": 0 if stats is None else stats.reactive_steps,
                "allocator": allocator().name,
            }
        )
    if session is not None:
        session.close(keep_weights=False)


def show(row: dict[str, Any]) -> None:
    """A line for a person."""
    low, high = row["interval_90"]
    print(
        f"host_memory {row['host_memory_bytes'] / MIB:.0f} MiB ({row['bound']}, {row['of_planned_peak']:.2f} x the planned peak), "
        f"grown by {row['grown_bytes'] / MIB:.0f}: {row['median_ratio']:.3f} x plain (90 %: {low:.3f} to {high:.3f}), "
        f"page faults {row['faults']['managed']:.0f} against {row['faults']['plain']:.0f}; moved {row['moved_bytes'] or 'nothing'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
