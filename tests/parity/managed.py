"""The same run as the oracle's, under the library: through its public names only."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import patrickstar
from tests.parity.matrix import Row
from tests.parity.oracle import HYSTERESIS, SCALE, WINDOW, Record, evaluate
from tests.parity.zoo import CASES, STEPS, micro_seed, schedule

__all__ = ["LIMITED", "Outcome", "least", "limits_of", "train"]

Limits = Mapping[str, int]

LIMITED: Mapping[str, tuple[str, ...]] = {
    "emulated": ("device",),
    "cpu+disk": ("host",),
    "emulated+disk": ("device", "host"),
}
"""The tiers that a row's budget binds, by kind of machine."""

ROOMY_BYTES = 512 * 2**20
ABSURD_BYTES = 4096
# A refusal names the smallest budget that fits as far as it was known then; data may show a larger need later.
ATTEMPTS = 12


@dataclass(frozen=True)
class Outcome:
    """A finished run: what it computed, what it reports of itself, and the budgets it ran under."""

    record: Record
    stats: Any
    limits: Limits
    closed: Mapping[str, Tensor]
    """The model's parameters after `close()`, those that memory had room for."""


def train(row: Row, limits: Limits, directory: Path, *, steps: int = STEPS) -> Outcome:
    """One run of a row within the given bytes by tier; a tier that is not named has room for everything.

    Raises:
        patrickstar.BudgetError: it does not fit, found out at whatever point.
    """
    case = CASES[row.model]
    model = case.build(row.checkpointing)
    groups = case.groups(model)
    base = [dict(group) for group in groups]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in groups for parameter in group["params"]]
    batches = case.batches(seed=0, count=steps * row.accumulation)
    plain = getattr(torch.optim, case.algorithm)(groups, lr=1.0)  # each group has its own rate
    by_call = row.clipping and row.accumulation > 1
    session = patrickstar.manage(
        model,
        plain,
        precision=row.precision.partition("-")[0],
        step=row.step,
        max_grad_norm=case.max_norm if row.clipping and not by_call else None,
        options=options_of(row, eviction=row.eviction, poison=True),
        **machine(row, limits, directory),
    )
    record = Record()
    try:
        optimizer = session.optimizer
        for step in range(1, steps + 1):
            case.before_step(model, step)
            for group, initial in zip(optimizer.param_groups, base, strict=True):
                group.update(schedule(initial, step))
            for micro in range(row.accumulation):
                torch.manual_seed(micro_seed(step, micro))
                loss = case.loss_of(model, batches[(step - 1) * row.accumulation + micro])
                session.scaler.scale(loss / row.accumulation).backward()
                record.losses.append(loss.detach().clone())
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
        record.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        read_moments(session, row, record, order=order, directory=directory)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where the weights do not fit, closing leaves `meta` ones and says so
            session.close()
    closed = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    return Outcome(record, stats, dict(limits), closed)


def options_of(row: Row, **given: Any) -> patrickstar.Options:
    """The chunks of the case; in 16 bits, room for gradients of several backwards from the start."""
    if row.precision != "fp32":
        kept, _, compute = row.precision.partition("-")
        scale = patrickstar.LossScale(initial=SCALE, window=WINDOW, hysteresis=HYSTERESIS)
        given |= {"accumulate": row.accumulation, "compute": compute or kept, "loss_scale": scale}
    return patrickstar.Options(
        chunk_size=CASES[row.model].chunk_numel, tile_rows=row.tile_rows, embedding_rows=row.tables, **given
    )


def machine(row: Row, limits: Limits, directory: Path) -> dict[str, Any]:
    """The arguments of `manage` that say what memory there is."""
    device, host = limits.get("device", ROOMY_BYTES), limits.get("host", ROOMY_BYTES)
    match row.tier:
        case "emulated":
            return {"device": "emulated", "device_memory": device}
        case "cpu+disk":
            return {"device": "cpu", "host_memory": host, "disk": directory}
        case "emulated+disk":
            return {"device": "emulated", "device_memory": device, "host_memory": host, "disk": directory}
    raise AssertionError(f"no such tier: {row.tier}")


def read_moments(session: Any, row: Row, record: Record, *, order: list[str], directory: Path) -> None:
    """Both moments and the update counts, from the optimizer's state in torch's format.

    Where that does not fit at once, the session says so, and the state goes by a checkpoint to one that has room.
    """
    try:
        state = session.optimizer.state_dict()
    except patrickstar.BudgetError:
        case = CASES[row.model]
        session.save_checkpoint(directory.parent / "checkpoint")
        model = case.build(row.checkpointing)
        plain = getattr(torch.optim, case.algorithm)(case.groups(model), lr=1.0)
        options = options_of(row)
        with patrickstar.manage(
            model, plain, device="emulated", precision=row.precision.partition("-")[0], options=options
        ) as roomy:
            roomy.load_checkpoint(directory.parent / "checkpoint")
            state = roomy.optimizer.state_dict()
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, name in zip(indices, order, strict=True):
        if index in state["state"]:
            kept = state["state"][index]
            record.exp_avg[name] = kept["exp_avg"].clone()
            record.exp_avg_sq[name] = kept["exp_avg_sq"].clone()
            record.updates[name] = int(kept["step"])


# Budgets


def least(row: Row, limits: Limits, directory: Path, *, steps: int = STEPS) -> Outcome:
    """The run in the smallest budgets at or above the given ones, as the refusals name them."""
    for attempt in range(ATTEMPTS):
        folder = directory / str(attempt)
        folder.mkdir()
        try:
            return train(row, limits, folder / "disk", steps=steps)
        except patrickstar.BudgetError as refusal:
            tier, smallest = str(refusal.tier), refusal.smallest_bytes
            if tier not in limits:
                raise AssertionError(f"{row}: the {tier} tier has room for everything, and yet") from refusal
            if smallest <= limits[tier]:
                raise AssertionError(f"{row}: {tier} refused {limits[tier]} and named {smallest} bytes") from refusal
            limits = {**limits, tier: smallest}
    raise AssertionError(f"{row}: still refused after {ATTEMPTS} budgets that refusals had named, the last {limits}")


def limits_of(row: Row) -> Limits:
    """Bytes by tier for the row's budget: none, the smallest that run, or halfway from those to where nothing moves."""
    if row.budget == "fits":
        return {}
    # What a second micro-batch needs, a fourth does; a policy changes what moves, not what fits. Where clipping needs
    # more, the refusal of the row's own run says so.
    like = replace(row, budget="minimum", clipping=False, eviction="next-use", accumulation=min(row.accumulation, 2))
    minimum, everything = span(like)
    if row.budget == "minimum":
        return minimum
    for tier in LIMITED[row.tier]:
        assert everything[tier] > minimum[tier], f"{row}: no budget lies between {minimum[tier]} and {everything[tier]}"
    return {tier: (minimum[tier] + everything[tier]) // 2 for tier in LIMITED[row.tier]}


@lru_cache(maxsize=256)
def span(row: Row) -> tuple[Limits, Limits]:
    """The smallest budgets that run, and those in which, one tier at a time, everything fits.

    The second counts from the first by what two runs report as peaks, so that what a budget holds beside them (a
    reserve, say) cancels.
    """
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "least").mkdir()
        smallest = least(row, dict.fromkeys(LIMITED[row.tier], ABSURD_BYTES), top / "least", steps=2)
        everything = {}
        for tier in LIMITED[row.tier]:
            (top / tier).mkdir()
            others = {other: limit for other, limit in smallest.limits.items() if other != tier}
            full = least(row, others, top / tier, steps=2)
            everything[tier] = smallest.limits[tier] + full.stats.peak[tier] - smallest.stats.peak[tier]
    return smallest.limits, everything
