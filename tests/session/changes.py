"""Ways to change a weight by hand, in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CHANGES", "UNSEEN", "everywhere"]


@torch.no_grad()
def clamp(weight: Tensor) -> None:
    weight.clamp_(-0.1, 0.1)


@torch.no_grad()
def to_norm(weight: Tensor) -> None:
    weight.div_(weight.norm() / 4)


def by_data(weight: Tensor) -> None:
    weight.data.mul_(0.9)


def by_detached(weight: Tensor) -> None:
    weight.detach()[3].mul_(0.5)


@torch.no_grad()
def by_index(weight: Tensor) -> None:
    weight[5, 3:9] = 0.25
    weight[7].mul_(0.5)


@torch.no_grad()
def by_out(weight: Tensor) -> None:
    torch.mul(weight, 0.9, out=weight)


@torch.no_grad()
def by_copy(weight: Tensor) -> None:
    weight.copy_(weight.tanh())


@torch.no_grad()
def by_init(weight: Tensor) -> None:
    """torch gives this one no positional arguments."""
    nn.init.constant_(weight[:3], 0.125)
    nn.init.uniform_(weight[4], 0.25, 0.25)


@torch.no_grad()
def by_flag(weight: Tensor) -> None:
    """`inplace=True`, of a function whose name does not say it."""
    F.hardtanh(weight, -0.1, 0.1, inplace=True)


def by_lookup(weight: Tensor) -> None:
    F.embedding(torch.tensor([3, 5, 3]), weight, max_norm=0.25)


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[2, 2] = 9.0
    np.asarray(weight.data)[3] *= 0.5


def by_dlpack(weight: Tensor) -> None:
    torch.from_dlpack(weight.detach()).mul_(3)


def by_pointer(weight: Tensor) -> None:
    ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))[5] = 4.0


def by_storage(weight: Tensor) -> None:
    weight.detach().untyped_storage()[weight.storage_offset() * 4 + 3] = 0x40


CHANGES = (clamp, to_norm, by_data, by_detached, by_index, by_out, by_copy, by_init, by_flag)
UNSEEN = (by_numpy, by_dlpack, by_pointer, by_storage)
"""Those of fp32 that torch does not see."""


def everywhere(change: Callable[[Tensor], None]) -> Callable[[nn.Module], None]:
    """Of all matrices of a model."""

    def act(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                change(parameter)

    act.__name__ = change.__name__
    return act
