"""A job of which each process says how far it has grown in each step, with what came before it: `python -m tests.elastic.grown HOST_MEMORY DISK`.

That is from what it holds without a weight, as `host_memory` is counted.
"""

from __future__ import annotations

import gc
import sys

import torch

import patrickstar
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes
from tests.memory.resident import build

CONFIG = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 64}
"""GPT-2 with 23 million parameters, 370 MB of model states."""

STEPS = 12


def main(host_memory: str, disk: str) -> None:
    model, tokens = build(CONFIG, (24, 64), checkpointing=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manage = patrickstar.manage  # all that it imports is there now
    gc.collect()
    base = resident_bytes() - sum(parameter.nbytes for parameter in model.parameters())
    with manage(model, optimizer, host_memory=host_memory, disk=disk or None) as session:
        assert reset_peak()
        for step in session.steps(list(tokens), batch_size=6, parts=3, total=STEPS):
            with step:
                for rows in step:
                    model(input_ids=rows, labels=rows).loss.backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
            print(f"grown {step.step} {session.world_size} {peak_resident_bytes() - base}", flush=True)
            assert reset_peak()


if __name__ == "__main__":
    main(*sys.argv[1:])
