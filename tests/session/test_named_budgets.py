"""The budget that the first forward's refusal names: enough for every step after it, whatever the steps do that no forward shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patrickstar import BudgetError
from tests.parity.compare import same_bits
from tests.session.builders import adamw, assert_same, batch, machine_with, managed, mlp, seeded

STEPS = 6


class Pictures(nn.Module):
    """A decoder and a critic of what it makes, as where a picture's loss has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.critic = mlp(layers=2), mlp(1, layers=2), mlp(2, layers=2)
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.last(self.decoder(self.encoder(x)))
        return made, self.critic(made)


class Codebooks(nn.Module):
    """A residual quantiser: each codebook quantises what the one before has left."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(layers=2), mlp(1, layers=2)
        self.books = nn.ModuleList(nn.Embedding(48, 32) for _ in range(3))
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        encoded = left = self.encoder(x)
        quantised, loss = torch.zeros_like(left), torch.zeros(())
        for book in self.books:
            numbers = torch.cdist(left, book.weight).argmin(1)
            if self.looks and len(numbers.unique()) < 4:  # no trial run can look
                loss = loss + book.weight.square().mean()
            codes = book(numbers)
            loss = loss + F.mse_loss(codes, left.detach()) + 0.25 * F.mse_loss(left, codes.detach())
            quantised, left = quantised + codes, left - codes.detach()
        straight_through = encoded + (quantised - encoded).detach()
        return loss + F.mse_loss(self.decoder(straight_through), x)


class Averages(nn.Module):
    """A codebook that is an average of what was quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(layers=2), mlp(1, layers=2)
        self.book = nn.Parameter(torch.randn(48, 32), requires_grad=False)
        self.register_buffer("sizes", torch.ones(48))
        self.register_buffer("sums", self.book.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        numbers = torch.cdist(encoded, self.book).argmin(1)
        codes = F.embedding(numbers, self.book)
        with torch.no_grad():
            chosen = F.one_hot(numbers, len(self.book)).float()
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ encoded, alpha=0.1)
            self.book.copy_(self.sums / self.sizes[:, None])
        out = self.decoder(encoded + (codes - encoded).detach())
        return F.mse_loss(out, x) + 0.25 * F.mse_loss(encoded, codes.detach())


def of_the_model(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out if out.ndim == 0 else out.square().mean()


def adaptive(model: nn.Module, x: Tensor) -> Tensor:
    """The weight of one part of the loss is a ratio of gradients of the last layer."""
    made, judged = model(x)
    ours, theirs = (made - x).abs().mean(), -judged.mean()
    last = model.last.weight
    (of_ours,) = torch.autograd.grad(ours, last, retain_graph=True)
    (of_theirs,) = torch.autograd.grad(theirs, last, retain_graph=True)
    return ours + (of_ours.norm() / (of_theirs.norm() + 1e-4)).clamp(0, 1e4).detach() * theirs


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def with_anomalies(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., Tensor]:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.detect_anomaly():
            loss = loss_of(model, x)
            loss.backward()
        return loss.detach()

    return step


PROGRAMS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "a loss in the open": (mlp, of_the_model),
    "anomalies": (mlp, with_anomalies(of_the_model)),
    "an adaptive loss": (Pictures, adaptive),
    "a gradient penalty": (mlp, penalised),
    "residual codebooks": (Codebooks, of_the_model),
    "residual codebooks that are looked at": (lambda: Codebooks(looks=True), of_the_model),
    "averaged codebooks": (Averages, of_the_model),
}


def train_step(name: str, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss = PROGRAMS[name][1](model, batch(number, rows=16))
    if loss.requires_grad:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def trained(name: str, nbytes: int, disk: Path, machine: str, step: str) -> tuple[int, BudgetError | None]:
    """The number of steps done, and what refused the next one. A run without a refusal has the bits of plain PyTorch."""
    plain, model = (seeded(PROGRAMS[name][0])() for _ in range(2))
    losses: list[Tensor] = []
    try:
        given = {"host_memory": nbytes} if machine == "cpu" else machine_with(machine, nbytes, disk)
        with managed(model, precision="fp32", step=step, **given) as session:
            for number in range(STEPS):
                losses.append(train_step(name, model, session.optimizer, number))
            optimizer = adamw(plain)
            for number, loss in enumerate(losses):
                assert same_bits(train_step(name, plain, optimizer, number), loss)
            assert_same(plain, optimizer, session)
    except BudgetError as refusal:
        return len(losses), refusal
    return STEPS, None


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("step", ["deferred", "in_backward"])
@pytest.mark.parametrize("machine", ["cpu", "cpu+disk", "emulated"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_budget_that_the_first_step_named_is_enough_for_every_step(
    name: str, machine: str, step: str, tmp_path: Path
) -> None:
    if name == "an adaptive loss":
        step = "deferred"  # the other refuses a second backward
    nbytes = 4096
    for _ in range(12):
        steps, refusal = trained(name, nbytes, tmp_path, machine, step)
        if refusal is None:
            return
        assert steps == 0, (
            f"refused in step {steps + 1} with {nbytes} bytes, which nothing before it had refused: {refusal}"
        )
        nbytes = refusal.smallest_bytes
    raise AssertionError(f"still refused with {nbytes} bytes")
