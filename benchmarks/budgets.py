"""What fits where, and at what speed: one model at several budgets, in plain PyTorch and under FSDP2 on one rank, interleaved in one run.

    python benchmarks/budgets.py [--rounds N] [--layers N] [--tokens N] [--disk DIR] [--write]

GPT-2 (124M), fp32, one sequence of `--tokens`, `device="cpu"` with a disk tier. Each budget has a process of its own, which waits while
another takes its step. All must end every round with the same loss. Prints seconds a step, the ratio to plain PyTorch and to the bound with their
spread over rounds, the largest resident size a process has had since its model was built, and bytes moved. FSDP2 shards each block and the rest, and
offloads nothing: this is a rank that has all the memory it wants.

A step has two halves: the forward, with the update of the step before, and the backward. What is read is tied to the half that uses it; what is
written may be so in either. The bound is the sum over the halves of the longer of computing, as plain PyTorch does in the same round, and of what
is read; or the time of all that is written, or of all that is moved, if one of these is longer. The disk's speeds are measured alone in the same run,
before the first step and after the last.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from machine import describe_machine
from overhead_sides import interval
from speeds import disk_bandwidth
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel
from worker import Worker

import patrickstar
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import peak_resident_bytes, reset_peak, resident_bytes

MIB = 1 << 20
SIDES: Final[dict[str, float | None]] = {
    "plain": None,
    "fsdp2": None,
    "no budget": math.inf,
    "1.25": 1.25,
    "0.75": 0.75,
    "0.5": 0.5,
    "minimum": 0.0,
}
"""Budgets as shares of the model data; 0 is the smallest that fits."""


def build(layers: int, tokens: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_positions=tokens, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    return GPT2LMHeadModel(config).train()


def manage(
    model: torch.nn.Module, optimizer: Any, nbytes: int | None, arguments: argparse.Namespace
) -> patrickstar.Session:
    """In fp32 on every processor: what is asked is what bounds cost, of the same arithmetic."""
    return patrickstar.manage(model, optimizer, device="cpu", precision="fp32", host_memory=nbytes, disk=arguments.disk)


def smallest_budget(arguments: argparse.Namespace) -> int:
    """What refusals name, until there is none."""
    nbytes, batch = 64 * MIB, torch.zeros(1, arguments.tokens, dtype=torch.long)
    while True:
        model = build(arguments.layers, arguments.tokens)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        try:
            session = manage(model, optimizer, nbytes, arguments)
        except patrickstar.BudgetError as refusal:
            nbytes = max(refusal.smallest_bytes or 0, nbytes + 1)
            continue
        try:
            model(input_ids=batch, labels=batch)
        except patrickstar.BudgetError as refusal:
            nbytes = max(refusal.smallest_bytes or 0, nbytes + 1)
        else:
            return nbytes
        finally:
            session.close(keep_weights=False)


def shard(model: GPT2LMHeadModel, disk: str) -> None:
    """FSDP2 over one rank, which meets itself without a port."""
    with tempfile.TemporaryDirectory(dir=disk) as meeting:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}/one", rank=0, world_size=1)
    for part in [*model.transformer.h, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))


def work(pipe: Connection, arguments: argparse.Namespace, name: str) -> None:
    """One process: steps when it is asked to."""
    share = SIDES[name]
    least = smallest_budget(arguments) if share == 0 else None
    gc.collect()
    release_free_memory()
    model = build(arguments.layers, arguments.tokens)
    model_data = 16 * sum(parameter.numel() for parameter in model.parameters())
    session, budget = None, None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    reset_peak()
    before = resident_bytes() - weights
    if name == "fsdp2":
        shard(model, arguments.disk)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=share is None)
    if share is not None:
        budget = least or (int(share * model_data) if share < math.inf else None)
        session = manage(model, optimizer, budget, arguments)
        optimizer = session.optimizer
    pipe.send({"budget": budget, "model_data": model_data})
    while (seed := pipe.recv()) is not None:
        batch = torch.randint(
            0, model.config.vocab_size, (1, arguments.tokens), generator=torch.Generator().manual_seed(seed)
        )
        marks: list[float] = []
        moved: list[dict[str, int]] = []

        def mark() -> None:
            marks.append(time.perf_counter())  # noqa: B023
            moved.append(dict(session.stats().moved) if session is not None else {})  # noqa: B023

        mark()
        loss = model(input_ids=batch, labels=batch).loss
        mark()
        loss.backward()
        mark()
        optimizer.step()
        optimizer.zero_grad()
        mark()
        pipe.send(
            {
                "seconds": marks[-1] - marks[0],
                "parts": [after - before for before, after in pairwise(marks)],
                "loss": loss.item().hex(),
                "moved": [
                    {link: after.get(link, 0) - before.get(link, 0) for link in ("H>K", "K>H")}
                    for before, after in pairwise(moved)
                ],
                "growth": peak_resident_bytes() - before,
                "binding": None if session is None else session.stats().binding,
            }
        )
    if session is not None:
        session.close(keep_weights=False)


def bound(computing: list[float], nbytes: list[dict[str, int]], disk: dict[str, float]) -> float:
    """Seconds of a step.

    Args:
        computing: seconds of the forward, the backward and the update, where nothing moves. nbytes: moved in each of them, with the update
            in the forward. disk: bytes a second reading, writing, and of both together.
    """
    forward, backward, update = computing
    halves = ((forward + update, nbytes[0]), (backward, nbytes[1]))
    read, written = (sum(sent[link] for sent in nbytes) for link in ("K>H", "H>K"))
    return max(
        sum(max(busy, sent["K>H"] / disk["read"]) for busy, sent in halves),
        written / disk["write"],
        (read + written) / disk["both"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    runs: dict[str, tuple[Worker, dict[str, Any]]] = {}
    for name in SIDES:
        worker = Worker(work, arguments, name)
        runs[name] = worker, worker.hear()
        print(f"{name}: {runs[name][1]}", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    speeds = [disk_bandwidth(arguments.disk)]
    for round_number in range(arguments.rounds + 2):
        order = list(runs) if round_number % 2 else list(reversed(runs))
        for name in order:
            rows[name].append(runs[name][0].ask(round_number))
        losses = {name: row[-1]["loss"] for name, row in rows.items()}
        if len(set(losses.values())) > 1:
            print(f"round {round_number}: losses differ: {losses}", file=sys.stderr)
            return 1
        print(
            f"round {round_number}: " + ", ".join(f"{n} {row[-1]['seconds']:.2f} s" for n, row in rows.items()),
            flush=True,
        )
    for worker, _ in runs.values():
        worker.dismiss()
    for worker, _ in runs.values():
        worker.join()
    speeds.append(disk_bandwidth(arguments.disk))
    bandwidth = {case: max(found[case] for found in speeds) for case in speeds[0]}
    result = {
        "what": "steps of GPT-2 at several budgets and under FSDP2 against plain PyTorch, both with AdamW(fused=True); the first two rounds warm up",
        "parameters": runs["plain"][1]["model_data"] // 16,
        "tokens": arguments.tokens,
        "disk_bytes_per_second": bandwidth,
        "rows": [summary(name, runs[name][1], rows, bandwidth) for name in runs],
        "command": " ".join(["python", "benchmarks/budgets.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    for row in result["rows"]:
        print(row)
    if arguments.write:
        (Path(__file__).parent / "results" / "budgets.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def summary(
    name: str, start: dict[str, Any], rows: dict[str, list[dict[str, Any]]], bandwidth: dict[str, float]
) -> dict[str, Any]:
    """The row of one budget."""
    pairs = list(zip(rows[name], rows["plain"], strict=True))[2:]
    seconds = [ours["seconds"] for ours, _ in pairs]
    bounds = [bound(plain["parts"], ours["moved"], bandwidth) for ours, plain in pairs]
    to_bound = [taken / least for taken, least in zip(seconds, bounds, strict=True)]
    parts = rows[name][-1]["moved"]
    return {
        "name": name,
        "budget_bytes": start["budget"],
        "binding": rows[name][-1]["binding"],
        "model_data_bytes": start["model_data"],
        "growth_bytes": rows[name][-1]["growth"],
        "growth_ratio": rows[name][-1]["growth"] / rows["plain"][-1]["growth"],
        "seconds": seconds,
        "median_seconds": statistics.median(seconds),
        "ratio_of_medians": statistics.median(seconds) / statistics.median(plain["seconds"] for _, plain in pairs),
        "parts": [statistics.median(row["parts"][number] for row in rows[name][2:]) for number in range(3)],
        "ratios": sorted(ours["seconds"] / plain["seconds"] for ours, plain in pairs),
        "moved": {link: sum(part[link] for part in parts) for link in parts[0]},
        "moved_in_parts": parts,
        "bound_seconds": statistics.median(bounds),
        "to_bound": {"median": statistics.median(to_bound), "interval": interval(sorted(to_bound))},
    }


if __name__ == "__main__":
    sys.exit(main())
