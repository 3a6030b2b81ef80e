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
from patrickstar import ConfigError, StateError
from tests.parity.compare import same_bits
from tests.session.builders import EMULATED, MakePair, adamw, backward, managed, mlp, options, train, train_step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, patrickstar.AdamW, patrickstar.Adam])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_accepted_optimizer_has_the_defined_update(make_pair: MakePair, kind: type, weight_decay: float) -> None:
    kinds = iter((getattr(patrickstar, kind.__name__), kind))  # the plain one comes first
    make_pair(make_optimizer=lambda m: next(kinds)(m.parameters(), lr=1e-2, weight_decay=weight_decay)).train_same()


def test_torchs_own_adamw_agrees_to_the_last_place_in_one_step() -> None:
    plain, model = mlp(), mlp()
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with patrickstar.manage(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), options=options(), **EMULATED
    ) as session:
        train_step(plain, oracle)
        train_step(model, session.optimizer)
        state = session.optimizer.state_dict()["state"]
        for number, p in enumerate(plain.parameters()):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert same_bits(oracle.state[p][key], state[number][key])
        for name, p in plain.named_parameters():
            scale = p.detach().abs().clamp(min=1e-2) * 2.0**-23
            assert ((p.detach() - session.state_dict()[name]).abs() <= 2 * scale).all(), name


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


def test_hyper_parameters_may_be_tensors(make_pair: MakePair) -> None:
    pair = make_pair(make_optimizer=lambda m: patrickstar.AdamW(m.parameters(), lr=torch.tensor(1e-2)))
    pair.train(2)
    for optimizer in (pair.plain_optimizer, pair.original):
        optimizer.param_groups[0]["lr"].fill_(2e-2)
    pair.train_same(1, first=2)


# schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8),  # betas as well
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        milestones=[2],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", ["original before", "original after", "session's"])
@pytest.mark.filterwarnings("error")
def test_schedulers_keep_working_without_a_warning(make_pair: MakePair, name: str, when: str) -> None:
    made: list[Any] = []
    before = (lambda model, optimizer: made.append(SCHEDULERS[name](optimizer))) if when == "original before" else None
    pair = make_pair(before=before)
    if before is None:
        ours = pair.original if when == "original after" else pair.optimizer
        made += [SCHEDULERS[name](optimizer) for optimizer in (pair.plain_optimizer, ours)]
    for number in range(6):
        pair.train(1, first=number)
        for scheduler in made:
            scheduler.step()
    assert made[0].get_last_lr() == made[1].get_last_lr()
    pair.expect_same()


# what it knows already


def test_state_that_there_is_already_is_taken_over(make_pair: MakePair) -> None:
    pair = make_pair(before=lambda model, optimizer: train(model, optimizer, 3))
    assert not pair.original.state
    pair.train_same(2, first=3)


def test_state_of_some_parameters_is_taken_over(make_pair: MakePair) -> None:
    """Counts of updates differ by parameter."""

    def train_a_part(model: nn.Module, optimizer: Any) -> None:
        for p in model[6:].parameters():
            p.requires_grad_(False)
        train(model, optimizer, 2)
        for p in model.parameters():
            p.requires_grad_(True)

    pair = make_pair(before=train_a_part)
    pair.train_same(2, first=2)
    assert {float(entry["step"]) for entry in pair.optimizer.state_dict()["state"].values()} == {2.0, 4.0}


def test_gradients_that_there_are_already_are_taken_over(make_pair: MakePair) -> None:
    pair = make_pair(before=backward)
    pair.expect_same_gradients()
    pair.each(backward, 1)
    pair.step()
    pair.train_same(1, first=2)


def test_gradients_that_there_are_already_are_taken_over_with_in_backward_or_refused() -> None:
    """`in_backward` has one backward a step: what lies there from before is either used, or an error; never lost."""
    plain, model = mlp(), mlp()
    backward(plain)
    backward(model)
    oracle = adamw(plain)
    try:
        session = managed(model, step="in_backward", device="emulated", device_memory="64MiB")
    except (StateError, ConfigError) as refusal:
        assert "gradient" in str(refusal)
        assert model[0].weight.grad is not None
        return
    with session:
        train_step(plain, oracle, 1)
        train_step(model, session.optimizer, 1)
        for name, p in plain.named_parameters():
            assert same_bits(p.detach(), session.state_dict()[name]), name


def test_a_loaded_optimizer_is_taken_over(make_pair: MakePair) -> None:
    trained = mlp()
    optimizer = adamw(trained)
    train(trained, optimizer, 3)

    def load(model: nn.Module, mine: Any) -> None:
        model.load_state_dict(trained.state_dict())
        mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    pair = make_pair(before=load)
    pair.train_same(2, first=3)


# the original's own calls


def test_the_originals_state_dict_is_the_sessions(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.train(2)
    ours, theirs = pair.original.state_dict(), pair.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert all(same_bits(ours["state"][n]["exp_avg"], theirs["state"][n]["exp_avg"]) for n in theirs["state"])


def test_a_post_hook_sees_the_updated_weights(make_pair: MakePair) -> None:
    def look(seen: list[torch.Tensor]) -> Callable[..., None]:
        return lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].detach().clone())

    pair = make_pair()
    want: list[torch.Tensor] = []
    got: list[torch.Tensor] = []
    pair.plain_optimizer.register_step_post_hook(look(want))
    pair.original.register_step_post_hook(look(got))
    pair.train(2)
    assert len(want) == len(got) == 2
    assert all(same_bits(ours, theirs) for ours, theirs in zip(want, got, strict=True))


def test_a_closure_is_called_and_its_loss_given_back(make_pair: MakePair) -> None:
    pair = make_pair()
    for number in range(2):
        pair.same(lambda model, optimizer: optimizer.step(lambda: backward(model, number=number)))
        pair.each(lambda model, optimizer: optimizer.zero_grad())
    pair.expect_same()


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
