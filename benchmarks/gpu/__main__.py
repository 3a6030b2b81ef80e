"""Benchmarks on a GPU, a part at a time: `python -m benchmarks.gpu [PART...] [--out DIR]`. `make bench-gpu` runs all of them.

Needs Python and torch with CUDA, and nothing else: no compiler, no network. Each part has a process and a time limit of its own, and writes one JSON
under `benchmarks/results/gpu/` (or `--out`) with every figure that it finds. `python docs/make_gpu_page.py` makes `docs/benchmarks/gpu.md` of these.
`--scale tiny --device emulated` tries the scripts where there is no GPU: its times mean nothing, and are kept only where `--out` says.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

__all__ = ["PARTS", "Part", "main"]

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of this package, a function in it, and the seconds that it may take."""

    module: str
    seconds: int
    function: str = "run"


PARTS: Final[Mapping[str, Part]] = {
    "link": Part("link", 90),
    "kernels": Part("kernels", 90),
    "placement": Part("placement", 240),
    "step": Part("step", 570),
    "eight": Part("eight", 570),
    "fsdp2": Part("peers", 570, "run_fsdp2"),
    "deepspeed": Part("peers", 570, "run_deepspeed"),
    "largest-in-backward": Part("largest", 580, "run_in_backward"),
    "largest-clipped": Part("largest", 580, "run_clipped"),
}


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--out", type=Path, help="a folder for the results, in place of the repository's own")
    traces = ROOT / "build" / "gpu-traces"
    parser.add_argument(
        "--trace", type=Path, default=traces, help="a folder for traces of profiled steps, beside their figures"
    )
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--layers", type=int, help="another size of the decoder, in blocks of 218M parameters")
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="of the host; by default what is available, less a tenth"
    )
    parser.add_argument("--seconds", type=int, help="another limit for each part")
    parser.add_argument("--here", action="store_true", help="the part in this process, without a limit")
    arguments = parser.parse_args(given)
    unknown = sorted(set(arguments.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if importlib.util.find_spec("torch") is None:
        print(
            f"NOT MEASURED: {sys.executable} has no torch; `make bench-gpu PYTHON=...` takes another", file=sys.stderr
        )
        return 2
    if arguments.device == "cuda":
        import torch  # noqa: PLC0415  takes seconds, which mistakes above need not wait for

        if not torch.cuda.is_available():
            print(f"NOT MEASURED: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
            return 2
    names = arguments.parts or list(PARTS)
    if arguments.here:
        if len(names) != 1:
            parser.error("--here takes one part")
        return run_here(names[0], arguments)
    options = [option for option in given if option not in PARTS]
    statuses = [run_apart(name, options, arguments.seconds or PARTS[name].seconds) for name in names]
    return max(statuses)


def run_here(name: str, arguments: argparse.Namespace) -> int:
    """Runs a part in this process; 1 where it did not come to its end."""
    from benchmarks.gpu.results import Result  # noqa: PLC0415  imports torch

    run: Callable[..., None] = getattr(import_module(f"benchmarks.gpu.{PARTS[name].module}"), PARTS[name].function)
    result = Result(name, arguments)
    result.set()
    run(arguments, result)
    if name in ("link", "kernels"):
        result.end()
    return 0 if result.found["complete"] else 1


def run_apart(name: str, options: list[str], seconds: int) -> int:
    """Runs a part in a process of its own, which is ended with all that it started when its time is over."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--here", *options]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    why = ""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status, why = 1, f", ended after its limit of {seconds} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "complete" if status == 0 else "not complete"
    print(f"{name}: {said} after {time.monotonic() - began:.0f} s{why}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
