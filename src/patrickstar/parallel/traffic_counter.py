"""A counter of the bytes that a rank hands to process groups, whoever calls them.

It counts what leaves a rank of n for b bytes of its own where an algorithm is optimal in bytes, rings for instance, and ranks do the same:

    send                        b
    all-gather                  (n-1) b
    reduce-scatter, all-to-all  (n-1)/n b; of uneven pieces, those that are other ranks'
    broadcast, reduce           (n-1)/n b on each rank, whichever has it
    all-reduce                  2 (n-1)/n b
    scatter, gather             what the root sends, or each of the others
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.errors import StateError
from patrickstar.torch_private import FakeTensor, process_group_of


class Traffic(TorchDispatchMode):
    """A context and what is handed to process groups inside of it; made by `traffic`."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
        # A mesh of one dimension over all ranks has the default group, which says nothing of the mesh.
        self._names = {mesh.get_group(name).group_name: name for name in names if mesh is not None}

        self._calls: Counter[str] = Counter()
        self._n_times_bytes: Counter[tuple[str, int]] = Counter()

    @property
    def sent(self) -> dict[str, int]:
        """Bytes by name of the mesh's dimension, rounded up."""
        total: Counter[str] = Counter()
        for (name, size), scaled in self._n_times_bytes.items():
            total[name] += math.ceil(scaled / size)
        return dict(total)

    @property
    def calls(self) -> dict[str, int]:
        """Number of calls by name of the mesh's dimension; receiving is none, and neither is a barrier."""
        return dict(self._calls)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Counts an operation, and has it done."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside is seen then
        if func.namespace in {"c10d", "_c10d_functional"} and FakeTensor not in types:
            named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
            self._count(func, named | dict(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, given: dict[str, Any]) -> None:
        kind = func._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
        named = [given[name] for name in ("process_group", "group_name") if name in given]
        if kind in _SENDS_NOTHING or not named:
            return
        if kind not in _N_TIMES_BYTES:
            raise StateError(f"{func}: the bytes of this operation are not known; call it outside of traffic()")
        args, group = list(given.values()), process_group_of(named[0])
        own = args[func.namespace == "c10d" and kind not in _ONE_TENSOR]
        name = self._names.get(group.group_name) or group.group_desc.removeprefix("mesh_")
        self._calls[name] += 1
        self._n_times_bytes[name, group.size()] += _N_TIMES_BYTES[kind](_nbytes(own), group, args)


def traffic(mesh: DeviceMesh | None = None) -> Traffic:
    """A context that counts the bytes and calls with which this rank uses process groups: of this library, of torch's, of any code.

        with traffic() as seen:
            loss.backward()
        seen.sent["cp"], seen.calls["cp"]

    Groups are named by the dimension of the mesh that they were made for. Those of no mesh have their own description (`default_pg`). Weights and
    gradients of a session are sent by a thread of its own, which is not seen here: `stats().moved["ranks"]` has those.

    Args:
        mesh: names for groups that were not made for it: a mesh of one dimension has the default group where it has all ranks.
    """
    return Traffic(mesh)


def _nbytes(given: Any) -> int:
    """Bytes of a tensor, or of those in lists of lists."""
    return given.nbytes if isinstance(given, Tensor) else sum(map(_nbytes, given))


def _all_to_all(nbytes: int, group: dist.ProcessGroup, args: Sequence[Any]) -> int:
    *_, splits = (each for each in args if isinstance(each, list) and all(isinstance(one, int) for one in each))
    own = nbytes * splits[group.rank()] // max(1, sum(splits)) if splits else nbytes // group.size()
    return group.size() * (nbytes - own)


_SENDS_NOTHING: Final = frozenset({"recv", "irecv", "recv_any_source", "barrier", "monitored_barrier"})
_ONE_TENSOR: Final = frozenset({"send", "broadcast", "reduce", "allreduce"})
"""Kinds that write where they read; others are given the place of what comes first."""
_N_TIMES_BYTES: Final[Mapping[str, Callable[[int, dist.ProcessGroup, Sequence[Any]], int]]] = MappingProxyType(
    {
        **dict.fromkeys(("send", "isend"), lambda b, group, _: group.size() * b),
        **dict.fromkeys(
            ("allgather", "_allgather_base", "allgather_into_tensor", "all_gather_into_tensor"),
            lambda b, group, _: group.size() * (group.size() - 1) * b,
        ),
        **dict.fromkeys(
            ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor", "broadcast", "reduce"),
            lambda b, group, _: (group.size() - 1) * b,
        ),
        **dict.fromkeys(("allreduce", "all_reduce"), lambda b, group, _: 2 * (group.size() - 1) * b),
        **dict.fromkeys(("alltoall_base", "all_to_all_single"), _all_to_all),
        "alltoall": lambda b, group, args: group.size() * (b - _nbytes(args[1][group.rank()])),
        # Only the root has pieces to give; all but the root give theirs.
        "scatter": lambda b, group, args: (group.size() - 1) * b * (args[3] == group.rank()),
        "gather": lambda b, group, args: group.size() * b * (args[3] != group.rank()),
    }
)
"""Bytes times the number of ranks, by kind: in whole numbers, so that no part of one is lost call by call."""
