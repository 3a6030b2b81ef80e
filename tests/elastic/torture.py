"""Processes of elastic jobs, ranks or not, that are killed at any moment, in steps, saves and resizes: `python -m tests.elastic.torture SEED COUNT`.

Each job goes on to its end with the bits of one process, and computes at most as many steps again as lie between two checkpoints.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.elastic.running import Running, digest_of_one, digests

TOTAL, EVERY, MOST = 60, 4, 3


def main(seed: int, count: int) -> int:
    """The exit status, after so many kills."""
    draw, want, killed, failed = random.Random(seed), digest_of_one(TOTAL), 0, 0
    while killed < count:
        with tempfile.TemporaryDirectory() as folder:
            # The order of sizes is that of the plan, each a few steps after the last.
            plan = ",".join(f"{step}:{draw.randint(1, MOST)}" for step in range(3, TOTAL, draw.randint(3, 8)))
            flags = ("--min", "1", "--max", str(MOST), "--save-every", str(EVERY), "--replace", "--at", plan)
            job, here, reached = Running(Path(folder), TOTAL, *flags, seconds=0.12), 0, 0
            while job.process.poll() is None and here < 6 and killed < count:
                # Three losses in a row without a new checkpoint end a job.
                with suppress(AssertionError):
                    reached = job.wait_for(reached + 1)["step"]
                time.sleep(draw.uniform(0.0, 2.0))
                status = job.status()
                pids = [*(rank["pid"] for rank in status.get("ranks", [])), *status.get("waiting", [])]
                if pids and job.process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(pids), signal.SIGKILL)
                        killed, here = killed + 1, here + 1
            try:
                exit_status, output = job.end(within_s=300)
            except Exception as error:  # whatever it is, the next job is tried
                job.process.kill()
                exit_status, output = -1, f"{error}"
            is_well = exit_status == 0 and digests(output) == {want}
            failed += not is_well
            print(
                f"{killed}/{count}: {here} kills in a job of sizes {plan}: {'as one process' if is_well else f'{exit_status}, {output}'}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
