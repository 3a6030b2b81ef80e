"""The hyper-parameters of one parameter group, and the scalars of one step that follow; an optimizer and a scheduler of its rates from a config."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from patrickstar.config.settings import OptimizerSettings
from patrickstar.errors import ConfigError
from patrickstar.optim.schedules import Rates

UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
"""Flags of torch's Adam that change the update; `foreach` and `fused` only choose one of torch's implementations."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-parameters of a `param_group`, as Python numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True: AdamW, the weight shrinks by itself. False: Adam, the decay is added to the gradient (L2)."""

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> Hyper:
        """Reads a group of torch's Adam or AdamW as it stands now. ConfigError: a flag that changes the update is set, or a value is no number."""
        refuse_unsupported(group)
        beta1, beta2 = group["betas"]
        return cls(
            lr=_number("lr", group["lr"]),
            beta1=_number("betas[0]", beta1),
            beta2=_number("betas[1]", beta2),
            eps=_number("eps", group["eps"]),
            weight_decay=_number("weight_decay", group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", False)),
        )

    def check(self) -> None:
        """Checks the values. Raises ConfigError where torch's constructor would refuse them.

        Called when an optimizer or a group comes in, not at each step: a scheduler that overshoots zero by a rounding
        error runs on in torch, and so it does here.
        """
        betas = self.beta1, self.beta2
        try:
            torch.optim.Adam([torch.empty(0)], self.lr, betas, self.eps, self.weight_decay)
        except ValueError as error:
            raise ConfigError(f"{error}; lr, eps and weight_decay are 0 or more, betas below 1 as well") from None


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The scalars of one update: computed in double, then rounded once to fp32 (and held as Python floats)."""

    shrink: float | None
    """f(1 - lr wd), what the weight is multiplied with first; None without decoupled decay."""
    l2: float | None
    """f(wd), the share of the weight that is added to the gradient; None without L2 decay."""
    blend: float
    """f(1 - b1), how far exp_avg goes towards the gradient."""
    keep_sq: float
    """f(b2)"""
    add_sq: float
    """f(1 - b2)"""
    root: float
    """f(sqrt(1 - b2^t)), what the root of exp_avg_sq is divided by."""
    eps: float
    move: float
    """f(-lr / (1 - b1^t)), what exp_avg is multiplied with on its way into the weight."""

    @classmethod
    def at(cls, hyper: Hyper, step: int) -> Coefficients:
        """The scalars of update number `step`, which counts from 1."""
        decay = hyper.weight_decay
        return cls(
            shrink=_fp32(1 - hyper.lr * decay) if decay and hyper.decoupled else None,
            l2=_fp32(decay) if decay and not hyper.decoupled else None,
            blend=_fp32(1 - hyper.beta1),
            keep_sq=_fp32(hyper.beta2),
            add_sq=_fp32(1 - hyper.beta2),
            root=_fp32(math.sqrt(1 - hyper.beta2**step)),
            eps=_fp32(hyper.eps),
            move=_fp32(-hyper.lr / (1 - hyper.beta1**step)),
        )


def build_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """torch's AdamW where the decay is decoupled, else its Adam, with one group."""
    kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    of_group = {name: value for name, value in asdict(settings).items() if name != "decoupled"}
    return kind(list(parameters), **of_group, fused=fused)


class Scheduler(LambdaLR):
    """Sets rates, and betas where there are some, at every `step()`. Each group is its own base.

    torch multiplies a group's first rate with what its function gives. Rates are not shares of it: so the first is 1 to torch, and no bit is lost.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Rates) -> None:
        bases = [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 1.0
        self._betas = rates.betas
        super().__init__(optimizer, [partial(lambda base, done: rates.lr(done, base), base) for base in bases])

    def step(self, epoch: int | None = None) -> None:
        """Goes on by one step. ConfigError: the schedule's betas have left what Adam takes."""
        super().step(epoch)
        betas = self._betas(self.last_epoch)
        if betas is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = betas

    def state_dict(self) -> dict[str, Any]:
        """The count of steps. What the schedule does is the config's, and the rates themselves are the optimizer's."""
        state = super().state_dict()
        del state["_betas"]
        return state


def refuse_unsupported(flags: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the first flag that is set and changes the update into another one."""
    for flag in UNSUPPORTED:
        if flags.get(flag):
            raise ConfigError(f"{flag}=True is not supported: leave it out (or {flag}=False)")


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever is a number: tensors of one element, NumPy's scalars
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(f"{name}={value!r} is no number") from None


def _fp32(value: float) -> float:
    """The nearest fp32 number; infinite where fp32 cannot hold it, as a C cast does."""
    return ctypes.c_float(value).value
