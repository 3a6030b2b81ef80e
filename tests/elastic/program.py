"""A program that trains in steps of parts, as a user would write it: `python -m tests.elastic.program TOTAL SECONDS`. Prints what came of it."""

from __future__ import annotations

import hashlib
import sys
import time

import torch

import patrickstar
from tests.elastic.jobs import Samples, build


def main(total: int, seconds: float) -> None:
    model = build()
    session = patrickstar.manage(model, torch.optim.AdamW(model.parameters(), lr=1e-2), host_memory="1GiB")
    for parts in session.steps(Samples(29), batch_size=12, parts=6, total=total, seed=3):
        with parts:
            for _, batch in parts:
                time.sleep(seconds / 6)
                model(batch).square().mean().backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
    was_there = session.is_member
    session.close()
    if was_there:
        values = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        print(f"digest {hashlib.sha256(values).hexdigest()}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
