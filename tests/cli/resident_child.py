"""`patrickstar train` in a process of its own: by how much the process grows from the start of the command on.

A first run of a tiny model brings all that is imported.
"""

from __future__ import annotations

import json
import sys

from patrickstar.cli import loop
from patrickstar.cli.main import main
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes


def run(tiny: list[str], command: list[str]) -> dict[str, int]:
    """The exit status of the command, and growth in bytes until `manage` is called and after."""
    peaks: list[int] = []

    def reset() -> bool:
        peaks.append(peak_resident_bytes())
        return reset_peak()

    assert main(tiny) == 0
    release_free_memory()
    reset_peak()
    before = resident_bytes()
    loop.reset_peak = reset
    status = main(command)
    return {"status": status, "building": peaks[0] - before, "training": peak_resident_bytes() - before}


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))))
