"""Whether a bit depends on where model data lies: losses and weights of one decoder at several budgets and ways, which must be equal."""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu.decoder import Decoder, Shape
from benchmarks.gpu.results import Result
from benchmarks.gpu.step import TINY

import patrickstar

__all__ = ["run"]

STEPS = 4


def run(arguments: Namespace, result: Result) -> None:
    """Losses of four steps and a digest of the weights, by budget; without clipping, deferred and in backward are one."""
    full = arguments.scale == "full"
    shape = Shape(layers=6, width=2048, heads=16, kv_heads=8, inner=5632, vocab=32768) if full else TINY
    sequences, tokens = (4, 1024) if full else (2, 16)
    found: dict[str, Any] = {}
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # read at the first product; without it sums may differ from run to run
    torch.use_deterministic_algorithms(True)
    for step in ("in_backward", "deferred"):
        smallest: int | None = None
        for share in (None, 0.0, 1.15, 1.6, 2.5):
            budget: int | str = "64GiB" if share is None and full else "1GiB" if share is None else 1024
            if share:
                assert smallest is not None
                budget = int(share * smallest)
            for _ in range(4):
                try:
                    row = train(shape, step, budget, arguments, sequences=sequences, tokens=tokens)
                except patrickstar.BudgetError as refusal:
                    smallest = refusal.smallest_bytes or 0
                    if not smallest:
                        raise
                    budget = smallest
                    continue
                smallest = int(budget) if share == 0.0 else smallest
                found[f"{step}, device_memory {budget}"] = row
                result.set(numel=shape.numel(), runs=found)
                result.say(
                    f"{step}, {budget}: {row['digest'][:16]}, moved up {row['moved'].get('H>D', 0) / 1e9:.2f} GB"
                )
                break
    digests = {row["digest"] for row in found.values()}
    result.set(equal=len(digests) == 1, different_digests=len(digests))
    result.say(f"{len(found)} runs, {len(digests)} digests")
    result.end()


def train(
    shape: Shape, step: str, device_memory: int | str, arguments: Namespace, *, sequences: int, tokens: int
) -> dict[str, Any]:
    """A digest of losses and weights, and what moved."""
    place = torch.device("cuda" if arguments.device == "cuda" else "cpu")
    torch.manual_seed(0)
    with patrickstar.deferred_init():
        model = Decoder(replace(shape))
    digest, losses = hashlib.sha256(), list[str]()
    with patrickstar.manage(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        device=arguments.device,
        precision="bf16",
        step=step,
        device_memory=device_memory,
    ) as session:
        for number in range(STEPS):
            batch = torch.randint(shape.vocab, (sequences, tokens), generator=torch.Generator().manual_seed(number)).to(
                place
            )
            loss = model(batch, batch.roll(-1, 1))
            loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
            del loss
        for name, tensor in session.state_dict().items():
            digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        moved = dict(session.stats().moved)
        session.close(keep_weights=False)
    digest.update(repr(losses).encode())
    return {"digest": digest.hexdigest(), "losses": losses, "moved": moved}
