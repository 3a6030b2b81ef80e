"""A session beside others: two in one process, copies of the model, evaluation without an optimizer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import StateError
from patrickstar.tracing.seen_operations import shown_to
from tests.parity.compare import same_bits
from tests.session.builders import (
    EMULATED,
    MACHINES,
    ROOMY,
    MakePair,
    Pair,
    adamw,
    backward,
    batch,
    expect_bits,
    is_ordinary,
    managed,
    mlp,
    options,
    tied,
    train,
    values,
)


def step_both(models: list[nn.Module], optimizers: list[Any], number: int) -> torch.Tensor:
    loss: torch.Tensor = models[1](models[0](batch(number)).relu()).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach().clone()


@pytest.mark.parametrize("machines", [("cpu+disk", "cpu+disk"), ("emulated", "emulated"), ("cpu+disk", "emulated")])
def test_one_backward_runs_through_two_sessions(make_pair: MakePair, tmp_path: Any, machines: tuple[str, str]) -> None:
    pairs = [
        make_pair(lambda seed=seed: mlp(seed), **MACHINES[name](tmp_path / str(seed)))
        for seed, name in enumerate(machines)
    ]
    if machines == ("emulated", "emulated"):  # each sees the other's activations and gradients in passing
        pairs = [make_pair(lambda seed=seed: mlp(seed), **EMULATED | {"device_memory": "128KiB"}) for seed in (0, 1)]
    for number in range(4):
        want = step_both([pair.plain for pair in pairs], [pair.plain_optimizer for pair in pairs], number)
        got = step_both([pair.model for pair in pairs], [pair.optimizer for pair in pairs], number)
        assert same_bits(want, got)
    for pair in pairs:
        pair.expect_same()
        assert pair.session.stats().steps == 4


def test_two_sessions_leave_nothing_behind(make_pair: MakePair) -> None:
    """Each sees all operations, to count live bytes: none may go on with that."""
    pairs = [make_pair(lambda seed=seed: mlp(seed), **ROOMY) for seed in (0, 1)]
    for number in range(3):
        step_both([pair.model for pair in pairs], [pair.optimizer for pair in pairs], number)
        assert len(shown_to()) <= 2
    for pair in pairs:
        pair.session.close()
    assert not shown_to()


def test_closing_one_session_leaves_the_other(make_pair: MakePair) -> None:
    first, second = make_pair(lambda: mlp(0)), make_pair(lambda: mlp(1))
    first.train(1)
    second.train(1)
    first.session.close()
    second.train_same(2, first=1)
    expect_bits(values(first.plain), values(first.model))


def test_one_operation_on_parameters_of_two_sessions(make_pair: MakePair, on_disk: dict[str, Any]) -> None:
    """Each session knows its own; the operation needs the bytes of both."""
    pairs = [make_pair(lambda seed=seed: mlp(seed), **on_disk) for seed in (0, 1)]

    def act(models: list[nn.Module]) -> torch.Tensor:
        loss = nn.functional.linear(batch(), models[0][0].weight, models[1][0].bias).square().mean()
        loss.backward()
        with torch.no_grad():
            models[0][2].weight.copy_(models[1][2].weight)
            models[0][4].weight.lerp_(models[1][4].weight.detach(), 0.5)
        return loss.detach()

    assert same_bits(act([pair.plain for pair in pairs]), act([pair.model for pair in pairs]))
    for pair in pairs:
        pair.expect_same_gradients()
        pair.expect_same()


# copies


def test_a_deep_copy_is_an_ordinary_model(make_pair: MakePair) -> None:
    pair = make_pair(tied)
    pair.each(backward)
    copied = copy.deepcopy(pair.model)
    assert is_ordinary(copied)
    assert copied[8].weight is copied[2].weight
    expect_bits(values(pair.plain), values(copied))
    assert all(p.grad is None for p in copied.parameters()), "as in PyTorch"
    before = pair.session.stats()
    backward(copied)
    assert pair.session.stats().moved == before.moved, "a copy's forward is no event of the session's"
    with torch.no_grad():
        copied[0].weight.zero_()
    pair.step()
    pair.train_same(2, first=1)


def test_a_deep_copy_can_be_managed_itself(trained: Pair) -> None:
    copied = copy.deepcopy(trained.model)
    plain = copy.deepcopy(trained.plain)
    oracle = adamw(plain)
    with managed(copied) as session:
        assert same_bits(train(plain, oracle, 2), train(copied, session.optimizer, 2))
        expect_bits(plain.state_dict(), dict(session.state_dict()))
    trained.train_same(1, first=1)


# without an optimizer


def test_weights_only_are_managed_for_evaluation() -> None:
    plain, model = mlp(), mlp()
    with patrickstar.manage(model, options=options(), device="emulated", device_memory="28KiB") as session:
        assert session.optimizer is None
        for number, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
            with mode():
                assert same_bits(plain(batch(number)), model(batch(number)))
        stats = session.stats()
        assert stats.moved["H>D"] > 0
        assert set(stats.model_data) == {"weight"}
        assert stats.bytes_per_parameter < 8
        assert stats.steps == 0
        for call in (lambda: list(session.gradients()), lambda: session.clip_grad_norm_(1.0)):
            with pytest.raises(StateError, match="pass an optimizer"):
                call()
    expect_bits(values(plain), values(model))


@pytest.mark.parametrize(("trained", "memory"), [(True, "96KiB"), (False, "36KiB")])
def test_without_an_optimizer_gradients_are_pytorchs_own(trained: bool, memory: str) -> None:
    """Of parameters, if they are trained, and of inputs."""
    found = []
    for under in (False, True):
        model, x = mlp().requires_grad_(trained), batch().requires_grad_()
        budget = {"device": "emulated", "device_memory": memory}
        with patrickstar.manage(model, options=options(), **budget) if under else nullcontext() as session:
            for _ in range(2):
                model(x).square().mean().backward()
            grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
            found.append({str(number): grad.clone() for number, grad in enumerate(grads)})
            assert session is None or not trained or session.plan is not None
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
    expect_bits(*found)
    assert (len(found[0]) > 1) is trained


def test_a_checkpoint_of_weights_only(tmp_path: Any) -> None:
    model, other = mlp(), mlp(1)
    with patrickstar.manage(model, options=options(), device="emulated", device_memory="64KiB") as session:
        session.save_checkpoint(tmp_path)
    with patrickstar.manage(other, options=options(), device="emulated", device_memory="64KiB") as session:
        session.load_checkpoint(tmp_path)
    expect_bits(values(model), values(other))
