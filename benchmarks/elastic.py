"""What a change of the number of ranks takes, beside save, stop, start, load; and what a step takes under `elastic run`, beside the same without.

    python benchmarks/elastic.py [--rounds N] [--layers N] [--width N] [--tokens N] [--write]

GPT-2 on 1, 2, 3 and 1 ranks with three parts a step. *In process*: one job whose sizes are planned, with warm processes. *Stopped*: a job that is
told to stop where the other is resized, and started again with the next size. Both are timed by the program itself: from the return of the last
`optimizer.step()` before to the first forward after, on the slowest rank; the log's own figure begins when that update has been done. The loopback
is measured by one TCP connection between two processes, in each round. Steps: two processes of one rank, one of them under `elastic run`, that take
steps in turn, in an order that changes each round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from machine import describe_machine
from overhead_sides import interval
from worker import Worker

_PARTS = 3
_SIZES = (1, 2, 3, 1)
_STEPS_EACH = 3
_SENT = 1 << 30
_WARM_UP = 3


def command(directory: Path, arguments: argparse.Namespace, total: int, *flags: object) -> list[str]:
    """The command of a job, or of the program alone where there are no flags."""
    sizes = {"layers": arguments.layers, "width": arguments.width, "tokens": arguments.tokens, "parts": _PARTS}
    words = [word for name, value in {**sizes, "total": total}.items() for word in (f"--{name}", value)]
    program = [sys.executable, Path(__file__).with_name("elastic_side.py"), *words]
    job = ["-m", "patrickstar", "elastic", "run", "--threads", 1, "--job-dir", directory / "job", *flags, "--"]
    return [str(word) for word in ([sys.executable, *job, *program] if flags else program)]


def start(directory: Path, words: list[str], **more: str) -> subprocess.Popen[bytes]:
    """The job, under way."""
    told = {"TIMES": str(directory / "times"), "OMP_NUM_THREADS": "1", **more}
    with (directory / "output").open("ab") as output:
        return subprocess.Popen(words, env={**os.environ, **told}, stdout=output, stderr=output)


def ended(directory: Path, process: subprocess.Popen[bytes], status: int) -> None:
    """Waits until a job has ended as it is to."""
    if process.wait() != status:
        raise RuntimeError((directory / "output").read_text())


def times(directory: Path) -> list[dict[str, Any]]:
    """What the program has written down."""
    path = directory / "times"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def gaps(directory: Path) -> list[float]:
    """Seconds from the last update before each change of the number of ranks to the first forward after."""
    found = times(directory)
    ranks = {one["forward"]: one["ranks"] for one in found if "forward" in one}
    boundaries = [step for step in ranks if step and ranks[step] != ranks[step - 1]]
    before = [max(one["at"] for one in found if one.get("update") == at - 1) for at in boundaries]
    after = [max(one["at"] for one in found if one.get("forward") == at) for at in boundaries]
    return [late - early for early, late in zip(before, after, strict=True)]


def in_process(arguments: argparse.Namespace) -> dict[str, Any]:
    """A job that is resized."""
    at = ",".join(f"{_STEPS_EACH * n}:{size}" for n, size in enumerate(_SIZES) if n)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        total = _STEPS_EACH * len(_SIZES)
        words = command(
            directory, arguments, total, "--min", 1, "--max", 3, "--size", 1, "--warm", 2, "--save-every", 0, "--at", at
        )
        ended(directory, start(directory, words), 0)
        events = [json.loads(line) for line in (directory / "job" / "log.jsonl").read_text().splitlines()]
        resizes = [event for event in events if event["event"] == "resize"]
        facts = {name: [event[name] for event in resizes] for name in ("seconds", "moved_bytes", "least_bytes")}
        return {**facts, "gaps": gaps(directory)}


def stopped(arguments: argparse.Namespace) -> list[float]:
    """A job that is told to stop and is started again, at each change."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for number, size in enumerate(_SIZES):
            last = _STEPS_EACH * (number + 1) - 1
            total = _STEPS_EACH * len(_SIZES)
            words = command(
                directory, arguments, total, "--min", 1, "--max", 3, "--size", size, "--warm", 0, "--save-every", 10**6
            )
            process = start(directory, words)
            while number < len(_SIZES) - 1 and not any(one.get("forward") == last for one in times(directory)):
                time.sleep(0.02)
            if number < len(_SIZES) - 1:
                process.terminate()
            ended(directory, process, 0 if number == len(_SIZES) - 1 else 143)
        return gaps(directory)


def send(pipe: Connection) -> None:
    """Sends bytes to a port, as often as it is told."""
    while (port := pipe.recv()) is not None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(bytes(_SENT))


def loopback() -> float:
    """Bytes a second that one connection carries."""
    worker = Worker(send)
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker._pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        buffer, left = bytearray(1 << 20), _SENT
        left -= connection.recv_into(buffer)
        began, counted = time.perf_counter(), left
        while left:
            left -= connection.recv_into(buffer)
        seconds = time.perf_counter() - began
        connection.close()
    worker.dismiss()
    worker.join()
    return counted / seconds


class Stepper:
    """A process that takes a step when it is told to."""

    def __init__(self, directory: Path, arguments: argparse.Namespace, *flags: object) -> None:
        directory.mkdir()
        for name in ("go", "done"):
            os.mkfifo(directory / name)
        words = command(directory, arguments, 10**6, *flags)
        self.process = start(directory, words, TURNS=str(directory))
        self._go, self._done = os.open(directory / "go", os.O_WRONLY), os.open(directory / "done", os.O_RDONLY)

    def step(self) -> float:
        """The seconds of a step."""
        os.write(self._go, b".")
        return float(os.read(self._done, 100))


@contextmanager
def steppers(arguments: argparse.Namespace) -> Iterator[dict[str, Stepper]]:
    """Both sides of steps, which are ended after."""
    with tempfile.TemporaryDirectory() as name:
        sides = {
            "under elastic run": Stepper(
                Path(name) / "elastic", arguments, "--min", 1, "--max", 3, "--size", 1, "--warm", 0, "--save-every", 0
            ),
            "alone": Stepper(Path(name) / "alone", arguments),
        }
        try:
            yield sides
        finally:
            for side in sides.values():
                side.process.kill()
                side.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"under elastic run": [], "alone": []}
    with steppers(arguments) as sides:
        for number in range(_WARM_UP + arguments.steps):
            for side in list(sides) if number % 2 else reversed(list(sides)):
                taken = sides[side].step()
                if number >= _WARM_UP:
                    seconds[side].append(taken)
    ratios = sorted(one / other for one, other in zip(*seconds.values(), strict=True))
    low, high = interval(ratios)
    print(
        f"a step under elastic run beside the same alone: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
        flush=True,
    )
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append({"loopback": loopback(), "in_process": in_process(arguments), "stopped": stopped(arguments)})
        print(json.dumps(rounds[-1]), flush=True)
    result = {
        "what": "changes of the number of ranks, beside save, stop, start, load",
        "sizes": _SIZES,
        "step_seconds": {side: statistics.median(taken) for side, taken in seconds.items()},
        "step_ratio": statistics.median(ratios),
        "step_ratio_interval": (low, high),
        "rounds": rounds,
        "command": " ".join(["python", "benchmarks/elastic.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        (Path(__file__).parent / "results" / "elastic.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
