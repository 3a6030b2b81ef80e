"""Ranks on a GPU: NCCL as far as one rank has it, and two ranks that share the GPU, whose data go by way of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patrickstar.comm.collectives import Collectives
from patrickstar.comm.ranks import Ranks
from tests.cuda.test_ranks import QUICK
from tests.parity.managed import Limits
from tests.parity.matrix import RANKS, Row
from tests.parity.test_worlds import assert_moved, assert_parity, least, train
from tests.ranks import Teams

pytestmark = pytest.mark.device_only
ROWS = [*QUICK, *(row for row in RANKS if row.tier.startswith("emulated") and row.world == 2 and row not in QUICK)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nccl_carries_what_one_rank_has_for_itself(dtype: torch.dtype) -> None:
    made = Collectives(Ranks([0], 0, (dist.HashStore(), "test")), timeout_s=30)
    sent = torch.arange(1000, device="cuda").to(dtype)
    gathered, reduced, flags = torch.zeros_like(sent), torch.zeros(1000, device="cuda"), bytearray(b"\1\0")
    torch.cuda._sleep(100_000_000)  # what is sent is made after this
    sent.mul_(2)
    made.gather(gathered, sent, "weights").wait()
    made.reduce(reduced, sent, torch.empty_like(sent), "gradients", flags=flags).wait()
    made.close()
    assert torch.equal(gathered, sent)
    assert torch.equal(reduced, sent.float())
    assert flags == b"\1\0"


def train_there(rank: int, row: Row, limits: Limits, directory: Path, steps: int) -> Any:
    """The run of one rank on the GPU that all of them have, which NCCL would refuse."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: False)
        return train(rank, row, limits, directory, steps, "cuda")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_bit_depends_on_how_ranks_share_a_gpu(row: Row, team_of: Teams, tmp_path: Path) -> None:
    outcomes = least(team_of(row.world), row, tmp_path, act=train_there)
    assert_moved(row, outcomes)
    assert_parity(row, outcomes, "cuda")
