"""Wrappers of PyTorch that average gradients, or share parameters, over ranks: a session does both itself, and goes with none of them."""

from __future__ import annotations

from typing import Final

from torch import nn

from patrickstar.errors import StateError
from patrickstar.hooks import frames

_MODULES: Final = ("torch.nn.parallel.distributed", "torch.distributed.fsdp")
_INSTEAD: Final = (
    "a session shares the model and averages gradients over ranks itself. Give manage() the bare model, call that one, and give Accelerate's "
    "prepare() loaders only"
)


def expect_unwrapped(model: nn.Module) -> None:
    """Raises StateError where a model, or a part of it, is one of DDP or FSDP."""
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_MODULES):
                where = path or "the model"
                raise StateError(f"{where} is a {kind.__name__} of {kind.__module__}: {_INSTEAD}")


def expect_no_wrapper(what: str) -> None:
    """Raises StateError where DDP or FSDP has led here."""
    for frame in frames():
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_MODULES):
            name = "DistributedDataParallel" if module == _MODULES[0] else "FSDP"
            raise StateError(f"{what} by {name}, around a managed model or a part of one: {_INSTEAD}")
