"""Freed blocks (`step/room.py`) are kept as long as every plan leaves room for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.trace import Trace
from patrickstar.memory.allocator import allocator
from patrickstar.plan.plan import Plan
from patrickstar.plan.stretch import Stretch, StretchKind
from patrickstar.session.forecast import forecast
from patrickstar.step import room
from patrickstar.step.budgets import Budgets
from patrickstar.step.room import HostRoom
from patrickstar.units import MIB
from tests.session.builders import SLOT, WithLoss, batch, managed, options, step_with_loss

ACTIVATIONS = 24 * MIB


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that the allocator was made to return blocks."""
    calls: list[str] = []
    monkeypatch.setattr(room, "return_at_once", lambda: calls.append("returned") or "done")
    return calls


def planned() -> tuple[Plan, Trace, int]:
    """The plan and trace of a step with so much of activations, everything in memory, and what its worst moment takes."""
    known = forecast(
        WithLoss(), {"x": batch()}, device="cpu", host_memory="1TB", disk=".", disk_memory="1GB", options=options()
    )
    plan = known.plans[0]
    trace = known.traces[0]
    worst = max(trace.moments, key=lambda moment: moment.nonmodel_bytes)
    more = ACTIVATIONS - worst.nonmodel_bytes
    heavy = Trace(tuple(replace(m, nonmodel_bytes=m.nonmodel_bytes + more) if m is worst else m for m in trace.moments))
    return plan, heavy, ACTIVATIONS


def bounded(room_bytes: int, *, binds: bool = True) -> HostRoom:
    machine = Machine(Tier.HOST, {Tier.HOST: room_bytes, Tier.DISK: 1 << 40})
    return HostRoom(*[None] * 2, Budgets(machine, binds, room_bytes, 1.0))  # type: ignore[arg-type]


def test_blocks_are_kept_where_the_worst_moment_leaves_what_the_allocator_may_take_beyond_it(
    returned: list[str],
) -> None:
    plan, trace, activations = planned()
    slots = 64 * SLOT  # more than the model takes
    at_most = activations + slots + int(activations * allocator().overshoots)
    bounded(at_most).planned(plan, trace)
    assert not returned


def test_a_plan_that_takes_that_room_has_them_returned_at_once_and_once(returned: list[str]) -> None:
    plan, trace, activations = planned()
    blocks = bounded(activations + int(activations * allocator().overshoots) - 1)
    blocks.planned(plan, trace)
    blocks.planned(plan, trace)
    assert returned == ["returned"]


def test_without_a_bound_nothing_is_asked_of_the_allocator(returned: list[str]) -> None:
    plan, trace, _ = planned()
    blocks = bounded(1, binds=False)
    blocks.planned(plan, trace)
    blocks.begin(Stretch(StretchKind.TRAINING, reason="whatever"), 0)
    assert not returned


def test_a_session_keeps_them_in_room_and_returns_them_from_the_first_step_that_was_not_as_planned(
    returned: list[str], tmp_path: Any
) -> None:
    model = WithLoss()
    session = managed(model, device="cpu", host_memory="64MiB", disk=tmp_path / "disk")
    with session:
        for number in range(2):
            step_with_loss(model, session.optimizer, number)
        assert not returned
        loss = model(batch(2))
        sum((parameter.square().sum() for parameter in model.parameters()), start=loss).backward()
        session.optimizer.step()
        session.stats()
        assert torch.isfinite(loss)
        assert session.stats().reactive_steps == 1
        assert returned == ["returned"]


def test_a_session_in_which_chunks_fill_all_room_returns_them_from_its_first_plan(
    returned: list[str], tmp_path: Any
) -> None:
    model = WithLoss()
    smallest = forecast(
        model, {"x": batch(rows=64)}, device="cpu", host_memory="1GB", disk=tmp_path, options=options()
    ).minimum["host"]
    with managed(model, device="cpu", host_memory=smallest, disk=tmp_path / "disk") as session:
        step_with_loss(model, session.optimizer, 0, rows=64)
        assert returned == ["returned"]
