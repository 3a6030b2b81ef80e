"""Parts of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from patrickstar.core.layout import Layout
from patrickstar.hooks import Watched
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.whole_calls import WholeCalls
from patrickstar.session.buffers import Kind
from patrickstar.step.events import Events
from patrickstar.step.executor import Executor
from patrickstar.step.out_of_memory import OutOfMemory
from patrickstar.step.stretches import Stretches
from patrickstar.step.training import Training
from patrickstar.step.values import Weights

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a session is made of, put together by `manage`.

    `training` is None where only weights are managed. `parameter_dtypes`: the types before `manage`, by name. `buffers`: what those were that
    have been cast or moved. `host_budget_bytes`: what chunks and tensors may take of the host, where the user gave a bound, or None.
    `shortage`: is told where a device has no memory left.
    """

    model: nn.Module
    named: Mapping[str, nn.Parameter]
    layout: Layout
    binding: Binding
    executor: Executor
    stretches: Stretches
    events: Events
    weights: Weights
    training: Training | None
    root: Watched
    whole_calls: WholeCalls
    parameter_dtypes: Mapping[str, torch.dtype]
    buffers: Mapping[str, Kind]
    host_budget_bytes: int | None
    shortage: OutOfMemory | None
