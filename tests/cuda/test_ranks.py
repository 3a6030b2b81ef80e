"""Ranks whose models compute on a device: plain PyTorch's bits on it, and no race, whatever has run by when.

NCCL is not here: data go through the host. All ranks use the one device of their process.
"""

from __future__ import annotations

import io
import json
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from patrickstar.cli.main import main
from patrickstar.comm.transport import staging_bytes
from tests.cuda.schedules import FEW_SCHEDULES
from tests.parity.managed import ROOMY_BYTES, Limits
from tests.parity.matrix import RANKS, Row
from tests.parity.test_worlds import assert_moved, assert_parity, least, train, train_all
from tests.ranks import Team, Teams, all_well
from tests.sampling import only
from tests.session.test_ranks import inputs
from tests.session.test_ranks import mlp as blocks


def on_device(rank: int, schedule: tuple[float, int], act: Any, *arguments: Any) -> Any:
    """What a rank does on its device, under a schedule; it leaves no race."""
    from patrickstar.memory import driver
    from tests.accelerator.cuda import ACCELERATOR, DRIVER  # before torch, or not at all

    driver._driver = lambda: DRIVER
    ACCELERATOR.configure(*schedule)
    with ACCELERATOR.watching_the_host():
        saved = io.BytesIO()
        torch.save(act(rank, *arguments), saved)
        ACCELERATOR.finish()
    races = ACCELERATOR.races()
    assert not races, f"{len(races)} races on rank {rank}, the first of them: {races[:3]}"
    return torch.load(io.BytesIO(saved.getvalue()), map_location="cpu", weights_only=False)


def train_there(rank: int, row: Row, limits: Limits, directory: Path, steps: int) -> Any:
    schedule = FEW_SCHEDULES[(zlib.crc32(str(row).encode()) + rank) % len(FEW_SCHEDULES)]
    return on_device(rank, schedule, train, row, limits, directory, steps, "cuda")


QUICK = [
    Row.parse("tied-none-x1-clip-deferred-lru-minimum-emulated-world2"),
    Row.parse("one-block-none-x4-clip-deferred-next-use-minimum-emulated+disk-bf16-world2"),
]
ROWS = [*QUICK, *(row for row in RANKS if row.tier.startswith("emulated"))]


@pytest.mark.campaign
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_bit_depends_on_how_ranks_share_a_device(row: Row, team_of: Teams, tmp_path: Path) -> None:
    if row.budget == "fits":
        outcomes = train_all(team_of(row.world), row, {}, tmp_path, act=train_there)
    else:  # halfway to where everything fits is more here than everything: a part of the host's budget is for what ranks send
        outcomes = least(team_of(row.world), row, tmp_path, act=train_there)
        assert_moved(row, outcomes)
    assert_parity(row, outcomes, "cuda")
    for outcome in outcomes:
        host = outcome.limits.get("host", row.world * ROOMY_BYTES) // row.world
        assert outcome.stats.peak["host"] <= host - staging_bytes("cuda")
        if row.model != "penalised":  # whose step shows what no forecast has, and is above its budget once
            assert outcome.stats.peak["device"] <= outcome.limits.get("device", host)


class InTurn(nn.Module):
    """What no block owns and blocks, which run on a stream of their own and on the current one in turn. The input is there on the first of these."""

    def __init__(self, side: torch.Stream | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.side = nn.ModuleList([nn.Linear(48, 48), *blocks()]), side

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        for number, layer in enumerate(self.layers):
            stream = main if self.side is None or number % 2 else self.side
            if number:
                stream.wait_stream(main)
            with torch.cuda.stream(stream):
                made = layer(x)
            x.record_stream(stream)
            main.wait_stream(stream)
            made.record_stream(main)
            x = made
        return x


def weights_after(rank: int, side: torch.Stream | None, kept: str) -> dict[str, Tensor]:
    model = InTurn(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memory = {"device_memory": "64MiB", "host_memory": "1GiB", "options": patrickstar.Options(compute="fp32")}
    with patrickstar.manage(model, optimizer, precision=kept, device="cuda", max_grad_norm=1e-3, **memory) as session:
        for step in range(6):
            with nullcontext() if step % 2 else session.no_sync():
                with torch.cuda.stream(side):
                    x = inputs(rank, step, 0).cuda()
                model(x).float().square().mean().backward()
            if step % 2:
                session.optimizer.step()
                session.optimizer.zero_grad()
        return {name: value.clone() for name, value in session.state_dict().items()}


def compare_streams(rank: int, kept: str) -> None:
    want, got = (weights_after(rank, side, kept) for side in (None, torch.cuda.Stream()))
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("kept", only(["bf16"], ["fp32", "bf16"]))
def test_what_runs_on_streams_of_the_users_waits_and_is_waited_for(kept: str, two: Team) -> None:
    all_well(two.run(on_device, FEW_SCHEDULES[1], compare_streams, kept))


def train_by_command(rank: int, model: Path) -> int:
    words = ["--model", str(model), "--data", "random", "--batch-size", "2", "--seq-len", "16", "--steps", "2"]
    return main(
        ["train", *words, "--device", "cuda", "--device-memory", "64MiB", "--precision", "bf16", "--compare-plain"]
    )


def test_a_command_has_the_bits_of_plain_pytorch_with_what_each_device_draws(two: Team, tmp_path: Path) -> None:
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 32}  # with dropout
    (tmp_path / "tiny.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    assert all_well(two.run(on_device, FEW_SCHEDULES[1], train_by_command, tmp_path / "tiny.json")) == [0, 0]
