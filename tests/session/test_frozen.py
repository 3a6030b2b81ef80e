"""Frozen parameters: they take their weight's bytes and no more, are never written back, and can be trained after all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import BudgetError
from patrickstar.core.machine import Tier
from patrickstar.plan.actions import is_copy
from tests.memory.stores import keep_log
from tests.parity.compare import same_bits
from tests.session import masters
from tests.session.builders import CHUNK, SLOT, TIGHT, WIDTH, Adapted, adamw, batch, finish, managed, mlp, options
from tests.session.masters import Twin, manage, managed_step

KINDS = ("fp32", *masters.KINDS)
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_takes_its_weight_and_no_more(kind: str) -> None:
    model = mlp()
    model.requires_grad_(False)
    model.append(nn.Linear(WIDTH, 2))
    with manage(model, kind, device="emulated", device_memory="64MiB") as session:
        session.scaler.scale(model(batch()).float().square().mean()).backward()
        session.scaler.step(session.optimizer)
        chunks = {session.layout.slices[name].chunk for name, p in model.named_parameters() if not p.requires_grad}
        trained = session.layout.n_chunks - len(chunks)
        per_trained = 14 if kind.startswith("bf16") else 16
        frozen = len(chunks) * ITEMSIZE[kind.partition("-")[0]]
        assert sum(session.stats().model_data.values()) == CHUNK * (frozen + trained * per_trained)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_take_no_more_than_their_type(kind: str) -> None:
    model, twin = mlp(), Twin(kind)
    kept, _, compute = kind.partition("-")
    given = {} if kind == "fp32" else {"compute": compute or kept}
    with patrickstar.manage(
        model, precision=kept, device="emulated", device_memory=6 * SLOT, options=options(**given)
    ) as session:
        with torch.no_grad():
            assert same_bits(twin.model(batch().to(twin.compute)), model(batch()))
        assert session.stats().model_data == {"weight": ITEMSIZE[kept] * session.layout.n_chunks * CHUNK}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_is_not_written_back(kind: str, tmp_path: Path) -> None:
    model = Adapted()
    memory = {"device": "cpu", "host_memory": (5 if kind == "fp32" else 4) * SLOT + 4096, "disk": tmp_path / "disk"}
    with manage(model, kind, **memory) as session:
        store = keep_log(session._parts.executor.store)
        for number in range(4):
            managed_step(session, model, first=number)
        frozen = {session.layout.slices[name].chunk for name, p in model.named_parameters() if not p.requires_grad}
        moved = [action for action in store.log if is_copy(action) and action.of.chunk in frozen]
    assert any(action.work.tier is Tier.HOST for action in moved)
    # What manage() has put there goes home once; after that there is nothing new.
    written = Counter(action.of for action in moved if action.src is Tier.HOST)
    assert max(written.values(), default=0) <= 1 < Counter(action.of for action in moved).most_common(1)[0][1]


def test_training_it_after_all_is_refused_where_it_does_not_fit() -> None:
    model = mlp(layers=8)
    model.requires_grad_(False)
    model.append(nn.Linear(WIDTH, 2))
    twelve = 12 * SLOT  # eight weights, the last layer's planes, and no more
    with managed(model, device="emulated", device_memory=TIGHT, host_memory=twelve) as session:
        with pytest.raises(BudgetError, match="host memory") as refusal:
            model.requires_grad_(True)
        assert refusal.value.smallest_bytes > twelve
        assert not any(parameter.requires_grad for parameter in model[0].parameters())
        model(batch()).square().mean().backward()
        session.optimizer.step()
        assert session.stats().planned_steps == 1


def test_moments_of_what_is_frozen_now_are_kept(tmp_path: Path) -> None:
    """A layer that was trained before keeps its moments: its training may go on."""
    model = mlp()
    optimizer = adamw(model)
    finish(model(batch()).square().mean(), optimizer)
    want = optimizer.state[model[2].weight]["exp_avg"].clone()
    model[2].requires_grad_(False)
    with patrickstar.manage(model, optimizer, device="emulated", device_memory=TIGHT, options=options()) as session:
        state = session.optimizer.state_dict()
        assert same_bits(state["state"][2]["exp_avg"], want)
        session.save_checkpoint(tmp_path)
    fresh = mlp(4)
    fresh[2].requires_grad_(False)
    with managed(fresh, device="emulated", device_memory=TIGHT) as session:
        session.load_checkpoint(tmp_path)
        state = session.optimizer.state_dict()
        assert same_bits(state["state"][2]["exp_avg"], want)
