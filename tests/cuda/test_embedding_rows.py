"""Tables of embeddings on a GPU go tile by tile yet: that is said, and no bit depends on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import patrickstar

if TYPE_CHECKING:
    from tests.accelerator.cuda import Accelerator


def trained(device: str, **given: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(400, 8), nn.Linear(8, 4))
    options = patrickstar.Options(chunk_size=1024, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = patrickstar.manage(
        model, optimizer, precision="fp32", device=device, device_memory="8MB", options=options
    )
    with session:
        for _ in range(2):
            tokens = torch.arange(0, 400, 7, device=model[1].weight.device)
            model(tokens).square().mean().backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_rows_of_tables_are_not_gathered_on_a_gpu_which_is_said_once_and_changes_no_bit(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "patrickstar"):
        ours = trained("cuda", embedding_rows=True)
    told = [record.getMessage() for record in caplog.records if "embedding_rows" in record.getMessage()]
    assert len(told) == 1
    assert "tile by tile" in told[0]
    caplog.clear()
    plain = trained("cuda")
    assert not any("embedding_rows" in record.getMessage() for record in caplog.records)
    assert all(map(torch.equal, ours, plain))
