"""A model trained twice on the device: in plain PyTorch, and managed with less memory than it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import patrickstar
from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.passes import Passes
from patrickstar.session.manage import assemble
from tests.optim.definition import Definition

WIDTH = 64
CHUNK = WIDTH * WIDTH  # elements: a weight is one chunk
TIGHT = 12 * 4 * CHUNK  # bytes: three chunks with all that belongs to them, of five

Loss = Callable[[nn.Module, Tensor], Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


class Hungry(torch.autograd.Function):
    """Takes memory in a kernel that no trace shows: forward or backward, once it has been spared so many times. Gives it back, or keeps it."""

    nbytes = 0
    when = "forward"
    spared = 0
    keeps: list[Tensor] | None = None

    @staticmethod
    def take(when: str, device: torch.device) -> None:
        if Hungry.nbytes and Hungry.when == when:
            if not Hungry.spared:
                taken = torch.empty(Hungry.nbytes, dtype=torch.uint8, device=device)
                if Hungry.keeps == []:
                    Hungry.keeps.append(taken)
            Hungry.spared = max(0, Hungry.spared - 1)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            Hungry.take("forward", x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, FakeTensor):
            Hungry.take("backward", gradient.device)
        return gradient.clone()


class HungryLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Hungry.apply(super().forward(x))


def hungry_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[HungryLayer(WIDTH, WIDTH) for _ in range(5)])


def batch(number: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()


def square(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def step(model: nn.Module, session: Any, inputs: Tensor, *, parts: int = 1) -> None:
    """A step of a session in any precision, of so many backwards."""
    for _ in range(parts):
        session.scaler.scale(model(inputs).float().square().mean()).backward()
    session.scaler.step(session.optimizer)
    session.scaler.update()
    session.optimizer.zero_grad()


@dataclass
class Twins:
    """Both models. `session`: of the managed one."""

    plain: nn.Module
    plain_optimizer: torch.optim.Optimizer
    model: nn.Module
    session: Any

    def train(
        self, steps: int = 1, *, first: int = 0, loss_of: Loss = square, before_zero: Callable[[], object] = int
    ) -> None:
        """Trains both for some steps, one after the other. `before_zero`: called before gradients are let go."""
        for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.session.optimizer)):
            for number in range(first, first + steps):
                loss_of(model, batch(number)).backward()
                optimizer.step()
                before_zero()
                optimizer.zero_grad()

    def expect_same(self) -> None:
        """Fails where a weight has other bits."""
        state = self.session.state_dict()
        for name, parameter in self.plain.named_parameters():
            assert torch.equal(state[name].cpu(), parameter.detach().cpu()), f"{name} differs"


class Defined(torch.optim.AdamW):
    """AdamW by its definition, on any device: torch's own rounds as each device has it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            hyper = Hyper.from_group(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["step"] += 1
                planes = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                flat = (plane.view(-1) for plane in planes)
                Definition().update(*flat, step=state["step"], hyper=hyper)


def norm_bytes(passes: Passes) -> int:
    return passes.scratch_bytes(CHUNK, is_split=False, largest=CHUNK, tensors=10).norm


@contextmanager
def twins(build: Callable[[], nn.Module] = mlp, *, device_memory: int = TIGHT, **arguments: Any) -> Iterator[Twins]:
    """A pair of models, of which the second is managed for so long."""
    plain, model = build().cuda(), build()
    keywords = {"lr": 1e-2, "weight_decay": 0.1}
    if "max_grad_norm" in arguments:  # for which Triton's passes collect more than torch's operations
        ours, torchs = choose_kernels(torch.device("cuda"))["cuda"], Passes()
        device_memory += norm_bytes(ours) - norm_bytes(torchs)
    with assemble(
        model,
        torch.optim.AdamW(model.parameters(), **keywords),
        device="cuda",
        device_memory=device_memory,
        **{"precision": "fp32", "options": patrickstar.Options(chunk_size=CHUNK, poison=True), **arguments},
    ) as session:
        yield Twins(plain, Defined(plain.parameters(), **keywords), model, session)
