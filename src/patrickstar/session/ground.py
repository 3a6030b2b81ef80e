"""The ground on which a session's parts are built, for one process or for each of several ranks, again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from patrickstar.comm.collectives import Collectives
from patrickstar.hooks import watch_root
from patrickstar.memory.works_under_way import MakeLane
from patrickstar.parameters.bound import placeholder
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.build import build_memory, build_step
from patrickstar.session.parts import Parts
from patrickstar.session.start import Setup
from patrickstar.session.step_bytes import StepBytes
from patrickstar.torch_private import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """All that stays as it is while the ranks of an elastic job come and go.

    Attributes:
        setup: of one process that has all. dtypes, strides: of parameters, before they were managed.
    """

    model: nn.Module
    named: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    setup: Setup
    make_lane: MakeLane | None
    choice: UpdateChoice
    dtypes: Mapping[str, torch.dtype] = field(init=False)
    strides: Mapping[str, Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", {name: parameter.dtype for name, parameter in self.named.items()})
        object.__setattr__(self, "strides", {name: parameter.stride() for name, parameter in self.named.items()})

    @property
    def facts(self) -> str:
        """The model and the optimizer, as far as all ranks must have them alike."""
        groups = [] if self.optimizer is None else [len(group["params"]) for group in self.optimizer.param_groups]
        shapes = sorted((name, tuple(parameter.shape)) for name, parameter in self.named.items())
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        kind = type(self.optimizer).__name__
        return f"{len(shapes)} parameters ({digest}) in chunks of {self.setup.layout.chunk_numel}, {kind} over groups of {groups}"

    def parts(self, collectives: Collectives | None) -> Parts:
        """Parts without contents, for one process or for one rank of several. Nothing is done to the model. BudgetError, DeviceError: as `manage`."""
        setup = self.setup.over(None if collectives is None else collectives.ranks)
        store = build_memory(setup, make_lane=self.make_lane)
        try:
            parts = build_step(
                self.model,
                self.named,
                self.optimizer,
                setup,
                store,
                choice=self.choice,
                collectives=collectives,
                strides=self.strides,
            )
        except BaseException:
            store.close()
            raise
        return replace(parts, sent=StepBytes({}, collectives))

    def lay_bare(self) -> None:
        """Leaves parameters without bytes: what stands for them cannot be read."""
        with Plain():
            for parameter in self.named.values():
                parameter.data = placeholder(parameter.dtype, parameter.device).expand(parameter.shape)
                parameter.grad = None


def watch(parts: Parts, undo: ExitStack) -> ExitStack:
    """Hooks on the model that tell parts of its calls. `undo`: removes them."""
    root = watch_root(parts.model, parts.events)
    undo.callback(root.close)
    blocks = parts.stretches.blocks
    undo.callback(blocks.remove)
    if not parts.whole.why:
        parts.whole.left = blocks.watch
    else:
        blocks.watch()
    return root
