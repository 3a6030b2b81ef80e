"""`session.scaler`: which steps are skipped, what the scale becomes, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import LossScale, StateError
from tests.parity.compare import compare_mappings
from tests.session.builders import TIGHT, adamw, batch, mlp, options, values
from tests.session.masters import Twin

SCALE = LossScale(initial=2.0**10, window=2, hysteresis=1)


def manage(model: nn.Module, scale: LossScale = SCALE, **keywords: Any) -> patrickstar.Session:
    return patrickstar.manage(
        model,
        adamw(model),
        precision="fp16",
        device="emulated",
        device_memory=TIGHT,
        options=options(compute="fp16", loss_scale=scale),
        **keywords,
    )


def step(session: Any, model: nn.Module, number: int, *, times: float = 1.0, clip: float | None = None) -> None:
    """One step; `times`: what the loss is multiplied with before it is scaled."""
    loss = model(batch(number)).float().square().mean() * times
    session.scaler.scale(loss).backward()
    if clip is not None:
        session.scaler.unscale_(session.optimizer)
        session.clip_grad_norm_(clip)
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad()


class ByHand(Twin):
    """fp16 weights, fp32 masters and torch's own scaler, which is told when to grow and back off."""

    def __init__(self) -> None:
        super().__init__("fp16")
        self.scale, self.good = SCALE.initial, 0

    def step(self, number: int, *, times: float = 1.0, clip: float | None = None) -> None:
        self.backward_of(self.model(batch(number).half()).float().square().mean() * times)
        finite = all(bool(torch.isfinite(p.grad).all()) for p in self.masters.parameters())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.masters.parameters(), clip)
        if finite:
            self.update()
            self.good += 1
            if self.good % SCALE.window == 0:
                self.scale *= 2
        else:
            self.good = 0
            self.scale /= 2
        self.optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 1e3])
def test_injected_overflows_skip_the_same_steps_with_the_same_bits(clip: float | None) -> None:
    """A clip norm that is never reached multiplies by one: torch's norm and ours round differently."""
    model, by_hand = mlp(), ByHand()
    injected = {2: 1e9, 5: float("inf"), 6: float("nan")}
    with manage(model) as session:
        scales = []
        for number in range(12):
            times = injected.get(number, 1.0)
            step(session, model, number, times=times, clip=clip)
            by_hand.step(number, times=times, clip=clip)
            scales.append(session.scaler.get_scale())
            assert scales[-1] == by_hand.scale
        assert min(scales) < SCALE.initial < max(scales)
        assert not compare_mappings("master", dict(by_hand.masters.state_dict()), dict(session.state_dict()))
        assert session.optimizer is not None
        counts = {int(kept["step"]) for kept in session.optimizer.state_dict()["state"].values()}
        assert counts == {12 - len(injected)}


def test_calls_out_of_order_are_refused() -> None:
    model = mlp()
    with manage(model) as session:
        with pytest.raises(StateError, match=r"update\(\) without step"):
            session.scaler.update()
        session.scaler.scale(model(batch()).float().square().mean()).backward()
        session.scaler.unscale_(session.optimizer)
        with pytest.raises(StateError, match="unscale_"):
            session.scaler.unscale_(session.optimizer)
        session.scaler.step(session.optimizer)
        with pytest.raises(StateError, match="since the last update"):
            session.scaler.step(session.optimizer)
        with pytest.raises(StateError, match="since the last update"):
            session.scaler.unscale_(session.optimizer)
        session.scaler.update()
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(StateError, match="steps session.optimizer alone"):
            session.scaler.step(other)
        with pytest.raises(StateError, match="no closure"):
            session.scaler.step(session.optimizer, lambda: 0.0)


def test_a_scale_that_never_recovers_says_so_and_names_the_first_tensor() -> None:
    model = mlp()
    with manage(model, LossScale(initial=4.0, hysteresis=2, minimum=1.0)) as session:
        for number in range(3):
            step(session, model, number, times=float("inf"))
        assert session.scaler.get_scale() == 1.0
        with pytest.raises(StateError, match=r"smallest it may be; the first that did was that of 10\.(weight|bias)"):
            step(session, model, 3, times=float("inf"))
        session.optimizer.zero_grad()
        step(session, model, 4)


def test_a_skipped_step_is_told_with_the_first_tensor(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with manage(model) as session, caplog.at_level(logging.INFO, "patrickstar"):
        step(session, model, 0, times=float("inf"))
    assert any(
        "a step was skipped: gradients overflowed at loss scale 1024, the first was that of 10." in r.getMessage()
        for r in caplog.records
    )


def test_a_gradient_of_ones_own_that_overflows_skips_too() -> None:
    model = mlp()
    with manage(model) as session:
        before = values(session)
        session.scaler.scale(model(batch()).float().square().mean()).backward()
        model[4].weight.grad = torch.full((32, 32), float("inf"), dtype=torch.float16)
        session.scaler.step(session.optimizer)
        session.scaler.update()
        assert session.scaler.get_scale() == SCALE.initial / 2
        assert not compare_mappings("weight", before, dict(session.state_dict()))


def test_an_overflow_that_was_let_go_does_not_count() -> None:
    model = mlp()
    with manage(model) as session:
        session.scaler.scale(model(batch()).float().square().mean() * float("inf")).backward()
        session.optimizer.zero_grad()
        step(session, model, 1)
        assert session.scaler.get_scale() == SCALE.initial
        assert session.stats().steps == 1


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    model, other = mlp(), mlp(3)
    with manage(model) as session:
        for number, times in enumerate([1.0, float("inf"), 1.0]):
            step(session, model, number, times=times)
        session.save_checkpoint(tmp_path)
        state = session.scaler.state_dict()
        assert state["scale"] == SCALE.initial / 2
    with manage(other) as session:
        session.load_checkpoint(tmp_path)
        assert session.scaler.state_dict() == state


def test_a_state_of_torchs_scaler_is_taken() -> None:
    model = mlp()
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0)
    theirs.scale(torch.ones(()))
    with manage(model) as session:
        session.scaler.load_state_dict(theirs.state_dict())
        assert session.scaler.get_scale() == 64.0
        assert set(theirs.state_dict()) < set(session.scaler.state_dict())
        assert isinstance(session.scaler, torch.amp.GradScaler)
        session.scaler.update(new_scale=32.0)
        assert session.scaler.get_scale() == 32.0
