"""A model that ranks share and what they do with it, alike on any number of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import patrickstar

Bits = Mapping[str, Any]
ROOMY: dict[str, Any] = {"host_memory": "1GiB"}


def build(seed: int = 0) -> nn.Module:
    """Blocks and a root group, a tied, a frozen and a transposed weight, random numbers and buffers."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(48, 120), nn.Dropout(0.2), nn.Linear(120, 48)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(48, 48), *blocks, nn.BatchNorm1d(48), nn.Linear(48, 48))
    model[5].weight = model[0].weight
    model[1][0].weight.requires_grad_(False)
    model[2][2].weight = nn.Parameter(model[2][2].weight.detach().t().contiguous().t())
    return model


@contextmanager
def managed(seed: int = 0, *, chunk_size: int | None = None, **arguments: Any) -> Iterator[tuple[nn.Module, Any]]:
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = patrickstar.Options(poison=True, chunk_size=chunk_size)
    with patrickstar.manage(model, optimizer, options=options, **{**ROOMY, **arguments}) as session:
        yield model, session


def train(model: nn.Module, session: Any, steps: int) -> None:
    """The rows are drawn from torch's random numbers, as dropout is."""
    for _ in range(steps):
        model(torch.randn(4, 48)).square().mean().backward()
        session.optimizer.step()
        session.optimizer.zero_grad()


def bits_of(model: nn.Module, session: Any) -> Bits:
    states = {name: session.optimizer.state[p] for name, p in model.named_parameters() if p in session.optimizer.state}
    found: dict[str, Any] = {key: value.clone() for key, value in session.state_dict().items()}
    found |= {f"{name}/{key}": value.clone() for name, state in states.items() for key, value in state.items()}
    return {"tensors": found, "rate": session.optimizer.param_groups[0]["lr"]}


def expect_same(want: Bits, got: Bits, *, but: str = "nothing") -> None:
    assert want.keys() == got.keys()
    assert want["rate"] == got["rate"]
    assert want["tensors"].keys() == got["tensors"].keys()
    odd = [key for key, value in want["tensors"].items() if not torch.equal(value, got["tensors"][key])]
    assert not [key for key in odd if but not in key]
