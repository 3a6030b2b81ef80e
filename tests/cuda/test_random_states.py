"""Random numbers that are drawn on a device go on where a checkpoint left them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from patrickstar.checkpoint import rng
from patrickstar.errors import CheckpointError
from tests.cuda.schedules import Accelerator
from tests.cuda.twins import WIDTH, Twins, batch, step, twins

DEVICE = torch.device("cuda", 0)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))])


def weights_after(pair: Twins, steps: range) -> dict[str, Tensor]:
    for number in steps:
        step(pair.model, pair.session, batch(number))
    return {name: tensor.clone() for name, tensor in pair.session.state_dict().items()}


def test_a_resumed_session_draws_what_would_have_come(accelerator: Accelerator, tmp_path: Path) -> None:
    torch.cuda.manual_seed(5)
    with twins(dropping) as pair:
        weights_after(pair, range(2))
        pair.session.save_checkpoint(tmp_path)
        wanted = weights_after(pair, range(2, 4))
    torch.cuda.manual_seed(9)
    with twins(dropping) as pair:
        pair.session.load_checkpoint(tmp_path)
        found = weights_after(pair, range(2, 4))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_capturing_draws_nothing() -> None:
    before = torch.cuda.get_rng_state()
    tree = rng.capture(DEVICE)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(tree["device"], before)


def test_what_is_no_state_changes_nothing() -> None:
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    tree = {**rng.capture(DEVICE), "device": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"^rng: "):
        rng.restore(tree, DEVICE)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


def test_where_nothing_is_drawn_on_a_device_its_state_is_left_and_said(caplog: pytest.LogCaptureFixture) -> None:
    tree = rng.capture(DEVICE)
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        rng.restore(tree)
    assert "state of a device's random numbers" in caplog.text
    assert torch.equal(torch.cuda.get_rng_state(), before)
