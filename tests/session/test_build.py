"""A session in two parts: its memory, and what takes steps over that. Each is built alone, and the model stays as it is meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from patrickstar.config.arguments import check_arguments
from patrickstar.core.machine import Tier
from patrickstar.hooks import watch_root
from patrickstar.optim.choose import choose_kernels
from patrickstar.session.adopt import take_over
from patrickstar.session.build import Ground, build_memory, build_step
from patrickstar.session.parts import Parts
from patrickstar.session.start import Setup, set_up
from patrickstar.step.budgets import find_resources
from tests.parity.compare import same_bits
from tests.session.builders import MACHINES, adamw, batch, mlp, options, train, values


def ground(model: nn.Module, machine: str, disk: Path) -> Setup:
    memory = check_arguments(options=options(), **MACHINES[machine](disk))
    named = dict(model.named_parameters())
    return set_up(model, named, memory, find_resources(memory), find_passes=choose_kernels)


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_is_built_alone_and_again_once_it_was_closed(machine: str, tmp_path: Path) -> None:
    model = mlp()
    before, setup = values(model), ground(model, machine, tmp_path)
    found = []
    for _ in range(2):
        store = build_memory(setup)
        found.append(str(store.state.snapshot()))
        assert {*store.state.home.values()} <= {*setup.budgets.machine.budget}
        assert (Tier.DISK in store.state.home.values()) == ("disk" in machine)
        store.close()
        assert not any(tmp_path.iterdir())
    assert found[0] == found[1]
    assert all(same_bits(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("machine", MACHINES)
def test_what_takes_steps_is_built_over_a_memory_that_is_there(machine: str, tmp_path: Path) -> None:
    model, plain = mlp(), mlp()
    optimizer = adamw(model)
    setup = ground(model, machine, tmp_path)
    build_memory(setup).close()
    store = build_memory(setup)
    named = dict(model.named_parameters())
    parts = build_step(Ground(model=model, named=named, optimizer=optimizer, setup=setup), setup, store)
    assert parts.executor.store is store
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not any(module._forward_pre_hooks for module in model.modules())

    take_over(parts, None, optimizer)
    root = watch_root(model, parts.events)
    train_alone(parts, steps=3)
    train(plain, adamw(plain), steps=3)
    assert any(store.ledger.moved.values())
    for name, parameter in plain.named_parameters():
        assert same_bits(parts.weights.read(name), parameter.detach())
    root.close()
    parts.stretches.end()
    parts.binding.release(lambda bound: parts.weights.read(bound.name))
    store.close()
    assert all(same_bits(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))


def train_alone(parts: Parts, *, steps: int) -> None:
    """Steps without a session, which would only hand them on."""
    for number in range(steps):
        parts.model(batch(number)).square().mean().backward()
        parts.training.step()
        parts.training.zero_grad(set_to_none=True)
    parts.executor.settle()
    assert parts.stretches.counts.planned == steps
