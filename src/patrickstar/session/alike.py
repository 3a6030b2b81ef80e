"""Facts that all ranks must have alike before they share a model: `manage` compares them before anything is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from patrickstar.comm.collectives import Collectives
from patrickstar.comm.ranks import Ranks
from patrickstar.comm.transport import staging_bytes
from patrickstar.core.machine import Tier
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.deferred.deferred_init import deferred_by
from patrickstar.errors import RankError
from patrickstar.optim.user_optimizer import read_state
from patrickstar.session.start import Setup

_ADVICE: Final = MappingProxyType(
    {
        "the parameters": "build the same model on all ranks",
        "the values of parameters": "call torch.manual_seed(0) before the model is built, on all ranks",
        "the optimizer": "give all ranks the same optimizer with the same groups",
        "the options": "give manage() the same arguments on all ranks",
        "the version of torch": "install the same one for all ranks",
        "the optimizer's state": "load the same one on all ranks, or none",
    }
)


def expect_alike(
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    setup: Setup,
    collectives: Collectives,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Raises RankError where ranks have other models, values, optimizers, options or versions: which, and what.

    `shapes`: of whole parameters, where ranks have different blocks of them: values are not compared then.
    """
    whole = setup.layout.whole if isinstance(setup.layout, ShardLayout) and shapes is None else ""
    groups = [] if optimizer is None else optimizer.param_groups
    names = {id(parameter): name for name, parameter in named.items()}
    states = {} if optimizer is None else read_state(optimizer, names)
    alike = [
        {key: [names[id(p)] for p in value] if key == "params" else value for key, value in group.items()}
        for group in groups
    ]
    # The directory is each rank's own, and in the mesh each has another place.
    given = [one.name for one in fields(setup.memory) if one.name not in {"disk", "mesh"}]
    options = {name: getattr(setup.memory, name) for name in given}
    host_bytes = setup.budgets.machine.budget[Tier.HOST] if setup.budgets.host_binds else None
    device = setup.budgets.device
    facts = {
        "the version of torch": torch.__version__,
        "the parameters": str({name: (*(shapes or {}).get(name, p.shape), p.dtype) for name, p in named.items()}),
        "the optimizer": f"{type(optimizer).__name__} {alike}",
        "the options": f"{options} {device.type} {host_bytes} {setup.precision.compute} {whole}",
        "the values of parameters": _digest(named.values() if shapes is None else ()),
        "the optimizer's state": str({name: state.step for name, state in states.items()})
        + _digest(m for state in states.values() if shapes is None for m in (state.exp_avg, state.exp_avg_sq)),
    }
    mine = {name: hashlib.sha256(fact.encode()).hexdigest() for name, fact in facts.items()}
    mine["GPU"] = (
        "" if device.type == "cpu" or staging_bytes(device) else str(torch.cuda.get_device_properties(device).uuid)
    )
    of_all = collectives.agree(mine, "what manage() was given")
    ranks = collectives.ranks
    for name in facts:
        others = tuple(rank for rank, theirs in enumerate(of_all) if theirs[name] != of_all[0][name])
        if others:
            raise RankError(
                f"manage(): {name} differ between {ranks.names([0])} and {ranks.names(others)}: {_ADVICE[name]}",
                ranks=ranks.numbers(others),
                action="manage()",
                reason=f"{name} differ",
            )
    expect_a_gpu_each([theirs["GPU"] for theirs in of_all], ranks)


def expect_a_gpu_each(gpus: Sequence[str], ranks: Ranks) -> None:
    """Raises RankError where two ranks are on one GPU, of which NCCL takes one. `gpus`: of all ranks; empty where NCCL is not used."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if gpu and first < rank:
            reason = f"{ranks.names([first, rank])} compute on the same GPU, {gpu}"
            raise RankError(
                f"manage(): {reason}, and NCCL takes one rank on each: start no more ranks than there are GPUs, and leave device= out",
                ranks=ranks.numbers([first, rank]),
                action="manage()",
                reason=reason,
            )


def _digest(tensors: Iterable[Tensor]) -> str:
    """The digest of the values that are there, and of what makes those that are not."""
    found = hashlib.sha256()
    for tensor in tensors:
        recorder = deferred_by(tensor)
        if recorder is not None:
            found.update(recorder.digest(tensor))
        else:
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
