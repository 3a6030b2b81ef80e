"""Attention and layers whose ranks share one batch, over gloo on this machine.

    python benchmarks/sequences.py [--ranks 2 4] [--rounds N] [--tokens N] [--only sequences|blocks] [--write]

(1) Causal attention, forward and backward, one sequence in fp32, in turn and in an order that changes each round: a ring in zigzag, a ring in
    contiguous parts; keys and values of all ranks gathered first, and their gradients scattered, over the zigzag's blocks; the zigzag with nothing
    sent; and with sends that take as long, in all, as a half of computing. Ratios are to the zigzag, or to nothing sent.
(2) A Llama in 2 x 2 blocks beside torch's 1D tensor parallelism on 4 ranks, forward and backward, below and above the 2.4 h tokens of a batch from
    which blocks send less.

From a barrier to the end of the slowest rank; the cores are shared evenly. Prints medians of ratios with their 90 % interval, and the time that a
rank's products take at the speed of a large product on as many cores as it has.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from machine import describe_machine, usable_cores
from overhead_sides import interval
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from patrickstar.parallel import ContextParallel, Tensor2D, traffic
from patrickstar.parallel.kernels import attend, attend_backward
from patrickstar.parallel.ring import merge
from ranks import Team

HEADS, HEAD_SIZE = 8, 64
WAYS = ("zigzag", "contiguous", "gathered", "alone", "paced")
HIDDEN, LAYERS, VOCABULARY = 512, 4, 2048
SIDES = ("2d", "1d")


def begin(rank: int, size: int, store: str) -> None:
    """Joins the others."""
    torch.set_num_threads(max(1, usable_cores() // size))
    store_of_all = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=store_of_all, rank=rank, world_size=size, timeout=timedelta(seconds=120))


def timed(act: Callable[[], Any]) -> float:
    """Seconds from a barrier on."""
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def product_flops() -> float:
    """Operations of a large product in a second, on the threads that this rank has."""
    a, best = torch.randn(1024, 1024), math.inf
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best


# sequences


def attention_of(pipe: Connection, rank: int, size: int, store: str, arguments: argparse.Namespace) -> None:
    """One rank: seconds of one way of attention, each time it is asked for one."""
    begin(rank, size, store)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    cuts = {name: ContextParallel(mesh["cp"], layout=name) for name in ("zigzag", "contiguous")}  # type: ignore[arg-type]
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, arguments.tokens, HEAD_SIZE) for _ in range(4)]

    def parts_of(name: str) -> list[Tensor]:
        own = [cuts[name].shard(each, dim=2) for each in whole]
        return [each.contiguous().requires_grad_(number < 3) for number, each in enumerate(own)]

    parts = {name: parts_of(name) for name in cuts}

    def run(way: str) -> list[Tensor]:
        q, k, v, grad = parts["contiguous" if way == "contiguous" else "zigzag"]
        if way == "gathered":
            out = Gathered.apply(q, k, v, (rank, size))
        else:
            out = cuts["contiguous" if way == "contiguous" else "zigzag"].attention(q, k, v, is_causal=True)
        return list(torch.autograd.grad(out, (q, k, v), grad))

    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        way, pace = asked
        if way == "products":
            pipe.send({"seconds": product_flops()})
            continue
        with hops(way, pace):
            pipe.send({"seconds": timed(lambda way=way: run(way))})
        if way == "gathered" and pace:  # once: both say the same
            for one, other in zip(run("zigzag"), run("gathered"), strict=True):
                assert (one - other).abs().max() < 1e-4, "a ring and what is gathered differ"
    dist.destroy_process_group()


@contextmanager
def hops(way: str, pace: float) -> Iterator[None]:
    """A context in which nothing is sent, or each hop takes some seconds and no core."""
    if way not in ("alone", "paced"):
        yield
        return

    def local(theirs: Tensor, mine: Tensor, *_: Any, **__: Any) -> Done:
        theirs.copy_(mine)
        return Done(time.perf_counter() + (pace if way == "paced" else 0.0))

    with patch.object(dist, "all_to_all_single", local):
        yield


class Done:
    """A hop that has ended at some time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def wait(self, *_: Any) -> bool:
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return True

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.at


class Gathered(torch.autograd.Function):
    """Attention of two parts of the queries, as a zigzag has them, to keys and values of all ranks, which each has whole."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, place: tuple[int, int]) -> Tensor:
        rank, size = place
        keys, values = (in_order(gathered(each, size), size) for each in (k, v))
        scale, half = q.shape[-1] ** -0.5, q.shape[2] // 2
        outs, lses = [], []
        for part, number in ((q[:, :, :half], rank), (q[:, :, half:], 2 * size - 1 - rank)):
            seen = slice(number * half, (number + 1) * half)
            out, lse = attend(part, keys[:, :, seen], values[:, :, seen], mask=None, is_causal=True, scale=scale)
            if number:
                merge(
                    out,
                    lse,
                    *attend(
                        part,
                        keys[:, :, : seen.start],
                        values[:, :, : seen.start],
                        mask=None,
                        is_causal=False,
                        scale=scale,
                    ),
                )
            outs.append(out)
            lses.append(lse)
        ctx.save_for_backward(q, keys, values, *outs, *lses)
        ctx.place = place
        return torch.cat(outs, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, keys, values, *rest = ctx.saved_tensors
        (rank, size), scale, half = ctx.place, q.shape[-1] ** -0.5, q.shape[2] // 2
        dk, dv, dqs = torch.zeros_like(keys), torch.zeros_like(values), []
        for at, number in ((0, rank), (1, 2 * size - 1 - rank)):
            mine, total = slice(at * half, (at + 1) * half), 0
            pieces = [(slice(number * half, (number + 1) * half), True), (slice(number * half), False)]
            for seen, is_causal in pieces[: 1 + bool(number)]:
                one = attend_backward(
                    grad[:, :, mine].contiguous(),
                    *(q[:, :, mine], keys[:, :, seen], values[:, :, seen], rest[at], rest[2 + at]),
                    mask=None,
                    is_causal=is_causal,
                    scale=scale,
                )
                total = total + one[0]
                dk[:, :, seen] += one[1]
                dv[:, :, seen] += one[2]
            dqs.append(total)
        of_ranks = [scattered(by_rank(each, size)) for each in (dk, dv)]
        return torch.cat(dqs, 2), *of_ranks, None


def gathered(tensor: Tensor, size: int) -> Tensor:
    """The tensors of all ranks, [N, ...]."""
    out = tensor.new_empty(size * tensor.numel())
    dist.all_gather_into_tensor(out, tensor.detach().contiguous().view(-1))
    return out.view(size, *tensor.shape)


def scattered(tensor: Tensor) -> Tensor:
    """The sum over ranks of this one's piece of [N, ...]."""
    out = torch.empty_like(tensor[0])
    dist.reduce_scatter_tensor(out.view(-1), tensor.contiguous().view(-1))
    return out


def in_order(pieces: Tensor, size: int) -> Tensor:
    """Parts of a zigzag, [N, B, Z, c, A], as one sequence."""
    halves = pieces.unflatten(3, (2, -1))
    return torch.cat(
        [*(halves[r, :, :, 0] for r in range(size)), *(halves[r, :, :, 1] for r in reversed(range(size)))], 2
    )


def by_rank(whole: Tensor, size: int) -> Tensor:
    """The parts of a zigzag, [N, B, Z, c, A], of one sequence."""
    parts = whole.chunk(2 * size, 2)
    return torch.stack([torch.cat([parts[r], parts[2 * size - 1 - r]], 2) for r in range(size)])


def sequences(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios of the ways on so many ranks."""
    team = Team(size, attention_of, arguments)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}

    def ask(way: str, pace: float = 0.0) -> float:
        return max(answer["seconds"] for answer in team.ask((way, pace)))

    speed = ask("products")
    ask("gathered", 1.0)
    alone = min(ask("alone") for _ in range(3))
    pace = 0.5 * alone / (3 * (size - 1))  # N-1 hops forward, N-1 and N-1 backward
    for number in range(arguments.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            seconds[way].append(ask(way, pace if way == "paced" else 0.0))
    team.end()
    flops = (
        14 * HEADS * HEAD_SIZE * arguments.tokens**2 / 2 / size
    )  # two products forward, five backward, of half of all pairs
    row: dict[str, Any] = {
        "ranks": size,
        "tokens": arguments.tokens,
        "seconds": {way: statistics.median(taken) for way, taken in seconds.items()},
        "roof_seconds": flops / speed,
    }
    for name, way, beside in (
        ("zigzag", "zigzag", "contiguous"),
        ("gathered", "zigzag", "gathered"),
        ("paced", "paced", "alone"),
    ):
        ratios = sorted(one / other for one, other in zip(seconds[way], seconds[beside], strict=True))
        row[name] = {"of": f"{way} / {beside}", "ratio": statistics.median(ratios), "interval": interval(ratios)}
        print(
            f"{size} ranks, {way} / {beside}: {row[name]['ratio']:.2f} ({' to '.join(f'{r:.2f}' for r in row[name]['interval'])})",
            flush=True,
        )
    print(
        f"{size} ranks: {row['seconds']['zigzag']:.2f} s in zigzag, {row['roof_seconds']:.2f} s for its products",
        flush=True,
    )
    return row


# blocks


def llama() -> LlamaForCausalLM:
    """A decoder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def in_1d(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """A model under torch's tensor parallelism: what comes into a layer and leaves it is whole on each rank."""
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return model


def layers_of(pipe: Connection, rank: int, size: int, store: str) -> None:
    """One rank: seconds and bytes of a forward and backward, of blocks or of 1D tensor parallelism, each time it is asked for one."""
    begin(rank, size, store)
    q = math.isqrt(size)
    square, line = (
        init_device_mesh("cpu", shape, mesh_dim_names=names)
        for shape, names in (((q, q), ("row", "col")), ((size,), ("tp",)))
    )
    blocks = Tensor2D(square["row", "col"])
    models: dict[str, nn.Module] = {"2d": blocks.parallelize(llama()), "1d": in_1d(llama(), line["tp"])}
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        side, rows, tokens = asked
        ids = torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))
        batch, losses = {"input_ids": ids, "labels": ids}, []

        def step(side: str = side, batch: dict[str, Tensor] = batch, losses: list[float] = losses) -> None:
            loss = models[side](**(blocks.shard(batch) if side == "2d" else batch)).loss
            loss.backward()
            losses.append(loss.item())

        with traffic(square if side == "2d" else line) as seen:
            seconds = timed(step)
        models[side].zero_grad()
        pipe.send({"seconds": seconds, "sent": sum(seen.sent.values()), "loss": losses[0]})
    dist.destroy_process_group()


def blocks_beside_1d(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of 4 ranks, for batches of few and of many tokens."""
    team, found = Team(4, layers_of), []
    for rows, tokens in ((4, 128), (8, 512)):
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        last: dict[str, Any] = {}
        for number in range(1 + arguments.rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                answers = team.ask((side, rows, tokens))
                last[side] = answers[0]
                if number:
                    seconds[side].append(max(answer["seconds"] for answer in answers))
        ratios = sorted(one / other for one, other in zip(seconds["2d"], seconds["1d"], strict=True))
        assert abs(last["2d"]["loss"] - last["1d"]["loss"]) < 1e-3, last
        found.append(
            {
                "tokens": rows * tokens,
                "tokens_over_hidden": rows * tokens / HIDDEN,
                "seconds": {side: statistics.median(taken) for side, taken in seconds.items()},
                "sent": {side: answer["sent"] for side, answer in last.items()},
                "ratio": statistics.median(ratios),
                "interval": interval(ratios),
            }
        )
        row = found[-1]
        low, high = row["interval"]
        sent = " and ".join(f"{row['sent'][side] / 1e6:.1f}" for side in SIDES)
        print(
            f"{rows * tokens} tokens ({row['tokens_over_hidden']:.1f} h): 2D / 1D {row['ratio']:.2f} ({low:.2f} to {high:.2f}); {sent} MB a rank",
            flush=True,
        )
    team.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", choices=("sequences", "blocks"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    result = {
        "what": "attention over ranks of gloo, and blocks beside 1D tensor parallelism",
        "sequences": [sequences(size, arguments) for size in arguments.ranks] if arguments.only != "blocks" else [],
        "blocks": blocks_beside_1d(arguments) if arguments.only != "sequences" else [],
        "command": " ".join(["python", "benchmarks/sequences.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        path = Path(__file__).parent / "results" / "sequences.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
