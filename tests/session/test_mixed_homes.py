"""Model data that no tier could hold alone: homes on several tiers, with the bits of plain PyTorch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import patrickstar
from patrickstar import BudgetError
from patrickstar.core.machine import Tier
from patrickstar.session.forecast import forecast
from tests.session.builders import (
    LAYERS,
    SLOT,
    TIGHT,
    MakePair,
    Pair,
    WithLoss,
    adamw,
    batch,
    expect_bits,
    mlp,
    options,
    step_with_loss,
    store_of,
)


def homes(pair: Pair) -> dict[str, int]:
    """Units by the tier they rest on."""
    return dict(Counter(tier.label for tier in store_of(pair.session).state.home.values()))


@pytest.mark.parametrize(("step", "planes"), [("in_backward", 3), ("deferred", 4)])
def test_what_a_parameter_takes_trains_with_two_thirds_of_it_on_each_of_two_tiers(
    step: str, planes: int, make_pair: MakePair
) -> None:
    host = device = planes * LAYERS * SLOT * 2 // 3
    pair = make_pair(step=step, device="emulated", device_memory=device, host_memory=host)
    pair.train(4)
    found = homes(pair)
    assert found["device"] > 0 < found["host"]
    stats = pair.session.stats()
    assert stats.planned_steps == 4, stats.reason
    assert stats.peak["device"] <= device
    assert stats.peak["host"] <= host
    assert sum(stats.moved.values()) > 0
    pair.expect_same()


def test_a_disk_that_is_too_small_holds_what_it_can(make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(device="cpu", host_memory=20 * SLOT, disk=tmp_path, disk_memory=12 * SLOT)
    pair.train(3)
    assert homes(pair) == {"host": 12, "disk": 12}
    assert pair.session.stats().planned_steps == 3
    pair.expect_same()


def test_three_tiers_hold_what_two_could_not(make_pair: MakePair, tmp_path: Path) -> None:
    budgets = {"device_memory": 14 * SLOT, "host_memory": 8 * SLOT, "disk_memory": 9 * SLOT}
    pair = make_pair(device="emulated", disk=tmp_path, **budgets)
    pair.train(3)
    assert homes(pair) == {"device": 8, "host": 7, "disk": 9}  # and a slot of the host for what passes through it
    stats = pair.session.stats()
    assert all(stats.peak[name.partition("_")[0]] <= nbytes for name, nbytes in budgets.items())
    pair.expect_same()


def test_values_are_read_and_set_wherever_they_rest(make_pair: MakePair) -> None:
    pair = make_pair(device="emulated", device_memory=12 * SLOT, host_memory=16 * SLOT)
    pair.train(2)
    pair.expect_same()
    for weights in (pair.session.state_dict(), pair.plain.state_dict()):
        assert len(weights) == 2 * LAYERS
    torch.manual_seed(5)
    new = {name: torch.randn_like(value) for name, value in pair.plain.state_dict().items()}
    pair.plain.load_state_dict(new)
    pair.model.load_state_dict(new)
    pair.train(2, first=2)
    pair.expect_same()


def test_as_little_as_can_be_rests_where_it_computes(make_pair: MakePair) -> None:
    for host, here in ((24, 0), (23, 1), (20, 4)):
        pair = make_pair(device="emulated", device_memory=TIGHT + 4 * SLOT, host_memory=host * SLOT)
        assert homes(pair).get("device", 0) == here
        on_device = {ref.plane for ref, tier in store_of(pair.session).state.home.items() if tier is Tier.DEVICE}
        assert on_device <= {"weight"}
        pair.train(1)
        pair.expect_same()
        pair.session.close()


def test_what_no_tiers_hold_together_is_refused_by_the_tier_below(make_pair: MakePair) -> None:
    with pytest.raises(BudgetError, match=r"host memory is .* short for the model states kept there") as refusal:
        make_pair(device="emulated", device_memory=TIGHT, host_memory=16 * SLOT)
    assert refusal.value.smallest_bytes == 24 * SLOT
    assert isinstance(mlp()[0].weight, torch.nn.Parameter)


@pytest.mark.parametrize("device", [40 * SLOT, SLOT // 2])
def test_a_host_through_which_no_unit_passes_is_refused_with_what_would_do(device: int, tmp_path: Path) -> None:
    """The smallest budgets are each with the other as it is, where that is enough; else both are needed."""
    below = {"device": "emulated", "precision": "fp32", "disk": tmp_path, "disk_memory": "1MiB", "options": options()}
    found = forecast(WithLoss(), {"x": batch()}, device_memory=device, host_memory=SLOT - 1, **below)
    assert not found.fits
    assert "staging of one unit" in found.refusal
    assert ("and device_memory >= " in found.refusal) is (device < SLOT)
    assert found.minimum["host"] == SLOT
    for less, fits in ((0, True), (1, False)):
        given = {"device_memory": found.minimum["device"] - less, "host_memory": SLOT, **below}
        assert forecast(WithLoss(), {"x": batch()}, **given).fits is fits
    model = WithLoss()
    budgets = {"device_memory": found.minimum["device"], "host_memory": SLOT}
    with patrickstar.manage(model, adamw(model), **budgets, **below) as session:
        for number in range(2):
            step_with_loss(model, session.optimizer, number)
        assert session.stats().peak["host"] <= SLOT


@pytest.mark.parametrize("disk", [False, True])
def test_reading_and_saving_bring_nothing_to_the_device(disk: bool, make_pair: MakePair, tmp_path: Path) -> None:
    below = {"disk": tmp_path / "disk", "host_memory": 12 * SLOT} if disk else {}
    pair = make_pair(device="emulated", device_memory=TIGHT, **below)
    pair.train(2)
    pair.session.state_dict()["0.weight"]  # so that no update is pending
    before = pair.session.stats().moved
    values = {name: value.clone() for name, value in pair.session.state_dict().items()}
    pair.session.save_checkpoint(tmp_path / "saved")
    after = pair.session.stats().moved
    assert (after["H>D"], after["D>H"]) == (before["H>D"], before["D>H"])
    pair.train(1, first=2)
    pair.session.state_dict()["0.weight"]
    before = pair.session.stats().moved
    pair.session.load_checkpoint(tmp_path / "saved")
    after = pair.session.stats().moved
    assert after["H>D"] == before["H>D"]
    expect_bits(values, dict(pair.session.state_dict()))
