"""What a session does, beside what a forecast says: the plans and bytes of its first step, and of the one that repeats itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import patrickstar
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.forecast import Forecast, forecast
from patrickstar.session.manage import assemble
from tests.composed import Composed
from tests.parity.lanes import choice_of, dealt, depth_of, lanes_for, shows_choice
from tests.parity.managed import Limits, arguments_of
from tests.parity.matrix import Row
from tests.parity.oracle import on
from tests.parity.zoo import CASES, Batch, Case

SETTLED = 14
"""Steps after which plans repeat themselves, one by one or in turns."""
TURNS = 4
TRIES = 4  # of budgets that a forecast has named: each names those of its own tiers


@dataclass(frozen=True)
class Step:
    """The plans that a step follows, and the bytes that it moves by link."""

    plans: list[str]
    moved: Mapping[str, int]


def steps_of(session: Any, train: Callable[[], object]) -> list[Step]:
    """The first steps of a session."""
    pilot, steps, plans = session._parts.executor.pilot, list[Step](), list[str]()
    begin = pilot.begin

    def noted(stretch: Any) -> None:
        if stretch.plan is not None:
            plans.append(without_machine(stretch.plan))
        begin(stretch)

    pilot.begin = noted
    for _ in range(SETTLED):
        before = session.stats().moved
        train()
        moved = {link: nbytes - before[link] for link, nbytes in session.stats().moved.items()}
        steps.append(Step(list(plans), moved))
        plans.clear()
    assert session.stats().planned_steps == SETTLED, session.stats()
    return steps


def expect_forecast(found: Forecast, session: Any, steps: list[Step]) -> None:
    """Fails where the forecast says something else. Where it computes a session counts what is there: a loss takes less than is left for it."""
    assert [without_machine(plan) for plan in found.first_plans] == steps[0].plans
    last = [without_machine(plan) for plan in found.plans]
    alike = [step for step in steps[-TURNS:] if step.plans == last]
    assert alike, f"no plans of the last {TURNS} steps are those of the forecast: {last}, {steps[-1].plans}"
    assert dict(alike[-1].moved) == {**dict.fromkeys(alike[-1].moved, 0), **found.moved}
    peak, compute = dict(session.stats().peak), found.plans[0].machine.compute.label
    assert peak.pop(compute) <= found.budget[compute]
    assert peak == {tier: found.peak.get(tier, 0) for tier in peak}


def without_machine(plan: object) -> str:
    """The text of a plan, but for what was free on this machine just then."""
    return "\n".join(line for line in str(plan).splitlines() if not line.startswith("machine "))


def compare(row: Row, limits: Limits, directory: Path, *, device: str = "cpu") -> None:
    """Trains the row's model in an ordinary loop, a backward a step and a scale that stays, and holds it against its forecast.

    Where that does not fit, in the budgets that it names.
    """
    case, limits = CASES[row.model], dict(limits)
    batch = on(device, case.batches(seed=0, count=1)[0])
    # Updates in a backward have no choice.
    choice = choice_of(row) if shows_choice(row, dealt(row).choice) else UpdateChoice()
    inputs = inputs_of(case, case.build(row.checkpointing), batch)
    for _ in range(TRIES):
        arguments = arguments_of(replace(row, accumulation=1), limits, directory, device=device, prefetch=depth_of(row))
        arguments["options"] = replace(
            arguments["options"], loss_scale=patrickstar.LossScale(initial=1.0, dynamic=False)
        )
        found = forecast(case.build(row.checkpointing).to(device), inputs, choice=choice, **arguments)
        if found.refused is None:
            break
        tier = found.refused.tier
        assert found.refused.smallest_bytes > limits[tier]
        limits[tier] = found.refused.smallest_bytes
    assert found.fits, f"{row} is refused at {limits}, which forecasts have named: {found.refusal}"
    model, lanes = case.build(row.checkpointing), lanes_for(row) if device == "cpu" else None
    optimizer: Any = getattr(torch.optim, case.algorithm)(case.groups(model), lr=1.0)
    with assemble(model, optimizer, make_lane=lanes, choice=choice, **arguments) as session:
        optimizer = session.optimizer

        def train() -> None:
            torch.manual_seed(0)
            session.scaler.scale(case.loss_of(model, batch)).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
            optimizer.zero_grad()
            if choice.apart:  # else they belong to the next step
                session._parts.executor.settle()

        expect_forecast(found, session, steps_of(session, train))


class _CalledError(Exception):
    """A forward that is not to run."""


def inputs_of(case: Case, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The inputs of the case's forward, by name."""
    found: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        forward = partial(module.run, module) if isinstance(module, Composed) else module.forward
        found.update(inspect.signature(forward).bind_partial(*args).arguments, **keywords)
        raise _CalledError

    model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        case.loss_of(model, batch)
    except _CalledError:
        return found
    raise AssertionError(f"{case.name} has no forward")
