"""Ways to change a weight by hand, in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def clamp(weight: Tensor) -> None:
    weight.clamp_(-0.1, 0.1)


@torch.no_grad()
def by_index(weight: Tensor) -> None:
    weight[5, 3:9] = 0.25
    weight[7].mul_(0.5)


@torch.no_grad()
def by_init(weight: Tensor) -> None:
    """torch gives this one no positional arguments."""
    nn.init.constant_(weight[:3], 0.125)
    nn.init.uniform_(weight[4], 0.25, 0.25)


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[2, 2] = 9.0
    np.asarray(weight.data)[3] *= 0.5


def by_pointer(weight: Tensor) -> None:
    ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))[5] = 4.0


def by_storage(weight: Tensor) -> None:
    weight.detach().untyped_storage()[weight.storage_offset() * 4 + 3] = 0x40


CHANGES: Mapping[str, Callable[[Tensor], object]] = {
    "clamp": clamp,
    "to_norm": torch.no_grad()(lambda weight: weight.div_(weight.norm() / 4)),
    "by_data": lambda weight: weight.data.mul_(0.9),
    "by_detached": lambda weight: weight.detach()[3].mul_(0.5),
    "by_index": by_index,
    "by_out": torch.no_grad()(lambda weight: torch.mul(weight, 0.9, out=weight)),
    "by_copy": torch.no_grad()(lambda weight: weight.copy_(weight.tanh())),
    "by_init": by_init,
    # `inplace=True`, of a function whose name does not say it
    "by_flag": torch.no_grad()(lambda weight: F.hardtanh(weight, -0.1, 0.1, inplace=True)),
}
UNSEEN: Mapping[str, Callable[[Tensor], object]] = {
    "by_numpy": by_numpy,
    "by_dlpack": lambda weight: torch.from_dlpack(weight.detach()).mul_(3),
    "by_pointer": by_pointer,
    "by_storage": by_storage,
}
"""Those of fp32 that torch does not see."""


def everywhere(change: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    """Of all matrices of a model."""

    def act(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                change(parameter)

    return act
