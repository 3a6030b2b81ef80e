"""Budgets that are too small: refused before anything has changed, with numbers that hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import BudgetError
from patrickstar.config.arguments import check_arguments
from patrickstar.optim.choose import choose_kernels
from patrickstar.session.forecast import forecast, smallest_budgets
from patrickstar.session.start import set_up
from patrickstar.step.budgets import find_budgets, find_resources
from patrickstar.units import MIB
from tests.session.builders import (
    EMULATED,
    ROOMY,
    SLOT,
    TIGHT,
    WIDTH,
    Layers,
    Pair,
    WithLoss,
    adamw,
    backward,
    batch,
    everything,
    expect_bits,
    finish,
    in_the_smallest,
    is_ordinary,
    managed,
    mlp,
    options,
    step_with_loss,
    train_step,
    values,
)


def limited(tier: str, nbytes: int, disk: Path) -> dict[str, Any]:
    if tier == "device":
        return {"device": "emulated", "device_memory": nbytes}
    return {"device": "cpu", "host_memory": nbytes, "disk": disk}


def least_that_runs(tier: str, disk: Path) -> tuple[int, list[BudgetError]]:
    """Follows the refusals from next to nothing to the budget in which two steps run."""

    def run(nbytes: int) -> int:
        model = WithLoss()
        with managed(model, **limited(tier, nbytes, disk)) as session:
            for number in range(2):
                step_with_loss(model, session.optimizer, number)
            session.stats()
        return nbytes

    return in_the_smallest(run)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_budget_in_which_no_batch_could_fit_is_refused_by_manage(tier: str, tmp_path: Path) -> None:
    model = mlp()
    optimizer = adamw(model)
    before, state = values(model), torch.get_rng_state()
    with pytest.raises(BudgetError) as refusal:
        patrickstar.manage(model, optimizer, options=options(), **limited(tier, 2 * SLOT, tmp_path / "disk"))
    error = refusal.value
    assert error.tier == tier
    assert "step" in error.moment
    assert error.available_bytes == 2 * SLOT
    assert error.needed_bytes == error.smallest_bytes == 4 * SLOT  # weight, gradient and both moments of a chunk
    assert f"{tier}_memory" in str(error)
    assert is_ordinary(model)
    expect_bits(before, values(model))
    assert torch.equal(state, torch.get_rng_state())
    assert not list(tmp_path.rglob("patrickstar-*"))
    train_step(model, optimizer)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_smallest_budget_named_runs_and_nine_tenths_of_it_are_refused_before_the_first_step(
    tier: str, tmp_path: Path
) -> None:
    smallest, refusals = least_that_runs(tier, tmp_path / "disk")
    assert len(refusals) <= 2, "one refusal by manage, one by the first forward; each names what is enough for it"
    model = WithLoss()
    before = values(model)
    session = None
    with pytest.raises(BudgetError) as refusal:
        session = managed(model, **limited(tier, smallest * 9 // 10, tmp_path / "disk"))
        model(batch())
    assert refusal.value.smallest_bytes == smallest
    assert refusal.value.needed_bytes > refusal.value.available_bytes == smallest * 9 // 10
    assert refusal.value.tier == tier
    if session is not None:
        assert session.stats().steps == 0
        expect_bits(before, values(session))
        session.close()
    expect_bits(before, values(model))


def expect_smallest(build: Callable[[], nn.Module], tier: str, **given: Any) -> tuple[int, int, BudgetError]:
    """What a forecast names runs, and a byte less does not; gives it, the peak in it, and the refusal."""

    def run(nbytes: int) -> int:
        model = build()
        with managed(model, **given, **{f"{tier}_memory": nbytes}) as session:
            for number in range(3):
                step_with_loss(model, session.optimizer, number)
            return session.stats().peak[tier]  # type: ignore[no-any-return]

    def foreseen(nbytes: int) -> Any:
        return forecast(build(), {"x": batch()}, options=options(), **given, **{f"{tier}_memory": nbytes})

    smallest = foreseen(4096).minimum[tier]
    assert (foreseen(smallest).fits, foreseen(smallest - 1).fits) == (True, False)
    peak = run(smallest)
    assert peak <= smallest
    with pytest.raises(BudgetError) as refusal:
        run(smallest - 1)
    return smallest, peak, refusal.value


@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_smallest_budget_of_the_host_alone_that_a_forecast_names_runs_and_a_byte_less_does_not(
    precision: str, step: str
) -> None:
    """Moments come with the first update: the second step takes more than the first."""
    smallest, peak, refusal = expect_smallest(WithLoss, "host", device="cpu", precision=precision, step=step)
    assert peak == refusal.smallest_bytes == smallest


def test_from_the_floor_on_the_smallest_budget_holds_the_fixed_costs_and_is_named_as_it_is_to_be_given(
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"device": "cpu", "disk": tmp_path / "disk", "options": options()}
    rows = 1 << 18  # some hundreds of MiB of activations, nothing of which is ever made
    smallest = forecast(WithLoss(), {"x": batch(rows=rows)}, host_memory=4096, **given).minimum["host"]
    assert smallest > 256 * MIB
    assert forecast(WithLoss(), {"x": batch(rows=rows)}, host_memory=smallest, **given).fits
    refused = forecast(WithLoss(), {"x": batch(rows=rows)}, host_memory=smallest - 1, **given)
    assert not refused.fits
    assert "+ fixed costs " in refused.refusal
    model = WithLoss()
    with patrickstar.manage(model, adamw(model), host_memory=280 * MIB, **given) as session:
        assert "host 280.00 MiB" in str(find_budgets(check_arguments(host_memory=280 * MIB, **given), weight_bytes=0))
        with pytest.raises(BudgetError) as refusal:
            model(batch(rows=rows))
        assert session.stats().steps == 0
    error = refusal.value
    assert (error.smallest_bytes, error.needed_bytes, error.available_bytes) == (smallest, smallest, 280 * MIB)
    assert 48 * MIB < error.fixed_bytes <= 48 * MIB + smallest // 100


@pytest.mark.parametrize(("rows", "has_disk"), [(4, False), (1 << 18, True)], ids=["host alone", "with fixed costs"])
def test_the_budget_that_is_named_before_any_is_tried_fits_and_a_byte_less_does_not(
    rows: int, has_disk: bool, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"device": "cpu", "precision": "fp32", "options": options()}
    given |= {"disk": tmp_path / "disk"} if has_disk else {}
    foreseen = lambda nbytes: forecast(WithLoss(), {"x": batch(rows=rows)}, host_memory=nbytes, **given)
    too_little = 280 * MIB if has_disk else 4096
    memory, model = check_arguments(host_memory=too_little, **given), WithLoss()
    named = dict(model.named_parameters())
    setup = set_up(model, named, memory, find_resources(memory), find_passes=choose_kernels)
    smallest = smallest_budgets(setup, foreseen(too_little).traces)["host"]
    assert smallest > too_little
    assert (foreseen(smallest).fits, foreseen(smallest - 1).fits) == (True, False)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_budget_of_what_lies_below_that_is_too_small_names_its_tier(tier: str, tmp_path: Path) -> None:
    below: dict[str, Any] = {"device": "emulated", "device_memory": TIGHT}
    if tier == "disk":
        below = {"device": "cpu", "host_memory": TIGHT + SLOT, "disk": tmp_path / "disk"}
    model = mlp()
    before = values(model)
    with pytest.raises(BudgetError) as refusal:
        managed(model, **below, **{f"{tier}_memory": SLOT})
    assert refusal.value.tier == tier
    assert is_ordinary(model)
    expect_bits(before, values(model))
    smallest = refusal.value.smallest_bytes
    with managed(model, **below, **{f"{tier}_memory": smallest}) as session:
        train_step(model, session.optimizer)
        assert 0 < session.stats().peak[tier] <= smallest


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_forward_too_large_is_refused_before_anything_has_changed_and_the_session_goes_on(
    steps_before: int, mode: Callable[[], Any], make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(WithLoss)
    pair.train(steps_before, by=step_with_loss)
    held, state = everything(pair.session), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(BudgetError) as refusal, mode():
            pair.model(batch(rows=2000))
        error = refusal.value
        assert error.tier == "device"
        assert error.moment.split()[1] in {"forward", "backward"}
        assert error.available_bytes == TIGHT
        assert error.smallest_bytes >= error.needed_bytes > TIGHT
        assert torch.equal(state, torch.get_rng_state())
    expect_bits(held, everything(pair.session))
    planned = pair.session.stats().planned_steps
    pair.train_same(2, first=steps_before, by=step_with_loss)
    assert pair.session.stats().planned_steps == planned + 2


def test_gradients_that_wait_for_their_step_survive_a_refusal(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(WithLoss)
    pair.each(lambda model, _: model(batch(1)).backward())
    with pytest.raises(BudgetError):
        pair.model(batch(rows=400))
    pair.each(lambda model, _: model(batch(2)).backward())
    pair.step()
    pair.expect_same()


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_a_loss_outside_of_the_model_has_room_or_is_refused_before_the_forward(rows: int) -> None:
    """What a forward cannot show is reserved: the arena's bound must not be what finds it out."""
    model = mlp()

    def run(nbytes: int) -> None:
        with managed(model, device="emulated", device_memory=nbytes) as session:
            backward(model, rows=rows)
            session.optimizer.step()
            session.stats()

    _, refusals = in_the_smallest(run)
    assert not any("exceeded" in str(refusal) for refusal in refusals), refusals


def test_the_budget_is_never_exceeded_on_the_emulated_device(pair: Pair) -> None:
    pair.train(3)
    pair.model.eval()
    with torch.no_grad():
        pair.model(batch(rows=5))
    pair.model.train()
    pair.train(2, first=3)
    pair.session.state_dict()["0.weight"]
    list(pair.session.gradients())
    assert 0 < pair.session.stats().peak["device"] <= TIGHT


def test_activations_that_come_and_go_between_two_moves_are_part_of_the_peak() -> None:
    pair = Pair(**ROOMY)
    pair.train(2)
    before, rows = pair.session.stats(), 4096
    with torch.no_grad():
        pair.model(torch.ones(rows, WIDTH))
    after = pair.session.stats()
    assert after.moved == before.moved
    assert after.peak["device"] >= before.peak["device"] + rows * WIDTH * 4


class Swells(Layers):
    """A data-dependent activation: the trial run takes the branch without it."""

    swell = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.swell:
            x = x + torch.zeros(1000, *x.shape).sum(0)
        return self.layers(x).square().mean()


def swell(model: nn.Module) -> BudgetError:
    model.swell = True
    try:
        model(batch(1))
    except BudgetError as refusal:
        return refusal.with_traceback(None)  # whose frames would keep the large tensor
    finally:
        model.swell = False
    raise AssertionError("the arena has grown")


def test_memory_that_a_forecast_did_not_see_is_reported_with_its_moment_and_the_session_goes_on(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(Swells)
    pair.each(step_with_loss, 0)
    held = everything(pair.session)
    for again in (False, True):
        refusal = swell(pair.model)
        assert refusal.tier == "device"
        assert "training step" in refusal.moment
        assert refusal.needed_bytes > refusal.available_bytes
        if again:
            nn.Linear(256, 256)  # the step is over: what is made afterwards is not the session's business
        else:
            expect_bits(held, everything(pair.session))
    pair.train_same(2, first=1, by=step_with_loss)


def test_chunks_leave_for_memory_that_no_forecast_saw(make_pair: Callable[..., Pair]) -> None:
    """A penalty on the weights, made beside the forward: what is only cached goes before anything is refused."""

    def penalised(model: nn.Module, optimizer: Any, number: int) -> torch.Tensor:
        loss = model(batch(number)) + sum(p.square().sum() for p in model.parameters()) * 1e-2
        return finish(loss + nn.functional.linear(batch(number), model.layers[0].weight).mean(), optimizer)

    # Slots of one moment and all that is beside them come to less than half of this; the chunks to twice as much.
    pair = make_pair(WithLoss, device="emulated", device_memory=12 * SLOT)
    pair.train_same(3, by=penalised)


def test_messages_go_through_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    with caplog.at_level(logging.INFO, logger="patrickstar"), managed(model, **EMULATED):
        pass
    assert any("chunks of" in record.getMessage() for record in caplog.records)
    assert {record.name for record in caplog.records} == {"patrickstar"}
