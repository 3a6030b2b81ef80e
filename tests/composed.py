"""Modules that are told by their parts and one function, so that a test shows what is particular about its model and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Composed(nn.Module):
    """A module of these parts, in this order, whose forward is the function, given the module first."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.run(self, *args, **keywords)
