"""The ranks of a process group: their store, and groups of our own over them."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from patrickstar.config.kinds import refuse
from patrickstar.errors import some

_STORE_TIMEOUT = timedelta(seconds=10)
_SHARED, _OF_BLOCKS = ("dp", "cp"), ("row", "col")


def begin_process_group() -> Callable[[], None]:
    """Makes the default process group of the ranks that torchrun has started, unless there is one; gives what ends it again."""
    if dist.is_initialized():
        return lambda: None
    # Of gloo whatever computes: groups that carry data are of our own.
    dist.init_process_group("gloo")
    return dist.destroy_process_group


class Ranks:
    """Ranks that share something, as seen by one of them. One process by itself has none.

    Args:
        numbers: by which the whole program knows them, in order. rank: this one's place among them. store: that all of them have, and the prefix of
            what they share there, which nobody else uses. averaged: how many of them have batches of their own. local_size: see below.

    Attributes:
        rank, size: this one's place among them, and how many there are. averaged: what their summed gradients are divided by.
        local_size: number of processes on this machine that share its budgets.
        store: what they share from the start, asked over a connection of our own: nobody else's waiting holds it up. It gives up after seconds.
        group: of our own, of gloo, once it is open. It stands in no list of torch's: others' groups may come and go at the same time, in any order.
    """

    group: dist.ProcessGroupGloo
    _of_gpus: dist.ProcessGroupNCCL | None = None

    def __init__(
        self,
        numbers: Sequence[int],
        rank: int,
        store: tuple[dist.Store, str],
        *,
        averaged: int | None = None,
        local_size: int = 1,
    ) -> None:
        self._numbers = list(numbers)
        self.rank, self.size, self.local_size = rank, len(self._numbers), local_size
        self.averaged = self.size if averaged is None else averaged
        shared, name = store
        # Kept: where its server is in this process, it ends with its last user.
        self._store_to_open_with = dist.PrefixStore(name, shared)
        self.store = dist.PrefixStore(name, cast(Any, shared).clone())  # torch has no type for it
        self.store.set_timeout(_STORE_TIMEOUT)

    @classmethod
    def of_group(cls, members: Sequence[int] | None = None, *, averaged: int | None = None) -> Ranks:
        """The ranks of the default process group. `members`: those of them that are meant, by their numbers there; all of them by default."""
        world = dist.group.WORLD
        assert world is not None, "there is no process group"
        numbers = list(range(world.size()) if members is None else members)
        rank = numbers.index(world.rank())
        digest = hashlib.sha256(str(numbers).encode()).hexdigest()[:16]
        store, who = world.get_group_store(), f"patrickstar/{digest}"
        # Each rank counts for itself how often it has been here with these: alike on all that do the same.
        name = f"{who}/{store.add(f'{who}/times/{rank}', 1)}"
        # As torchrun says; all of them, where nobody does.
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world.size()))
        return cls(numbers, rank, (store, name), averaged=averaged, local_size=local_size)

    def numbers(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers by which the whole program knows these ranks, in order."""
        return tuple(self._numbers[rank] for rank in sorted(ranks))

    def names(self, ranks: Sequence[int]) -> str:
        """`rank 3`, or `ranks 1, 3`, for messages."""
        numbers = self.numbers(ranks)
        return f"rank{'s' * (len(numbers) > 1)} {some(list(map(str, numbers)), most=8)}"

    def open(self, *, timeout_s: float) -> None:
        """Makes the group, which takes all ranks, each in a thread that may be given up: it waits for the others."""
        self._timeout = timedelta(seconds=timeout_s)
        self.group = dist.ProcessGroupGloo(self._store_to_open_with, self.rank, self.size, timeout=self._timeout)

    def group_of_gpus(self) -> dist.ProcessGroupNCCL:
        """A group of our own, of NCCL: made when all ranks first ask for it, in the thread that does collectives."""
        if self._of_gpus is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = dist.PrefixStore("gpus", self._store_to_open_with)
            self._of_gpus = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        return self._of_gpus

    def abort(self) -> None:
        """Ends what GPUs have under way: a kernel of NCCL's waits for others for ever, and what waits for all of a GPU waits for that."""
        if self._of_gpus is not None:
            self._of_gpus.abort()

    def close(self, *, abandons: bool) -> None:
        """Ends the groups, or gives them up where something is still under way. Waits for nobody."""
        if abandons:
            self.abort()
        for group in (vars(self).pop("group", None), vars(self).pop("_of_gpus", None)):
            if abandons and group is not None:
                # Kept for ever: its destructor waits for what is under way, until the timeout.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


MakeRanks = Callable[[], Ranks]


def ranks_of(mesh: Any, used: Mapping[str, int]) -> tuple[MakeRanks | None, MakeRanks | None]:
    """Makes the ranks that share the model's chunks, and all ranks that have blocks of the model; None where that is one process, or it is not cut.

    The former are those of a mesh's dimensions "dp" and "cp" together, of which each "cp" group has one batch; without a mesh all of the process
    group. Of the latter, "row" and "col", each has such ranks of its own.

    Args:
        used: sizes of the dimensions over which the model works together, by name.
    Raises:
        ConfigError: the mesh has other dimensions, lacks one of these, or outlives its process group, or this process is not in it.
    """
    there = dist.is_available() and dist.is_initialized()
    names = () if mesh is None else mesh.mesh_dim_names or ()
    sizes = {} if mesh is None else dict(zip(names, mesh.mesh.shape, strict=False))
    problems = [
        f'the model works together over "{name}", {size} ranks, which mesh={mesh} has not: give manage() the whole mesh'
        for name, size in used.items()
        if sizes.get(name, 1) != size
    ]
    if mesh is None:
        refuse(problems, of="manage")
        return Ranks.of_group if there and dist.get_world_size() > 1 else None, None
    if not there:
        problems.append("mesh= without a process group: call torch.distributed.init_process_group() first")
    elif mesh.get_coordinate() is None:
        problems.append(f"mesh={mesh}: this process, rank {dist.get_rank()}, is not in it")
    if "dp" not in names:
        problems.append(f'mesh={mesh}: a mesh with the dimension "dp", over which the model is shared, is expected')
    for name, size in sizes.items():
        if size > 1 and name in _OF_BLOCKS and name not in used:
            problems.append(
                f'mesh={mesh}: the model is not cut over "{name}": call Tensor2D(...).parallelize(model) first'
            )
        elif size > 1 and (name not in _SHARED + _OF_BLOCKS or (name == "cp" and used.keys() & set(_OF_BLOCKS))):
            problems.append(
                f'mesh={mesh}: "{name}" comes later. Give mesh["dp"] where each of its groups trains a model of its own'
            )
    refuse(problems, of="manage")
    shares = tuple(name for name in names if name in _SHARED)
    members = (mesh if shares == names else mesh[shares]).mesh.flatten().tolist()
    is_cut = any(name in _OF_BLOCKS for name in used)
    return (
        partial(Ranks.of_group, members, averaged=mesh["dp"].size()) if len(members) > 1 else None,
        partial(Ranks.of_group, mesh.mesh.flatten().tolist()) if is_cut else None,
    )
