"""Starting over under tcmalloc, once, where a budget of host memory binds and the library is installed.

What an allocator keeps of freed activations counts against the budget, and returning them costs time: tcmalloc's less
than glibc's. An allocator can only be chosen before a process starts, so the process replaces itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import click

# Set in the process that follows: it must never start over again. Anybody may set it to stay with their allocator.
GUARD: Final = "PATRICKSTAR_ALLOCATOR"


def under_tcmalloc(*, device: str | None, host_memory: int | str | None) -> None:
    """Replaces this process by the same one under tcmalloc, or returns where there is no point or no library."""
    # Known without importing torch.
    host_computes = device == "cpu" or (device is None and not Path("/proc/driver/nvidia/version").exists())
    if GUARD in os.environ or host_memory is None or not host_computes:
        return
    from patrickstar.memory.allocator import tcmalloc_library

    library = tcmalloc_library()
    # Whoever preloads something has chosen; two allocators in one process end badly.
    if library is None or os.environ.get("LD_PRELOAD"):
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        click.echo(
            f"starting over under tcmalloc, which returns freed memory for less time ({GUARD}=glibc stays)", err=True
        )
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, "LD_PRELOAD": str(library), GUARD: "tcmalloc"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - the same program again
