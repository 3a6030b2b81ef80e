"""Steps of several ranks over gloo on this machine, beside FSDP2 and by what they send.

    python benchmarks/ranks.py [--ranks 2 4] [--precision fp32] [--rounds N] [--layers N] [--width N] [--tokens N] [--vocabulary N] [--write]

A GPT-2 without dropout, one sequence a rank, everything in memory. For each number of ranks two teams of processes take steps in turn, in an order
that changes each round: ours, and FSDP2's (`fully_shard` of each block and of the model, `AdamW(fused=True)`). The cores are shared evenly. A step is
forward, backward, `step()` and `zero_grad()`, from a barrier to the end of the slowest rank. Prints seconds, the median ratio with its 90 % interval,
the bytes a rank sends a step, and the time that they take alone, as the bare collectives of one step with nothing computed beside them.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine, usable_cores
from overhead_sides import interval
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel
from worker import Worker

import patrickstar

_WARM_UP = 3
_LONGEST_S = 300.0


def work(pipe: Connection, side: str, *place: Any) -> None:
    """One rank: says how long a step took, and what was sent, when it is asked for one. `place`: its number, of how many, their store; arguments."""
    rank, size, store, arguments = place
    torch.set_num_threads(max(1, usable_cores() // size))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    model = build(arguments)
    session, step = (ours if side == "ours" else fsdp2)(model, arguments.precision, size)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        generator = torch.Generator().manual_seed(size * number + rank)
        batch = torch.randint(0, arguments.vocabulary, (1, arguments.tokens), generator=generator)
        before = 0 if session is None else session.stats().moved["ranks"]
        dist.barrier()
        began = time.perf_counter()
        loss = step(batch)
        seconds = time.perf_counter() - began
        sent = 0 if session is None else session.stats().moved["ranks"] - before
        planned = None if session is None else session.stats().planned_steps
        pipe.send({"seconds": seconds, "loss": loss, "sent": sent, "planned": planned})
    if session is not None:
        session.close(keep_weights=False)
    dist.destroy_process_group()


def ours(
    model: GPT2LMHeadModel, precision: str, size: int
) -> tuple[patrickstar.Session, Callable[[torch.Tensor], float]]:
    """A managed model, and its step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    nbytes = 40 * sum(parameter.numel() for parameter in model.parameters()) + (512 << 20)
    session = patrickstar.manage(model, optimizer, precision=precision, host_memory=size * nbytes)

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
        return float(loss.item())

    return session, step


def fsdp2(model: GPT2LMHeadModel, precision: str, size: int) -> tuple[None, Callable[[torch.Tensor], float]]:
    """A sharded model, and its step."""
    mesh = init_device_mesh("cpu", (size,))
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = {"mp_policy": narrow} if precision == "bf16" else {}
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return None, step


def build(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    """A decoder."""
    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # about tokens that this vocabulary lacks
    config = GPT2Config(
        n_layer=arguments.layers,
        n_embd=arguments.width,
        n_head=arguments.width // 64,
        n_positions=arguments.tokens,
        vocab_size=arguments.vocabulary,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def bare(pipe: Connection, rank: int, size: int, store: str, sent: int) -> None:
    """One rank that sends as much as a step does, by gloo's own all-gather and nothing else, when it is asked to."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    piece = torch.zeros(1 << 20)
    pieces = [torch.empty_like(piece) for _ in range(size)]
    pipe.send("ready")
    while pipe.recv() is not None:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(max(1, sent // (piece.nbytes * (size - 1)))):
            works = [
                dist.broadcast(piece if root == rank else pieces[root], root, async_op=True) for root in range(size)
            ]
            for one in works:
                one.wait()
        pipe.send({"seconds": time.perf_counter() - began})
    dist.destroy_process_group()


class Team:
    """The ranks of one side."""

    def __init__(self, size: int, target: Callable[..., None], *arguments: Any, first: tuple[Any, ...] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        self._workers = [Worker(target, *first, rank, size, store, *arguments) for rank in range(size)]
        for worker in self._workers:
            worker.hear(within_s=_LONGEST_S)

    def ask(self, number: int) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        for worker in self._workers:
            worker._pipe.send(number)
        return [worker.hear(within_s=_LONGEST_S) for worker in self._workers]

    def end(self) -> None:
        """Lets them end."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.join()


def measured(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What steps of so many ranks take."""
    sides = {side: Team(size, work, arguments, first=(side,)) for side in ("ours", "fsdp2")}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    last: dict[str, list[dict[str, Any]]] = {}
    for number in range(_WARM_UP + arguments.rounds):
        for side in list(sides) if number % 2 else reversed(list(sides)):
            last[side] = sides[side].ask(number)
            if number >= _WARM_UP:
                seconds[side].append(max(answer["seconds"] for answer in last[side]))
    sent = max(answer["sent"] for answer in last["ours"])
    for team in sides.values():
        team.end()
    alone = Team(size, bare, sent)
    roof = statistics.median(max(answer["seconds"] for answer in alone.ask(number)) for number in range(5))
    alone.end()
    ratios = sorted(one / other for one, other in zip(seconds["ours"], seconds["fsdp2"], strict=True))
    return {
        "ranks": size,
        "precision": arguments.precision,
        "seconds": {side: statistics.median(taken) for side, taken in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_interval": interval(ratios),
        "sent_bytes": sent,
        "bare_seconds": roof,
        "losses": {side: [answer["loss"] for answer in answers] for side, answers in last.items()},
        "planned_steps": last["ours"][0]["planned"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for size in arguments.ranks:
        row = measured(size, arguments)
        rows.append(row)
        low, high = row["ratio_interval"]
        print(
            f"{size} ranks, {row['precision']}: {row['seconds']['ours']:.3f} s, FSDP2 {row['seconds']['fsdp2']:.3f} s; ratio {row['ratio']:.2f} "
            f"({low:.2f} to {high:.2f}); {row['sent_bytes'] / 1e6:.1f} MB sent a rank, {row['bare_seconds']:.3f} s alone",
            flush=True,
        )
    result = {
        "what": "steps of several ranks over gloo beside FSDP2",
        "layers": arguments.layers,
        "width": arguments.width,
        "tokens": arguments.tokens,
        "vocabulary": arguments.vocabulary,
        "rows": rows,
        "command": " ".join(["python", "benchmarks/ranks.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        path = Path(__file__).parent / "results" / f"ranks-{arguments.precision}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
