"""A program that trains in steps of parts, as a user would write it: `python -m tests.elastic.program TOTAL SECONDS [MAX_BATCH]`.

Prints what came of it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import patrickstar
from tests.elastic.jobs import Samples, build, digest


def main(total: int, seconds: float, max_batch: int | None = None) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = patrickstar.manage(model, optimizer, host_memory="1GiB")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    more: dict[str, Any] = {"batch": "grow", "max_batch": max_batch} if max_batch else {}
    more["extra"] = {"schedule": schedule}
    for parts in session.steps(Samples(29), batch_size=12, parts=6, total=total, seed=3, **more):
        with parts:
            for _, batch in parts:
                time.sleep(seconds / 6)
                model(batch).square().mean().backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
            schedule.step()
    was_there = session.is_member
    session.close()
    if was_there:
        print(f"digest {digest(model.state_dict().values())}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:]))
