"""The same run as the oracle's, under the library: through its public names only, but that each row has lanes of its own kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import patrickstar
from patrickstar.checkpoint.reader import open_step
from patrickstar.parallel import ContextParallel, Tensor2D
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.manage import assemble
from tests.parity.lanes import choice_of, depth_of, lanes_for
from tests.parity.matrix import Row, sizes_of
from tests.parity.oracle import HYSTERESIS, SCALE, WINDOW, Record, evaluate, on
from tests.parity.zoo import CASES, STEPS, Case, micro_seed, schedule, without_dropout

Limits = Mapping[str, int]

ROOMY_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Outcome:
    """A finished run: what it computed, what it reports of itself, and the budgets it ran under."""

    record: Record
    stats: Any
    limits: Limits
    closed: Mapping[str, Tensor]
    """The model's parameters after `close()`, those that memory had room for."""


def train(
    row: Row,
    limits: Limits,
    directory: Path,
    *,
    steps: int = STEPS,
    prefetch: int | str | None = "of the row",
    choice: UpdateChoice | None = None,
    device: str = "cpu",
    rank: int = 0,
) -> Outcome:
    """One run of a row within the given bytes by tier; a tier that is not named has room for everything. `rank`: of a row of several.

    `prefetch`: another depth than the row's. `choice`: of updates, another than the row's. `device`: what takes the place of the device that is
    emulated, with lanes of its own.

    Raises:
        patrickstar.BudgetError: it does not fit, found out at whatever point.
    """
    case = case_of(row)
    model = case.build(row.checkpointing)
    mesh, shard = share_batches(row, model)
    n_batches, which = row.world, rank
    if mesh is not None:
        n_batches, which = mesh.size(0), mesh.get_local_rank("dp")
    groups = case.groups(model)
    base = [dict(group) for group in groups]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in groups for parameter in group["params"]]
    count = steps * row.accumulation * n_batches
    batches = [shard(on(device, batch)) for batch in case.batches(seed=0, count=count)]
    plain = getattr(torch.optim, case.algorithm)(groups, lr=1.0)  # each group has its own rate
    by_call = row.clipping and row.accumulation > 1
    session = assemble(
        model,
        plain,
        make_lane=lanes_for(row) if device == "cpu" else None,
        choice=choice or choice_of(row),
        mesh=mesh,
        **arguments_of(
            row, limits, directory, device=device, prefetch=depth_of(row) if prefetch == "of the row" else prefetch
        ),
    )
    record = Record()
    try:
        optimizer = session.optimizer
        for step in range(1, steps + 1):
            case.before_step(model, step)
            for group, initial in zip(optimizer.param_groups, base, strict=True):
                group.update(schedule(initial, step))
            for micro in range(row.accumulation):
                torch.manual_seed(micro_seed(step, micro, rank))
                loss = case.loss_of(model, batches[((step - 1) * row.accumulation + micro) * n_batches + which])
                with session.no_sync() if row.no_sync and micro < row.accumulation - 1 else nullcontext():
                    session.scaler.scale(loss / row.accumulation).backward()
                record.losses.append(loss.detach().cpu().clone())
                del loss  # its graph holds what the next forward needs room for
            session.scaler.unscale_(optimizer)
            if row.step == "deferred":
                record.gradients.append({name: grad.clone() for name, grad in session.gradients() if grad is not None})
            if by_call:
                record.norms.append(torch.as_tensor(session.clip_grad_norm_(case.max_norm)).clone())
            session.scaler.step(optimizer)
            session.scaler.update()
            if session.scaler.is_enabled():
                record.scales.append(session.scaler.get_scale())
            (model if case.zero == "model" else optimizer).zero_grad()
            evaluate(case, model, batches[0], step, record)
        stats = session.stats()
        weights = session.state_dict()
        record.weights = {name: weights[name].clone() for name in names.values()}
        record.buffers = {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}
        read_moments(session, record, dict(model.named_parameters()), order=order, directory=directory)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where the weights do not fit, closing leaves `meta` ones and says so
            session.close()
    closed = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    return Outcome(record, stats, dict(limits), closed)


def case_of(row: Row) -> Case:
    """The model of a row and how it is trained; without dropout where ranks have parts of the same batch."""
    return without_dropout(CASES[row.model]) if row.mesh else CASES[row.model]


@cache
def mesh_of(mesh: str) -> DeviceMesh:
    """A mesh, made once: a process that is kept would make groups again and again."""
    sizes = sizes_of(mesh)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp") if len(sizes) == 2 else ("dp", "row", "col"))


def share_batches(row: Row, model: nn.Module) -> tuple[DeviceMesh | None, Callable[[Any], Any]]:
    """Makes a model a part of those that share its batches; gives the mesh, and what gives a rank its part of a batch."""
    if not row.mesh:
        return None, lambda batch: batch
    mesh = mesh_of(row.mesh)
    method: dict[str, Any] = (
        {"layout": row.method, "method": "ring"} if row.method == "contiguous" else {"method": row.method}
    )
    over = Tensor2D(mesh["row", "col"]) if row.method == "2d" else ContextParallel(mesh["cp"], **method)
    over.parallelize(model)
    return mesh, over.shard


def arguments_of(
    row: Row, limits: Limits, directory: Path, *, device: str, prefetch: int | str | None
) -> dict[str, Any]:
    """The arguments of `manage`. Of several micro-batches, gradients are clipped by hand."""
    return {
        "precision": row.precision.partition("-")[0],
        "step": row.step,
        "max_grad_norm": CASES[row.model].max_norm if row.clipping and row.accumulation == 1 else None,
        "options": options_of(row, eviction=row.eviction, prefetch=prefetch, poison=True),
        **machine(row, limits, directory),
        **({} if device == "cpu" else {"device": device}),
    }


def options_of(row: Row, **given: Any) -> patrickstar.Options:
    """The chunks of the case; in 16 bits, room for gradients of several backwards from the start."""
    if row.precision != "fp32":
        kept, _, compute = row.precision.partition("-")
        scale = patrickstar.LossScale(initial=SCALE, window=WINDOW, hysteresis=HYSTERESIS)
        given |= {"accumulate": 1 if row.no_sync else row.accumulation, "compute": compute or kept, "loss_scale": scale}
    return patrickstar.Options(chunk_size=row.world * CASES[row.model].chunk_numel, tile_rows=row.tile_rows, **given)


def machine(row: Row, limits: Limits, directory: Path) -> dict[str, Any]:
    """The arguments of `manage` that say what memory there is: of a machine with all ranks, each with a device."""
    device, host = limits.get("device", ROOMY_BYTES), limits.get("host", row.world * ROOMY_BYTES)
    disk = {"disk": directory, "disk_memory": row.world * ROOMY_BYTES}
    match row.tier:
        case "emulated":
            return {"device": "emulated", "device_memory": device, "host_memory": host}
        case "cpu+disk":
            return {"device": "cpu", "host_memory": host, **disk}
        case "emulated+disk":
            return {"device": "emulated", "device_memory": device, "host_memory": host, **disk}
    raise AssertionError(f"no such tier: {row.tier}")


def read_moments(
    session: Any, record: Record, parameters: Mapping[str, nn.Parameter], *, order: list[str], directory: Path
) -> None:
    """Both moments and the update counts, from the optimizer's state in torch's format.

    Where that does not fit at once, the session says so, and they are read from a checkpoint. Ranks read one at a time.
    """
    if dist.is_initialized():
        for name, parameter in parameters.items():
            if kept := session.optimizer.state.get(parameter):
                record.exp_avg[name] = kept["exp_avg"].clone()
                record.exp_avg_sq[name] = kept["exp_avg_sq"].clone()
                record.updates[name] = int(kept["step"])
        return
    try:
        state = session.optimizer.state_dict()
    except patrickstar.BudgetError:
        path = directory.parent / "checkpoint"
        session.save_checkpoint(path)
        with open_step(path) as reader:
            kept = reader.values["state"]
            record.updates |= {name: int(count) for name, count in kept["steps"].items()}
            for name in record.updates:
                record.exp_avg[name] = reader.read(f"exp_avg/{name}")
                record.exp_avg_sq[name] = reader.read(f"exp_avg_sq/{name}")
        return
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, name in zip(indices, order, strict=True):
        if index in state["state"]:
            kept = state["state"][index]
            record.exp_avg[name] = kept["exp_avg"].clone()
            record.exp_avg_sq[name] = kept["exp_avg_sq"].clone()
            record.updates[name] = int(kept["step"])
