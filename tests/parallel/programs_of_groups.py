"""What ranks do with process groups while their traffic is counted. A module by itself: each of their processes imports it, and nothing of pytest."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from patrickstar.parallel import traffic
from patrickstar.torch_private import process_group_of

B = 96  # bytes of what a rank gives


def counted(rank: int, size: int) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Bytes and calls of each kind of collective, by what it is."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    of_rows = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("row", "col")) if size == 4 else None
    group = mesh.get_group("cp")
    mine, whole = torch.zeros(B // 4), torch.zeros(size, B // 4)
    pieces = [torch.zeros(B // 4 // size) for _ in range(size)]
    uneven = [1 + (each == rank) for each in range(size)]
    one = torch.zeros(sum(uneven))
    cut = distribute_tensor(torch.zeros(size, B // 4), mesh, [Shard(0)])

    def around() -> None:
        ops = [
            dist.P2POp(dist.isend, mine, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, torch.zeros(B // 4), (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    things = {
        "send": around,
        "all_gather": lambda: dist.all_gather_into_tensor(whole.view(-1), mine, group),
        "all_gather list": lambda: dist.all_gather(list(whole), mine, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(pieces[0], mine, group=group),
        "reduce_scatter list": lambda: dist.reduce_scatter(torch.zeros(B // 4 // size), pieces, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros(B // 4), mine, group=group),
        "all_to_all uneven": lambda: dist.all_to_all_single(torch.zeros(2 + (size - 1)), one, uneven, uneven, group),
        "broadcast": lambda: dist.broadcast(mine, 1, group),
        "reduce": lambda: dist.reduce(mine, 1, group=group),
        "all_reduce": lambda: dist.all_reduce(mine, group=group),
        "scatter": lambda: dist.scatter(pieces[0].clone(), pieces if rank == 1 else None, 1, group),
        "gather": lambda: dist.gather(mine, list(whole) if rank == 1 else None, 1, group),
        "functional": lambda: functional.all_gather_tensor(mine, 0, group).sum(),
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(mine, "sum", 0, group).sum(),
        "functional all_to_all": lambda: functional.all_to_all_single(mine, None, None, group).sum(),
        "functional all_reduce": lambda: functional.all_reduce(mine, "sum", group).sum(),
        "barrier": lambda: dist.barrier(group),
        "a DTensor": lambda: cut.redistribute(mesh, [Replicate()]).to_local().sum(),
    }
    if of_rows is not None:
        things["two dimensions"] = lambda: [
            dist.all_reduce(mine, group=of_rows.get_group(name)) for name in ("row", "col", "col")
        ]
    found = {}
    for name, act in things.items():
        with traffic(None if name == "two dimensions" else mesh) as seen:
            act()
        found[name] = (seen.sent, seen.calls)
    with traffic() as seen:
        dist.all_reduce(mine)
    found["no mesh"] = (seen.sent, seen.calls)
    return found


def found_again(rank: int) -> list[bool]:
    """Whether a group is found by itself, as what operations are given, and by its name."""
    group = dist.group.WORLD
    assert group is not None
    return [process_group_of(given) is group for given in (group, group.boxed(), group.group_name)]
