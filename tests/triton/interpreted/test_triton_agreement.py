"""optim/agreement.py and optim/choose.py with Triton's passes: used where they agree with the definition, refused with a reason where they do not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from patrickstar.optim import choose, triton_passes
from patrickstar.optim.agreement import differences
from patrickstar.optim.norm import Norm
from patrickstar.optim.triton_norm import TritonNorm
from patrickstar.optim.triton_passes import TritonPasses

HOST = torch.device("cpu")


class NoFactors(TritonPasses):
    def update(self, *planes: Tensor | None, factors: Sequence[Tensor] = (), **others: object) -> None:
        super().update(*planes, **others)


class NoRest(TritonPasses):
    def split(self, master: Tensor, weight: Tensor, rest: Tensor) -> None:
        super().split(master, weight, rest)
        rest.zero_()


class Overwriting(TritonPasses):
    def put_and_look(self, target: Tensor, source: Tensor, is_finite: Tensor, *, adds: bool) -> None:
        super().put_and_look(target, source, is_finite, adds=False)


class Blind(TritonPasses):
    def look(self, piece: Tensor, is_finite: Tensor) -> None:
        pass


class OneTensor(TritonNorm):
    def add(self, piece: Tensor, factors: Sequence[Tensor] = ()) -> None:
        self.end_tensor()
        super().add(piece, factors)


class OtherBlocks(TritonPasses):
    def norm(self, device: torch.device | None) -> Norm:
        return OneTensor(device)


def test_the_kernels_agree_with_the_definition() -> None:
    assert differences(TritonPasses(), HOST) == []


@pytest.mark.parametrize(
    ("spoiled", "found"),
    [
        (NoFactors, "update, torch.bfloat16, torch.bfloat16"),
        (NoRest, "update, torch.float16, torch.float16"),
        (Overwriting, "gradients in torch.float32, adds=True"),
        (Blind, "overflow in torch.bfloat16"),
        (OtherBlocks, "norm"),
    ],
)
def test_passes_with_other_bits_are_found(spoiled: type[TritonPasses], found: str) -> None:
    names = differences(spoiled(), HOST)
    assert any(name.startswith(found) for name in names), names
    assert len(names) < 21, "what agrees is named as well"


def test_a_family_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(choose, "differences", lambda passes, device: differences(passes, HOST))
    passes = choose.choose_kernels(torch.device("cuda", 0))
    assert {device: family.name for device, family in passes.items()} == {"cpu": passes["cpu"].name, "cuda": "triton"}
    assert isinstance(passes["cuda"], TritonPasses)


def test_a_family_that_does_not_agree_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_passes, "TritonPasses", Blind)
    monkeypatch.setattr(choose, "differences", lambda passes, device: differences(passes, HOST))
    with caplog.at_level(logging.WARNING, logger="patrickstar"):
        assert choose._triton_passes(torch.device("cuda", 0)) is None
    assert "other bits than the definition in: overflow in" in caplog.text
    assert "cuda:0" in caplog.text
