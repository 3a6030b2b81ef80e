"""The machine, the versions and the commit that a result belongs to."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from pathlib import Path, PurePosixPath

import torch

__all__ = ["describe_machine", "usable_cores"]


def describe_machine() -> dict[str, object]:
    """What a reader needs to place a figure."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "avx512_bf16": "avx512_bf16" in flags,
        "memory_kib": int(total.split()[1]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "commit": commit,
    }


def usable_cores(*, root: str = "") -> int:
    """Cores that this process can keep busy: those it may run on, or fewer where control groups (version 2) give it less time than that.

    Counts a part of a core as a whole one.
    """
    found = len(os.sched_getaffinity(0))
    for limit in _limits(Path(f"{root}/proc/self/cgroup"), Path(f"{root}/sys/fs/cgroup")):
        quota, period = limit.read_text().split()
        if quota != "max":
            found = min(found, math.ceil(int(quota) / int(period)))
    return found


def _limits(own: Path, mount: Path) -> list[Path]:
    """The files that bound the time of this process: its own group's, and those of the groups above it."""
    if not own.is_file():
        return []
    groups = [PurePosixPath(line[3:]) for line in own.read_text().splitlines() if line.startswith("0::/")]
    names = [part.relative_to("/") for group in groups for part in (group, *group.parents)]
    return [file for name in names if (file := mount / name / "cpu.max").is_file()]
