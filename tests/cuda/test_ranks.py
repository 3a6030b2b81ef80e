"""Ranks whose models compute on a device: plain PyTorch's bits on it, and no race, whatever has run by when.

NCCL is not here: data go through the host. All ranks use the one device of their process.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.schedules import FEW_SCHEDULES
from tests.parity.managed import Limits
from tests.parity.matrix import Row
from tests.parity.test_worlds import Outcome, assert_moved, assert_parity, in_its_budget, train
from tests.ranks import Teams


def on_device(act: Any, rank: int, schedule: tuple[float, int], *arguments: Any, **keywords: Any) -> Any:
    """What a rank does on its device, under a schedule; it leaves no race."""
    from tests.accelerator.cuda import ACCELERATOR, DRIVER  # before torch, or not at all

    from patrickstar.memory import driver

    driver._driver = lambda: DRIVER
    ACCELERATOR.configure(*schedule)
    with ACCELERATOR.watching_the_host():
        saved = io.BytesIO()
        torch.save(act(rank, *arguments, **keywords), saved)
        ACCELERATOR.finish()
    races = ACCELERATOR.races()
    assert not races, f"{len(races)} races on rank {rank}, the first of them: {races[:3]}"
    return torch.load(io.BytesIO(saved.getvalue()), map_location="cpu", weights_only=False)


def train_there(rank: int, row: Row, limits: Limits, directory: Path, steps: int) -> Any:
    schedule = FEW_SCHEDULES[(zlib.crc32(str(row).encode()) + rank) % len(FEW_SCHEDULES)]
    return on_device(train, rank, schedule, row, limits, directory, steps, device="cuda")


ROWS = [
    "gpt2-non-reentrant-x1-clip-deferred-next-use-between-emulated-world2",
    "gpt2-none-x4-clip-deferred-next-use-between-emulated-bf16-world2",
]


@pytest.mark.parametrize("name", ROWS)
def test_no_bit_depends_on_how_ranks_share_a_device(name: str, team_of: Teams, tmp_path: Path) -> None:
    row = Row.parse(name)
    outcomes = in_its_budget(team_of(row.world), row, tmp_path, act=train_there)
    assert_parity(row, outcomes, "cuda")
    assert_moved(row, outcomes)
