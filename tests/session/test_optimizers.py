"""The optimizer passed in and the one handed out: groups, schedulers, state, hooks, freezing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import patrickstar
from tests.parity.compare import same_bits
from tests.session.builders import MakePair, adamw, mlp, options, train


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, patrickstar.AdamW, patrickstar.Adam])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_accepted_optimizer_has_the_defined_update(make_pair: MakePair, kind: type, weight_decay: float) -> None:
    kinds = iter((getattr(patrickstar, kind.__name__), kind))  # the plain one comes first
    make_pair(make_optimizer=lambda m: next(kinds)(m.parameters(), lr=1e-2, weight_decay=weight_decay)).train_same()


def by_matrix(model: nn.Module) -> Any:
    """Two groups in another order than the model's; biases without decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return patrickstar.AdamW(
        [{"params": others, "weight_decay": 0.0, "betas": (0.5, 0.9)}, {"params": matrices, "lr": 3e-2}], lr=1e-2
    )


def test_groups_have_hyper_parameters_of_their_own(make_pair: MakePair) -> None:
    pair = make_pair(make_optimizer=by_matrix)
    pair.train(3)
    for optimizer in (pair.plain_optimizer, pair.original):
        optimizer.param_groups[0]["eps"] = 1e-4
        optimizer.param_groups[1]["weight_decay"] = 0.5
    pair.train_same(2, first=3)


# what it knows already


def train_a_part(model: nn.Module, optimizer: Any) -> None:
    """Counts of updates differ by parameter."""
    model[6:].requires_grad_(False)
    train(model, optimizer, 2)
    model.requires_grad_(True)
    train(model, optimizer, 1)


def load(model: nn.Module, optimizer: Any) -> None:
    trained = mlp()
    other = adamw(trained)
    train(trained, other, 3)
    model.load_state_dict(trained.state_dict())
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


@pytest.mark.parametrize("before", [train_a_part, load])
def test_state_that_there_is_already_is_taken_over(make_pair: MakePair, before: Callable[..., None]) -> None:
    pair = make_pair(before=before)
    assert not pair.original.state
    pair.train_same(2, first=3)


# the original's own calls


# groups and freezing


def test_a_group_can_be_added(make_pair: MakePair) -> None:
    pair = make_pair(make_optimizer=lambda m: patrickstar.AdamW(m[6:].parameters(), lr=1e-2))
    pair.train(2)
    scheduler = lr_scheduler.StepLR(pair.original, 1, gamma=0.5)
    plain_scheduler = lr_scheduler.StepLR(pair.plain_optimizer, 1, gamma=0.5)
    pair.plain.zero_grad()
    pair.model.zero_grad()
    pair.each(lambda model, optimizer: optimizer.add_param_group({"params": list(model[:4].parameters()), "lr": 5e-2}))
    pair.train(2, first=2)
    scheduler.step()
    plain_scheduler.step()
    pair.train_same(1, first=4)
    assert len(pair.original.param_groups) == 2


def test_after_close_the_original_goes_on_where_the_session_stopped(make_pair: MakePair) -> None:
    pair = make_pair(make_optimizer=adamw)
    pair.train(3)
    pair.session.close()
    want = train(pair.plain, pair.plain_optimizer, 2, first=3)
    got = train(pair.model, pair.original, 2, first=3)
    assert same_bits(want, got)
    for (name, p), q in zip(pair.plain.named_parameters(), pair.model.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), name


def test_state_that_does_not_fit_at_close_is_missed_only_where_the_optimizer_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp(layers=12)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    original = adamw(model)
    with patrickstar.manage(
        model, original, device="cpu", precision="fp32", host_memory=2 * weights, disk=tmp_path, options=options()
    ) as session:
        train(model, session.optimizer, 2)
        caplog.clear()
    assert not original.state
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    for _ in range(2):
        train(model, original, 1)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "has no state: it did not fit" in warning
    assert "save_checkpoint" in warning
