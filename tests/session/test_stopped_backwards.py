"""Updates that are certainly under way when a backward stops half way, also where the host computes: nothing is half done, whoever looks next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar import StateError
from patrickstar.core.machine import Tier
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.testing.manual_lane import ManualLane
from tests.forked import in_forked_child
from tests.session.builders import (
    MACHINES,
    SLOT,
    MakePair,
    Pair,
    assert_same,
    batch,
    expect_bits,
    machine_with,
    store_of,
)
from tests.session.test_exceptions import Fragile, trip_in_backward

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("disarmed")]

ROOM = 8 * SLOT
"""Bytes of the tier that computes: every chunk can be updated whole, and must move."""
WHERE = {"on the device": UpdateChoice(tier=lambda chunk: Tier.DEVICE), "as planned": None}


@pytest.fixture(params=["cpu", *MACHINES])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    nbytes = ROOM + SLOT * (request.param == "cpu+disk")
    return {"device": "cpu"} if request.param == "cpu" else machine_with(request.param, nbytes, tmp_path / "disk")


@pytest.fixture(params=WHERE)
def stopped(request: pytest.FixtureRequest, machine: dict[str, Any], make_pair: MakePair, tmp_path: Path) -> Pair:
    """A pair whose backward was stopped by the user's code. Updates that it has begun and not waited for have not been done.

    There is a checkpoint of the step before. Plain PyTorch has updated what had a gradient by then.
    """
    pair = make_pair(
        Fragile,
        step="in_backward",
        make_lane=lambda src, dst: ManualLane(),
        choice=WHERE[request.param],
        **machine,
    )
    pair.train(2)
    pair.session.save_checkpoint(tmp_path / "saved")
    torch.save({"model": pair.plain.state_dict(), "optimizer": pair.plain_optimizer.state_dict()}, tmp_path / "plain")
    pair.each(trip_in_backward)
    assert store_of(pair.session).state.updates
    pair.plain_optimizer.step()
    return pair


def test_whoever_reads_finds_the_updates_of_what_has_come(stopped: Pair) -> None:
    expect_bits(dict(stopped.plain.state_dict()), dict(stopped.session.state_dict()))
    assert not store_of(stopped.session).state.updates


def test_close_gives_back_weights_that_are_wholly_updated(stopped: Pair) -> None:
    stopped.session.close()
    for want, got in zip(stopped.plain.parameters(), stopped.model.parameters(), strict=True):
        assert want.equal(got)


def test_training_goes_on_from_a_checkpoint(stopped: Pair, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="load_checkpoint"):
        stopped.model(batch())
    stopped.session.load_checkpoint(tmp_path / "saved")
    assert not store_of(stopped.session).state.updates
    _restore_plain(stopped, tmp_path / "plain")
    stopped.train(2, first=2)
    assert_same(stopped.plain, stopped.plain_optimizer, stopped.session)


def test_a_forked_child_neither_waits_for_its_parents_updates_nor_does_them(stopped: Pair) -> None:
    def use() -> str:
        try:
            dict(stopped.session.state_dict())
        except StateError as error:
            return str(error)
        return "it was used"

    assert f"belongs to process {os.getpid()}" in in_forked_child(use)
    assert store_of(stopped.session).state.updates
    expect_bits(dict(stopped.plain.state_dict()), dict(stopped.session.state_dict()))


def _restore_plain(pair: Pair, saved: Path) -> None:
    """Plain PyTorch as it was before the backward that was stopped."""
    state = torch.load(saved)
    pair.plain.load_state_dict(state["model"])
    pair.plain_optimizer.load_state_dict(state["optimizer"])
    pair.plain_optimizer.zero_grad()
