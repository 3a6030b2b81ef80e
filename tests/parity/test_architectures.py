"""Architectures that nobody thought of when the binding was made: the bits of plain PyTorch, near the smallest budget that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patrickstar
from tests.parity.architectures import ARCHITECTURES, Built
from tests.parity.compare import compare_mappings, same_bits

pytestmark = pytest.mark.campaign

STEPS = 3
RUNS = {
    "deferred": ("deferred", None, False),
    "in-backward-disk": ("in_backward", None, True),
    "non-reentrant": ("deferred", False, False),
    "reentrant-disk": ("deferred", True, True),
}
"""`step`, whether checkpointing is re-entrant (None: there is none), and whether there is a disk."""


def make(built: Built, reentrant: bool | None) -> nn.Module:
    torch.manual_seed(0)
    model: Any = built[0]()
    if reentrant is not None:
        if not getattr(model, "supports_gradient_checkpointing", False):
            pytest.skip("the architecture has no checkpointing")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    trained: nn.Module = model.train()
    return trained


def train(model: nn.Module, optimizer: Any, built: Built) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = built[1](model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def adamw(model: nn.Module) -> patrickstar.AdamW:
    return patrickstar.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_bits_of_plain_pytorch(name: str, run: str, tmp_path: Path) -> None:
    assert_bits(name, run, tmp_path, share=1 / 8)


@pytest.mark.blocks
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_bits_of_plain_pytorch_by_block(name: str, run: str, tmp_path: Path) -> None:
    """With room for blocks, and not for all."""
    assert " blocks" in assert_bits(name, run, tmp_path, share=2)


def assert_bits(name: str, run: str, tmp_path: Path, *, share: float) -> str:
    """Trains the architecture at the first budget that fits, from that share of the weights on, and gives how it was bound."""
    step, reentrant, on_disk = RUNS[run]
    built = ARCHITECTURES[name]()
    plain = make(built, reentrant)
    want = train(plain, adamw(plain), built)
    machine: dict[str, Any] = {"host_memory": "2MiB", "disk": tmp_path / "disk"} if on_disk else {}
    nbytes = max(1 << 16, int(share * sum(parameter.nbytes for parameter in plain.parameters())))
    for _ in range(30):
        model, session = make(built, reentrant), None
        try:
            session = patrickstar.manage(
                model,
                adamw(model),
                step=step,
                device="emulated",
                device_memory=nbytes,
                options=patrickstar.Options(poison=True),
                **machine,
            )
            got = train(model, session.optimizer, built)
        except patrickstar.BudgetError as refusal:
            nbytes = max(refusal.smallest_bytes or 0, nbytes + 16384)
            continue
        else:
            assert all(same_bits(a, b) for a, b in zip(want, got, strict=True)), f"{got}, plain PyTorch has {want}"
            assert not compare_mappings("state dict's", plain.state_dict(), dict(session.state_dict()))
            assert session.stats().peak["device"] <= nbytes
            return session.stats().binding
        finally:
            if session is not None:
                session.close(keep_weights=False)
    raise AssertionError(f"no budget up to {nbytes} bytes fits")
