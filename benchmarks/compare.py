"""Which models train at all under a cap on the whole process: plain PyTorch, FSDP2 and DeepSpeed with offload, and patrickstar.

    python benchmarks/compare.py [--caps GIB ...] [--models NAME ...] [--steps N] [--disk DIR] [--write]

GPT-2 in fp32, one sequence of `--tokens`, activations of blocks recomputed by all, random weights. Each contender takes its steps in a process
of its own (`compare_sides.py`), which builds the model in the way that the contender has for models that do not fit. The size of the process
is sampled every 5 ms: its resident memory without shared files, interpreter and libraries included, as a control group without swap would count it.
A process that passes the cap is killed. Where a model did not train, larger ones are not tried.

What trains does not depend on what else the machine does; seconds do. The disk must not be a tmpfs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from compare_sides import MARK, SIZES
from machine import describe_machine

GIB: Final = 1 << 30
HERE: Final = Path(__file__).parent
CONTENDERS: Final = {
    "plain": "plain PyTorch, `AdamW(fused=True)`",
    "fsdp2": "FSDP2, `CPUOffloadPolicy`",
    "deepspeed-cpu": "DeepSpeed ZeRO-3, all to `cpu`",
    "deepspeed-nvme": "DeepSpeed ZeRO-3, all to `nvme`",
    "patrickstar": "patrickstar, with a disk",
}


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    absent = {name: why for name in arguments.only if (why := cannot_run(name, arguments))}
    cells: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "what": "GPT-2 in fp32, activations recomputed, under a cap on the resident memory of the process without shared files",
        "tokens": arguments.tokens,
        "contenders": {name: CONTENDERS[name] for name in arguments.only},
        "cells": cells,
        "command": " ".join(["python", "benchmarks/compare.py", *(sys.argv[1:] if words is None else words)]),
        "machine": describe_machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed") if installed(name)},
    }
    loads: list[float] = []
    out = arguments.out or (HERE / "results" / "compare.json" if arguments.write else None)
    for cap in arguments.caps:
        for name in arguments.only:
            why = absent.get(name, "")
            for model in arguments.models:
                cell = {"contender": name, "model": model, "cap_bytes": int(cap * GIB)}
                loads.append(os.getloadavg()[0])
                result["load"] = [min(loads), max(loads)]
                cell |= {"trained": False, "why": why} if why else measured(name, model, cell["cap_bytes"], arguments)
                why = why or ("" if cell["trained"] else f"{model} did not train")
                cells.append(cell)
                print(line(cell), flush=True)
                if out is not None:  # after each: one takes minutes
                    out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", nargs="+", type=float, default=[1.5, 4.0], help="GiB")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["124M", "355M", "774M"], help="small to large")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--within", type=float, default=1200, help="seconds for one process")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--write", action="store_true", help="keep the result beside this file")
    parser.add_argument("--out", type=Path, help="keep it in a file of yours")
    return parser.parse_args(words)


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def cannot_run(name: str, arguments: argparse.Namespace) -> str:
    """Why a contender cannot run here at all. DeepSpeed compiles its operators meanwhile, which takes minutes: no cap holds for that."""
    if not name.startswith("deepspeed"):
        return ""
    if not installed("deepspeed"):
        return "deepspeed is not installed"
    tried = measured(name, "tiny", 1 << 60, argparse.Namespace(**vars(arguments) | {"within": 3600}))
    time.sleep(60)  # until the load average has forgotten the compilers, which are not others' programs
    return "" if tried["trained"] else tried["why"]


def measured(name: str, model: str, cap: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One process from its start to its end, or to the cap."""
    with tempfile.TemporaryDirectory(dir=arguments.disk) as disk, tempfile.TemporaryFile("w+") as said:
        job = {"contender": name, "model": model, "cap_bytes": cap, "disk": disk}
        job |= {"tokens": arguments.tokens, "steps": arguments.steps}
        command = [sys.executable, "-W", "ignore", str(HERE / "compare_sides.py"), json.dumps(job)]
        began, peak, why = time.monotonic(), 0, ""
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None and not why:
                peak = max(peak, resident_without_files(process.pid))
                if peak > cap:
                    why = "passed the cap"
                elif time.monotonic() - began > arguments.within:
                    why = f"not done within {arguments.within:.0f} s"
                time.sleep(0.005)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    found = [json.loads(one.removeprefix(MARK)) for one in lines if one.startswith(MARK)]
    if found and not why:
        return {"trained": True, "peak_bytes": peak, **found[-1]}
    errors = [one for one in lines if "Error" in one.partition(":")[0]]
    return {"trained": False, "peak_bytes": peak, "why": why or (errors or lines or ["said nothing"])[-1].strip()}


def resident_without_files(pid: int) -> int:
    """Anonymous and shared resident memory of a process; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(one.split()[1]) for one in lines if one.startswith(("RssAnon:", "RssShmem:")))


def line(cell: dict[str, Any]) -> str:
    """A line for a person."""
    what = f"{cell['contender']}, {cell['model']}, {cell['cap_bytes'] / GIB:g} GiB: "
    if not cell["trained"]:
        return what + f"no: {cell['why'][:200]}"
    seconds = cell["seconds"]
    spread = f"{statistics.median(seconds):.2f} s/step ({min(seconds):.2f} to {max(seconds):.2f})"
    return what + f"{spread}, peak RSS {cell['peak_bytes'] / GIB:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
