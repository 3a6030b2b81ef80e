"""A program that trains GPT-2 in steps of parts, for `benchmarks/elastic.py`: alone, or as a rank of `patrickstar elastic run`.

Adds a line of JSON to `TIMES` when a step's first forward is about to begin, and when `optimizer.step()` has returned. Where `TURNS` names a
directory, each step waits for its turn: a byte of the pipe `go` there, answered in `done` with the step's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar


class Rows(Dataset[torch.Tensor]):
    """Rows of tokens, by number."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 50257, (self._tokens,), generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "width", "tokens", "parts", "total"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=given.layers, n_embd=given.width, n_head=given.width // 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder = os.environ.get("TURNS")
    go, done = (os.open(f"{folder}/go", os.O_RDONLY), os.open(f"{folder}/done", os.O_WRONLY)) if folder else (-1, -1)
    with patrickstar.manage(model, optimizer) as session, Path(os.environ["TIMES"]).open("a", buffering=1) as times:
        rows = Rows(given.tokens)
        steps = session.steps(rows, given.parts, given.parts, given.total, collate_fn=torch.stack)
        for step in steps:
            if folder:
                os.read(go, 1)
            began = time.time()
            with step:
                for tokens in step:
                    if step.index == session.rank:
                        times.write(
                            json.dumps({"forward": step.step, "at": time.time(), "ranks": session.world_size}) + "\n"
                        )
                    model(input_ids=tokens, labels=tokens).loss.backward()
                session.optimizer.step()
                session.optimizer.zero_grad()
            ended = time.time()
            times.write(json.dumps({"update": step.step, "at": ended, "ranks": session.world_size}) + "\n")
            if folder:
                os.write(done, f"{ended - began}\n".encode())


if __name__ == "__main__":
    main()
