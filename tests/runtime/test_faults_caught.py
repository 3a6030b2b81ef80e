"""Promises whose breach would be silent: some bytes are old, lost or counted twice, and nothing else shows it.

Each is the smallest run that tells; `python -m tests.mutants` breaks the library in these places and expects them to fail.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.core.machine import Tier
from patrickstar.memory.store import ChunkStore
from patrickstar.optim.norm import clip_factor
from patrickstar.plan.actions import Action, Copy, Create
from patrickstar.testing.faults import Fails, FaultyIO
from patrickstar.testing.lanes import ManualLane
from tests.parity.compare import same_bits
from tests.runtime.builders import (
    EMULATED,
    MACHINES,
    SLOT,
    TIGHT,
    WIDTH,
    Pair,
    adamw,
    backward,
    batch,
    everything,
    expect_bits,
    loss_of,
    mlp,
    mover_of,
    options,
    train_step,
)

MakePair = Callable[..., Pair]


# Bytes that move


def test_training_has_the_bits_of_plain_pytorch(make_pair: MakePair, machine: dict[str, Any]) -> None:
    pair = make_pair(**machine)
    pair.train(3)
    pair.expect_same()


@pytest.mark.parametrize("kind", ["cpu+disk", "emulated+disk"])
def test_a_transfer_may_end_as_late_as_its_wait(
    kind: str, make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its bytes are not there; what was used before, or given back before, would be others."""
    monkeypatch.setattr("patrickstar.memory.disk.InlineLane", ManualLane)
    pair = make_pair(**MACHINES[kind](tmp_path / "disk"))
    pair.train(2)
    pair.expect_same()


def test_a_full_disk_is_reported_and_nothing_is_lost(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyIO()
    monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: disk)
    pair = make_pair(**MACHINES["cpu+disk"](tmp_path / "disk"))
    pair.train(2)
    disk.faults = (Fails("pwritev", errno.ENOSPC, nth=disk.counts["pwritev"] + 1),)
    with pytest.raises(patrickstar.DeviceError, match=r"offset \d+"):
        loss_of(pair.model)
    pair.train(2, first=2)
    pair.expect_same()


def test_no_more_slots_hold_pages_than_the_budget_has_room_for(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of slots do not always fit where single ones were, and activations want room that slots have had."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes = [WIDTH, 64, 64, WIDTH, WIDTH, 64, WIDTH]
        return nn.Sequential(*(nn.Linear(n, m) for n, m in zip(sizes, sizes[1:], strict=False)))

    pair = make_pair(build, device="cpu", host_memory=14 * SLOT, disk=tmp_path / "disk")
    store: ChunkStore = mover_of(pair.session).store
    (arena,) = store._arenas.values()
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(arena.committed_slots - store.limit_slots)

    def carry_out(self: ChunkStore, action: Action) -> None:
        unwatched(self, action)
        if isinstance(action, Create) or (isinstance(action, Copy) and action.dst is Tier.HOST):
            look()  # its slots are about to be written

    unwatched = ChunkStore.carry_out
    monkeypatch.setattr(ChunkStore, "carry_out", carry_out)
    for layer in pair.model:
        layer.register_forward_hook(look)
    for number in range(3):
        pair.each(train_step, number, rows=16 * (1 + number))
    monkeypatch.undo()
    pair.expect_same()
    assert max(seen) <= 0, f"{max(seen)} slots too many hold pages"


# Views, and changes by hand


def test_a_view_keeps_its_weight_while_others_come_and_go(make_pair: MakePair) -> None:
    class Queried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            row = self.query[3]
            return self.layers(x) * row

    pair = make_pair(Queried, device="emulated", device_memory=TIGHT + SLOT)
    pair.train(3)
    pair.expect_same()


def double(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        model[2].weight.mul_(2)


def double_through_numpy(model: nn.Module, _: Any) -> None:
    memory = model[2].weight.detach().numpy()
    memory *= 2


@pytest.mark.parametrize("change", [double, double_through_numpy])
def test_a_change_by_hand_outlives_eviction(change: Callable[..., None], make_pair: MakePair) -> None:
    pair = make_pair()
    pair.train(1)
    # An evaluation leaves weights behind whose homes hold the same bytes: evicted as they are, they are dropped.
    for model in (pair.plain, pair.model):
        with torch.no_grad():
            model(batch())
    pair.each(change)
    pair.train(2, first=1)
    pair.expect_same()


def test_an_update_between_forward_and_backward_is_an_error_as_in_pytorch(make_pair: MakePair) -> None:
    pair = make_pair(make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=False))
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        backward(model)
        loss = loss_of(model, 1)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# Gradients


def test_gradients_of_negative_zero_stay_negative(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.train(1)
    pair.each(lambda model, _: (model[0].weight * torch.tensor(-0.0)).sum().backward())
    pair.expect_same_gradients()
    (gradient,) = dict(pair.session.gradients()).values()
    assert torch.signbit(gradient).all()


class Skips(nn.Module):
    """Layers of which some are left out, as data might have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.left_out: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.left_out:
                x = layer(x)
        return x


def leave_out(model: Skips, _: Any, *numbers: int) -> None:
    model.left_out = numbers


def test_gradients_add_up_and_are_gone_after_zero_grad(make_pair: MakePair) -> None:
    pair = make_pair(Skips)
    pair.train(1)
    for number in (0, 1):
        pair.each(lambda model, _, number=number: backward(model, number))
    pair.expect_same_gradients()
    pair.each(lambda _, optimizer: optimizer.zero_grad())
    assert not list(pair.session.gradients())
    pair.each(leave_out, 2, 6)
    pair.each(lambda model, _: backward(model, 2))
    pair.expect_same_gradients()
    pair.each(lambda _, optimizer: optimizer.step())
    pair.expect_same()


@pytest.mark.parametrize("read_between", [False, True])
def test_clipping_scales_every_gradient(read_between: bool, make_pair: MakePair) -> None:
    pair = make_pair()
    pair.train(1)
    pair.each(lambda model, _: backward(model, 1))
    factor = clip_factor(1e-3, pair.session.clip_grad_norm_(1e-3))
    assert factor < 1
    for parameter in pair.plain.parameters():
        parameter.grad.mul_(factor)
    if read_between:
        pair.expect_same_gradients()
    pair.each(lambda _, optimizer: optimizer.step())
    pair.expect_same()


# Updates


def test_what_has_no_gradient_is_left_alone_and_counts_its_own_updates(make_pair: MakePair) -> None:
    pair = make_pair(Skips)
    for number, left_out in enumerate([(), (2, 6), (2,), ()]):
        pair.each(leave_out, *left_out)
        pair.each(train_step, number)
    pair.expect_same()


def test_a_step_is_done_as_things_stood_when_it_was_called(make_pair: MakePair) -> None:
    """A scheduler changes the rate right after it, and then the session ends."""
    pair = make_pair()

    def step_and_slow_down(model: nn.Module, optimizer: Any) -> None:
        backward(model)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    pair.each(step_and_slow_down)
    pair.session.close()
    for want, got in zip(pair.plain.parameters(), pair.model.parameters(), strict=True):
        assert same_bits(want, got)


class Recomputes(nn.Module):
    """One block, recomputed three times in graphs of their own, each of which has a gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(layers=3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(self.layers, x, use_reentrant=True)
        return x


def test_an_update_in_backward_waits_for_the_last_recomputation(make_pair: MakePair) -> None:
    pair = make_pair(Recomputes, step="in_backward", **EMULATED)
    pair.train(2)
    pair.expect_same()


class Drops(nn.Module):
    """Draws from all generators in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5) * (1 + random.random() + np.random.random())
        return self.layers(x)


def draws() -> list[Tensor]:
    return [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.random())]


def seed(number: int = 0) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def test_training_draws_the_random_numbers_of_plain_pytorch(make_pair: MakePair) -> None:
    pair = make_pair(Drops)
    losses = []
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        seed()
        losses.append([train_step(model, optimizer, number) for number in range(2)] + draws())
    assert torch.equal(*map(torch.stack, losses))


# Checkpoints


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    runs: list[tuple[dict[str, Tensor], list[Tensor]]] = []
    for resumed in (False, True):
        seed(7)
        model = Drops()
        with patrickstar.manage(model, adamw(model), options=options(), **EMULATED) as session:
            if resumed:
                session.load_checkpoint(tmp_path)
            else:
                for number in range(2):
                    train_step(model, session.optimizer, number)
                session.save_checkpoint(tmp_path)
            losses = [train_step(model, session.optimizer, number) for number in (2, 3)]
            runs.append((everything(session), losses + draws()))
    (want, want_draws), (got, got_draws) = runs
    expect_bits(want, got)
    assert torch.equal(torch.stack(want_draws), torch.stack(got_draws))


def test_a_checkpoint_with_a_flipped_bit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = mlp()
    with patrickstar.manage(model, adamw(model), options=options(), **EMULATED) as session:
        train_step(model, session.optimizer)
        written = session.save_checkpoint(tmp_path)
        train_step(model, session.optimizer, 1)
        held = everything(session)
        shard = max(written.iterdir(), key=lambda path: path.stat().st_size)
        damaged = bytearray(shard.read_bytes())
        damaged[len(damaged) * 3 // 4] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(patrickstar.CheckpointError):
            session.load_checkpoint(tmp_path)
        expect_bits(held, everything(session))
