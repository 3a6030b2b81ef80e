"""optim/choose.py with Triton's passes: used where they have the bits of the host's update, refused with a reason where they have not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from patrickstar.optim import choose, reference, triton_passes
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.passes import Passes
from patrickstar.optim.triton_passes import TritonPasses

HOST = torch.device("cpu")
AGREES = choose._agrees


def agrees_here(passes: Passes, host: Passes, device: torch.device) -> bool:
    """The comparison on the device of the interpreter, which is the host."""
    return AGREES(passes, host, HOST)


class LateStep(TritonPasses):
    def update(self, *planes: Tensor | None, step: int, hyper: Hyper, factors: Sequence[Tensor] = ()) -> None:
        super().update(*planes, step=step + 1, hyper=hyper, factors=factors)


def test_a_family_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(choose, "_agrees", agrees_here)
    passes = choose.choose_kernels(torch.device("cuda", 0))
    assert {device: type(family) for device, family in passes.items()} == {"cpu": Passes, "cuda": TritonPasses}


def test_a_family_that_does_not_agree_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(triton_passes, "TritonPasses", LateStep)
    monkeypatch.setattr(choose, "_agrees", agrees_here)
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        assert choose.choose_kernels(torch.device("cuda", 0))["cuda"].kernel is reference.update
    assert "cuda:0 (other bits than the host's updates)" in caplog.text
