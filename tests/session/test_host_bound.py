"""Where the host computes under a bound: room is made for what nobody foresaw, as far as chunks can make it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patrickstar.core.machine import Machine, Tier
from patrickstar.memory.process import resident_bytes
from patrickstar.memory.store import ChunkStore
from patrickstar.memory.works_under_way import WorksUnderWay
from patrickstar.plan.actions import Action, Issue
from patrickstar.step import room
from patrickstar.step.budgets import Budgets
from patrickstar.step.room import HostRoom, Room
from patrickstar.units import MIB
from tests.composed import Composed
from tests.session.builders import (
    LAYERS,
    SLOT,
    TIGHT,
    WIDTH,
    Layers,
    MakePair,
    Pair,
    backward,
    is_ordinary,
    managed,
    mlp,
    store_of,
    train_step,
)


class Unforeseen(Layers):
    """Looks at a value, which no trial run can, and makes some slots' worth of activations."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.layers[:6](x).repeat(200, 1)
        if bool(wide.sum() == 0):
            return wide
        return self.layers[6:](wide)


LARGE_BYTES = 2000 * WIDTH * 4


def replaces() -> nn.Module:
    """Makes something large between the uses of its two weights, and again after the second, when the first is gone."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.children():
            x = layer(x)
            with torch.no_grad():
                mean = x.repeat(2000 // len(x), 1).mean(0)
            x = x - mean
        return x

    torch.manual_seed(0)
    return Composed(run, **{name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("first", "second")})


def test_chunks_leave_for_activations_that_no_forecast_saw(make_pair: MakePair, on_disk: dict[str, Any]) -> None:
    budget = 104 * SLOT
    pair = make_pair(Unforeseen, **on_disk | {"host_memory": budget})
    pair.train_same(2)
    assert pair.session.stats().reactive_steps > 0
    assert pair.session.stats().peak["host"] <= budget


def test_where_the_room_that_is_left_to_activations_cannot_be_had_only_what_is_needed_stays(disk_pair: Pair) -> None:
    disk_pair.train(1)
    executor = disk_pair.session._parts.executor
    disk_pair.session.state_dict()["2.weight"]  # no stretch is under way any more
    assert executor.store.state.slots_used[Tier.HOST] > 1
    with executor.room.making(TIGHT):
        disk_pair.session.state_dict()["0.weight"]
        assert executor.store.state.slots_used[Tier.HOST] == 1
    disk_pair.expect_same()


def bounded(resident_limit_bytes: int) -> HostRoom:
    machine = Machine(Tier.HOST, {Tier.HOST: 128 * MIB})
    return HostRoom(*[None] * 2, Budgets(machine, True, resident_limit_bytes, 1.0))  # type: ignore[arg-type]


def test_the_guard_counts_what_is_coming_beside_what_is_there() -> None:
    guard = bounded(resident_bytes() + 64 * MIB)  # 40 MiB and 1 MiB of the budget may come on top
    assert guard.excess_bytes(80 * MIB) == 0
    assert guard.excess_bytes(200 * MIB) == pytest.approx(95 * MIB, abs=10 * MIB)


def test_near_the_bound_the_allocator_is_asked_before_the_process_grows_by_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[int]()
    monkeypatch.setattr(room, "release_free_memory", lambda: asked.append(len(asked)))
    guard = bounded(resident_bytes() - 20 * MIB)
    for growth, times in ((0, 1), (0, 1), (8 * MIB, 1), (17 * MIB, 2), (0, 2), (17 * MIB, 3)):
        assert guard.excess_bytes(growth) == 0
        assert len(asked) == times


def test_the_guard_is_told_of_what_takes_the_place_of_something_that_is_gone(
    make_pair: MakePair, on_disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(replaces, **on_disk | {"host_memory": LARGE_BYTES + 10 * SLOT})
    pair.train(1)
    pilot, told = pair.session._parts.executor.pilot, dict[str, int]()

    def excess_bytes(self: HostRoom, growth_bytes: int) -> int:
        if pilot.stretch.trace is not None:
            told[pilot.stretch.trace.moments[pilot.stretch.position - 1].name] = growth_bytes
        return 0

    monkeypatch.setattr(HostRoom, "excess_bytes", excess_bytes)
    pair.train(1, first=1)
    assert told["forward first.weight"] >= LARGE_BYTES
    assert told["forward second.weight"] >= LARGE_BYTES
    assert max(told[name] for name in told if "backward" in name) < LARGE_BYTES


@pytest.mark.parametrize(("is_exceeded", "arriving_bytes"), [(False, 3 * SLOT), (True, SLOT)])
def test_near_the_bound_the_guard_is_told_of_pages_that_are_to_come_and_not_of_those_that_have(
    is_exceeded: bool, arriving_bytes: int, disk_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_pair.train(1)
    told = list[int]()

    def told_without_transfers(self: HostRoom, growth_bytes: int) -> int:
        told.append(growth_bytes)
        return 0

    monkeypatch.setattr(HostRoom, "excess_bytes", told_without_transfers)
    monkeypatch.setattr(HostRoom, "is_exceeded_by", lambda self, growth_bytes: is_exceeded)
    monkeypatch.setattr(WorksUnderWay, "arriving_slots", 0)
    monkeypatch.setattr(WorksUnderWay, "arriving_bytes", lambda self: SLOT)
    disk_pair.train(1, first=1)
    before, told[:] = list(told), []
    monkeypatch.setattr(WorksUnderWay, "arriving_slots", 3)
    disk_pair.train(1, first=2)
    assert told == [growth + arriving_bytes for growth in before]


def test_chunks_make_room_for_what_the_process_holds_beside_them(
    disk_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    disk_pair.train(1)
    executor = disk_pair.session._parts.executor
    executor.settle()
    executor.room._limits = (0, 0)  # whatever is there is too much
    with caplog.at_level(logging.WARNING, "patrickstar"):
        disk_pair.train(1, first=1)
        disk_pair.session.state_dict()["0.weight"]
    assert executor.store.state.slots_used[Tier.HOST] == 1
    assert "more than host_memory allows" in caplog.text
    disk_pair.expect_same()


def test_a_stretch_opens_with_no_slots_that_the_process_has_no_room_for(
    disk_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_with = list[int]()

    def open_room(self: HostRoom, *args: Any) -> None:
        Room.open(self, *args)
        opened_with.append(self._store.state.slots_used[Tier.HOST])

    monkeypatch.setattr(HostRoom, "open", open_room)
    disk_pair.train(2)
    assert min(opened_with) > 0
    disk_pair.session._parts.executor.room._limits = (0, 0)  # whatever is there is too much
    disk_pair.train(1, first=2)
    assert opened_with[-1] == 0
    disk_pair.expect_same()


@pytest.mark.parametrize("slots", [4 * LAYERS, 6])
def test_gradients_nobody_used_stay_at_the_end_where_they_fit_beside_the_weights(
    slots: int, on_disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    session = managed(model, **on_disk | {"host_memory": slots * SLOT})
    backward(model)
    with caplog.at_level(logging.WARNING, "patrickstar"):
        session.close()
    assert is_ordinary(model)
    fit = slots > 2 * LAYERS
    assert all((parameter.grad is not None) is fit for parameter in model.parameters())
    assert ("the gradients do not fit" in caplog.text) is not fit


def test_no_more_slots_hold_pages_than_the_budget_has_room_for(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of slots do not always fit where single ones were, and activations want room that slots have had."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes = [WIDTH, 64, 64, WIDTH, WIDTH, 64, WIDTH]
        return nn.Sequential(*(nn.Linear(n, m) for n, m in zip(sizes, sizes[1:], strict=False)))

    pair = make_pair(build, device="cpu", host_memory=14 * SLOT, disk=tmp_path / "disk")
    store: ChunkStore = store_of(pair.session)
    (arena,) = store.units.arenas.values()
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(arena.committed_slots - store.units.limit_slots)

    def do(self: ChunkStore, action: Action, *rest: Any) -> None:
        unwatched(self, action, *rest)
        if isinstance(action, Issue) and (action.src is None or action.work.tier is Tier.HOST):
            look()  # its slots are about to be written

    unwatched = ChunkStore._do
    monkeypatch.setattr(ChunkStore, "_do", do)
    for layer in pair.model:
        layer.register_forward_hook(look)
    for number in range(3):
        pair.each(train_step, number, rows=16 * (1 + number))
    monkeypatch.undo()
    pair.expect_same()
    assert max(seen) <= 0, f"{max(seen)} slots too many hold pages"
