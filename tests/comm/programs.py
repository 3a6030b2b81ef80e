"""What ranks do in tests of communication. A module by itself: each of their processes imports it, and nothing of pytest."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from patrickstar.comm import collectives as module
from patrickstar.comm import transport, watch
from patrickstar.comm.collectives import Collectives
from patrickstar.comm.ranks import Ranks
from tests.ranks import kill_me, stop_me


def all_there(*, timeout_s: float = 600.0) -> Collectives:
    """Collectives of ranks that have all come; from there on they wait that long."""
    made = Collectives(Ranks.of_group())
    made.agree(b"", "all are there")
    made._timeout_s = timeout_s
    return made


@contextmanager
def opened(**options: Any) -> Iterator[Collectives]:
    """Collectives until the end of the block."""
    made = all_there(**options)
    try:
        yield made
    finally:
        made.close()


def partial(rank: int, size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """One rank's gradients, of many magnitudes: in another order they have another sum."""
    random = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-3, 3, (size * n,), generator=random)
    return (torch.randn(size * n, generator=random) * scale).to(dtype)


def reduced(rank: int, size: int, n: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The piece of the mean that is this rank's."""
    with opened() as made:
        out = torch.full((n,), 0.1)
        mine = partial(rank, size, n, dtype)
        made.reduce(out, mine, torch.empty_like(mine), "layer").wait()
        return out.numpy()


def flagged(rank: int, flags: list[int]) -> list[int]:
    """The flags of all ranks."""
    with opened() as made:
        mine, size = bytearray(flags), dist.get_world_size()
        zeros = torch.zeros(size)
        made.reduce(torch.zeros(1), zeros, zeros.clone(), "layer", flags=mine).wait()
        return list(mine)


def gathered(rank: int, size: int, dtype: torch.dtype) -> list[float]:
    """All shards, of which each rank has its own."""
    with opened() as made:
        out = torch.zeros(2 * size, dtype=dtype)
        made.gather(out, torch.tensor([rank, -rank]).to(dtype), "layer").wait()
        return out.tolist()


def agreed(rank: int) -> list[list[bytes]]:
    """Values of other lengths on each rank, and of none."""
    with opened() as made:
        return [made.agree(b"\0" * rank, "zeros"), made.agree(b"", "nothing"), made.agree(b"x%d" % rank, "names")]


def one_after_another(rank: int, size: int) -> list[float]:
    """A gather of what the gather before it gave, which is late on one rank."""
    with opened() as made:
        first, second = torch.zeros(size), torch.zeros(size * size)
        time.sleep(0.1 * (rank == size - 1))
        made.gather(first, torch.tensor([rank + 1.0]), "first")
        made.gather(second, first, "second").wait()
    return second.tolist()


def beside_others(rank: int, size: int, count: int) -> list[float]:
    """The user's sums, of all ranks on the default group, beside ours of two sessions: each by a thread of its own."""
    found = [0.0, 0.0, 0.0]

    def gather(made: Collectives, place: int) -> None:
        for i in range(count):
            out = torch.zeros(size)
            made.gather(out, torch.tensor([float(rank + i)]), f"layer {i}").wait()
            found[place] += out.sum().item()

    with opened() as one, opened() as other:
        threads = [threading.Thread(target=gather, args=(made, place)) for place, made in enumerate((one, other))]
        for thread in threads:
            thread.start()
        for i in range(count):
            mine = torch.tensor([float(rank + i)])
            dist.all_reduce(mine)
            found[2] += mine.item()
        for thread in threads:
            thread.join()
    return found


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """The bytes that this rank gives to process groups for others: of data, and of all else."""
    size, rank = dist.get_world_size(), dist.get_rank()
    given = {"data": 0, "besides": 0}
    calls = [module.all_gather, transport.all_to_all, transport.broadcast]

    def gather(group: Any, out: torch.Tensor, mine: torch.Tensor) -> Any:
        given["besides"] += mine.nbytes * (size - 1)
        return calls[0](group, out, mine)

    def exchange(group: Any, out: torch.Tensor, pieces: torch.Tensor) -> Any:
        given["data"] += pieces.nbytes // size * (size - 1)
        return calls[1](group, out, pieces)

    def send(group: Any, piece: torch.Tensor, root: int) -> Any:
        given["data"] += piece.nbytes * (size - 1) * (root == rank)
        return calls[2](group, piece, root)

    module.all_gather, transport.all_to_all, transport.broadcast = gather, exchange, send
    try:
        yield given
    finally:
        module.all_gather, transport.all_to_all, transport.broadcast = calls


def counted(rank: int, size: int) -> tuple[int, int, int]:
    """The bytes of data that are counted, those that are given to the process group, and all else that is."""
    with opened() as made:
        with counting() as given:
            flags = bytearray(3)
            made.gather(torch.zeros(7 * size), torch.zeros(7), "layer").wait()
            grads = torch.zeros(5 * size, dtype=torch.bfloat16)
            made.reduce(torch.zeros(5), grads, grads.clone(), "layer", flags=flags).wait()
        return made.sent_bytes, given["data"], given["besides"]


def in_a_group(rank: int) -> list[Any]:
    """The shards of the two ranks of one row of a mesh of four; and the error where those of the second row do different things."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    made = Collectives(Ranks.of_group(mesh.mesh.tolist()))
    out = torch.zeros(2)
    made.gather(out, torch.tensor([float(rank)]), "layer").wait()
    shards = out.tolist()
    error = raised(made.gather(out, torch.zeros(1), "odd" if rank == 3 else "even").wait)
    made.close()
    return [shards, error]


def given_up(rank: int) -> list[bool]:
    """Whether torch has been left with something, where all was well, and where a rank has stopped in a gather."""
    with opened() as well:
        pass
    made = all_there(timeout_s=0.5)
    ends_inside(made, stop_me, is_me=rank == 1)
    raised(made.gather(torch.zeros(2), torch.zeros(1), "layer").wait)
    made.close()
    return [bool(well._given_up), bool(made._given_up)]


def forks(rank: int) -> list[bytes]:
    """A rank that has forked a child, as loaders of data do, which has ended as a program does; and what the ranks agree on after that."""
    with opened() as made:
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        made._watch._read_news()
        return made.agree(b"%d" % rank, "later")


def after_closing(rank: int) -> list[Any]:
    """What a call gives once this rank has closed, and once another one has."""
    made = all_there()
    if rank == 0:
        made.close()
    error = raised(lambda: made.agree(b"", "again"))
    made.close()
    return [error]


def raised(act: Callable[[], Any]) -> BaseException | None:
    """What it raises."""
    try:
        act()
    except Exception as error:
        return error
    return None


def calls(rank: int, by_rank: list[list[tuple[str, str, int]]], **options: Any) -> list[Any]:
    """Does what is listed for this rank (kind, name, elements), and gives the error of the last, of one call more, and whether bytes were sent."""
    size = dist.get_world_size()
    with opened(**options) as made:
        error = None
        for kind, what, n in by_rank[rank]:
            if kind == "sleep":
                time.sleep(n)
            elif kind == "gather":
                error = raised(made.gather(torch.zeros(size * n), torch.zeros(n), what).wait)
            elif kind == "reduce":
                error = raised(made.reduce(torch.zeros(n), torch.zeros(size * n), torch.zeros(size * n), what).wait)
            else:
                error = raised(lambda: made.agree(what.encode(), "value"))
        return [error, raised(lambda: made.agree(b"", "once more")), made.sent_bytes]


def loses(rank: int, who: int, how: str, when: str, timeout_s: float = 600.0) -> list[Any]:
    """Loses one rank somehow at some moment; what the others see, then and later, and how long `close()` takes after it."""
    size = dist.get_world_size()
    made = all_there(timeout_s=timeout_s)
    n = 2_000_000 if when == "in it" else 10
    out, shard = torch.zeros(size * n), torch.zeros(n)
    if when == "in it":
        ends_inside(made, _END[how], is_me=who == rank)
    elif rank == who:
        _END[how]()
    error = raised(made.gather(out, shard, "block 3").wait)
    later = raised(lambda: made.agree(b"", "later"))
    began = time.monotonic()
    made.close()
    return [error, later, time.monotonic() - began]


def ends_inside(made: Collectives, end: Callable[[], None], *, is_me: bool) -> None:
    """Has a rank end in its next gather, after all have said that they will do it."""
    send = transport.broadcast

    def ends_here(group: Any, piece: torch.Tensor, root: int) -> Any:
        if group is made.ranks.group and is_me and root == 1:  # some of it has been sent
            end()
        return send(group, piece, root)

    transport.broadcast = ends_here


def _raise() -> None:
    sys.last_value = ValueError("no loss")
    raise SystemExit


def _exit() -> None:
    raise SystemExit


_END = {"killed": kill_me, "stopped": stop_me, "raises": _raise, "exits": _exit}


def fails_alone(rank: int, who: int) -> list[Any]:
    """A rank whose own part of a collective fails, as a disk does; and the errors that come of that."""

    def read(row: bytes) -> list[bytes]:
        raise OSError("no such sector")

    with opened() as made:
        if rank == who:
            made._gather_bytes = read  # type: ignore[method-assign]
        ticket = made.gather(torch.zeros(dist.get_world_size()), torch.zeros(1), "layer")
        return [raised(ticket.wait), raised(lambda: made.agree(b"", "later"))]


def on_hosts_of_their_own(rank: int, who: int) -> Any:
    """Ranks that cannot see each other's processes, of which one is killed."""
    own = watch.Process.own()
    watch.Process.own = classmethod(lambda cls: watch.Process(f"host {rank}", own.pid, own.started))  # type: ignore[method-assign]
    watch._SILENT_S, watch._BEAT_S = 1.5, 0.3  # type: ignore[misc]
    return loses(rank, who, "killed", "between")


def ends_while_the_last_is_under_way(rank: int) -> float:
    """One rank ends when its part of the last gather is done; the others come to look at theirs once they know that."""
    size = dist.get_world_size()
    made = all_there()
    finish = made._finish

    def late(*works: Any) -> None:
        while made._watch.failure_of(sys.maxsize) is None:
            time.sleep(0.01)
        finish(*works)

    if rank != 0:
        made._transport._finish = late  # of data, not of announcements
    out = torch.zeros(size)
    made.gather(out, torch.tensor([1.0]), "last").wait()
    made.close()
    return out.sum().item()
