"""Parts of one step of which a later one leaves no room for parameters that stay: they begin to move with gradients of the parts before there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import patrickstar

ROWS = (2, 2, 2, 1500, 2, 2, 2, 2)
"""Of each sample; a step takes four, one a part."""


def trained(host_memory: str, disk: Path) -> tuple[list[torch.Tensor], bool]:
    """Weights after two steps, and whether parameters are still whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    session = patrickstar.manage(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), host_memory=host_memory, disk=disk
    )
    data = [torch.randn(rows, 256, generator=torch.Generator().manual_seed(at)) for at, rows in enumerate(ROWS)]
    for step in session.steps(data, batch_size=4, parts=4, total=2, collate_fn=lambda samples: samples[0]):
        with step:
            for rows in step:
                model(rows).square().mean().backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
    whole = "whole" in repr(session.stats())
    session.close()
    return [parameter.detach().clone() for parameter in model.parameters()], whole


@pytest.mark.whole
def test_a_step_goes_on_where_parameters_begin_to_move_between_its_parts(tmp_path: Path) -> None:
    roomy, stays = trained("1GiB", tmp_path)
    tight, moves = trained("24MiB", tmp_path)
    assert (stays, moves) == (True, False)
    assert all(torch.equal(one, other) for one, other in zip(roomy, tight, strict=True))
