"""Promises whose breach would be silent: some bytes are old, lost or counted twice, and nothing else shows it.

`python -m tests.mutants` breaks the library in these places, and in those of other tests, and expects them to fail.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.core.machine import Tier
from patrickstar.memory.store import ChunkStore
from patrickstar.plan.actions import Action, Issue
from tests.forked import in_forked_child
from tests.parity.compare import same_bits
from tests.session.builders import MACHINES, ROOMY, SLOT, TIGHT, WIDTH, MakePair, batch, mlp, store_of, train_step


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
    (arena,) = store.units._arenas.values()
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


def test_a_view_that_is_kept_over_steps_keeps_its_weight(make_pair: MakePair) -> None:
    pair = make_pair(device="emulated", device_memory=TIGHT + SLOT)
    pair.train(1)
    want, got = (model[6].weight.detach()[3] for model in (pair.plain, pair.model))
    pair.train(2, first=1)
    assert same_bits(want, got.clone())
    pair.expect_same()


def test_a_gradient_of_negative_zero_stays_negative(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.train(1)
    pair.each(lambda model, _: (model[0].weight * torch.tensor(-0.0)).sum().backward())
    pair.expect_same_gradients()
    (gradient,) = dict(pair.session.gradients()).values()
    assert torch.signbit(gradient).all()


class Recomputes(nn.Module):
    """One block, recomputed three times in graphs of their own, each of which has a gradient for it."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.layers = mlp(layers=3)
        self.head = nn.Linear(WIDTH, WIDTH) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(3):
            x = checkpoint(self.layers, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("head", [True, False], ids=["with a head", "all of it"])
def test_an_update_in_backward_waits_for_the_last_recomputation(
    head: bool, make_pair: MakePair, tmp_path: Path
) -> None:
    pair = make_pair(lambda: Recomputes(head=head), step="in_backward", **MACHINES["cpu+disk"](tmp_path / "disk"))
    pair.train_same(2)


@pytest.mark.parametrize("is_updated", [False, True], ids=["before its update", "after its update"])
def test_a_forked_child_is_given_no_slot(is_updated: bool, make_pair: MakePair) -> None:
    """Its parent goes on moving and writing them."""
    pair = make_pair(**ROOMY)
    pair.train(2)  # so that slots have been wrapped before
    if is_updated:
        with torch.no_grad():
            pair.model(batch())

    def use() -> str:
        with pytest.raises(patrickstar.StateError) as refusal:
            pair.model(torch.ones(1, WIDTH))
        return str(refusal.value)

    assert f"belongs to process {os.getpid()}" in in_forked_child(use)
    pair.train(1, first=2)
