"""A part's result: a JSON file that is written anew with every figure, so that what ends early has left what it found."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.machine import describe_machine

__all__ = ["RESULTS", "Result", "describe_gpu", "spread"]

RESULTS: Final = Path(__file__).parents[1] / "results" / "gpu"


class Result:
    """What a part has found so far. `set` writes it; figures of a tiny scale are written only where somebody names a folder."""

    def __init__(self, part: str, arguments: Namespace) -> None:
        folder = arguments.out or (RESULTS if arguments.scale == "full" else None)
        self._path = None if folder is None else folder / f"{part}.json"
        self._began = time.monotonic()
        command = " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
        self.found: dict[str, Any] = {
            "part": part,
            "scale": arguments.scale,
            "complete": False,
            "command": command,
            "machine": {**_describe_host(), **describe_gpu(arguments.device)},
        }

    def set(self, **figures: Any) -> None:
        """Adds figures, and writes all of them."""
        self.found |= figures
        self.found["seconds_so_far"] = round(time.monotonic() - self._began, 1)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self.found, indent=2) + "\n")
            draft.replace(self._path)

    def say(self, line: str) -> None:
        """A line for whoever watches, with the time since the part began."""
        print(f"[{self.found['part']} {time.monotonic() - self._began:5.0f} s] {line}", flush=True)

    def end(self) -> None:
        """Says that nothing is missing."""
        self.set(complete=True)


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """The middle one, the smallest and the largest."""
    return {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers), "count": len(numbers)}


def _describe_host() -> dict[str, object]:
    try:
        return describe_machine()
    except FileNotFoundError:  # no git here: the tree has come without its history
        return {"commit": "", "torch": torch.__version__, "threads": torch.get_num_threads()}


def describe_gpu(device: str) -> dict[str, object]:
    """The GPU, its driver and the version of CUDA."""
    if device != "cuda":
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    asked = [
        "nvidia-smi",
        "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
        "--format=csv,noheader",
    ]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    return {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver_and_link": driver,
    }
