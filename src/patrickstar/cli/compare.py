"""`--compare-plain`: the same steps in plain PyTorch, and whether every bit is the same.

The update is written out below in the order of operations that defines it, in torch's own operations; so is clipping, so are masters and
rounding of 16-bit weights (`plain_masters.py`). The gradients are autograd's. Of the library's arithmetic only the rule of the loss scale takes part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from patrickstar.checkpoint import rng
from patrickstar.cli.batches import BatchSource
from patrickstar.cli.loop import accumulate_gradients
from patrickstar.cli.plain_masters import PLAIN_FP32, PlainMasters, PlainPrecision
from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.scale_rule import ScaleRule
from patrickstar.optim.schedules import Rates

# Elements whose squares are summed together, in fp64, as rows of a tree: part of the definition of the norm.
NORM_BLOCK: Final = 65_536
NORM_ROW: Final = 16


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling of losses. `scale`: the one at the end. `skipped`: steps whose gradients overflowed."""

    scale: float
    skipped: int

    def __str__(self) -> str:
        return f"a loss scale of {self.scale:.10g} after {self.skipped} skipped steps"


@dataclass(frozen=True, slots=True)
class ManagedRun:
    """A managed run to compare with: its losses step by step, digests of its final state, and the random numbers at its beginning (`rng.capture`)."""

    losses: Sequence[float]
    final: Mapping[str, str]
    random_state: Mapping[str, Any]
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a managed run and the plain one."""

    losses: tuple[int, ...]
    """Steps whose losses differ, from 1."""
    tensors: tuple[str, ...]
    """Names of final tensors that differ, or that only one of the two has."""
    compared: int
    scaling: tuple[Scaling | None, Scaling | None] = (None, None)
    """How losses were scaled, managed and plain; None where they were not."""

    @property
    def equal(self) -> bool:
        return not self.losses and not self.tensors and self.scaling[0] == self.scaling[1]

    def __str__(self) -> str:
        managed, plain = self.scaling
        if self.equal:
            scaled = f", and {plain}" if plain is not None else ""
            return f"plain PyTorch gives the same bits: every loss and all {self.compared} tensors of the final state{scaled}"
        parts = []
        if self.losses:
            parts.append(f"{len(self.losses)} losses, first at step {self.losses[0]}")
        if self.tensors:
            parts.append(f"{len(self.tensors)} of {self.compared} final tensors, first {self.tensors[0]}")
        if managed != plain:
            parts.append(f"{plain or 'no loss scale'}, where the run has {managed or 'none'}")
        return f"plain PyTorch gives other bits: {'; '.join(parts)}"


@dataclass(slots=True)
class Moments:
    """The state of AdamW for one parameter."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    steps: int = 0


class PlainRun:
    """The steps of a run in plain PyTorch, from the model, batches and schedule that the managed run began with."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        *,
        optimizer: OptimizerSettings,
        schedule: Rates,
        clip: float | None,
        accumulate: int,
        precision: PlainPrecision = PLAIN_FP32,
    ) -> None:
        self.model = model
        self.batches = batches
        self.optimizer = optimizer
        self.schedule = schedule
        self.clip = clip
        self.accumulate = accumulate

        self._masters = PlainMasters(model, precision)
        self._scale = None if precision.loss_scale is None else ScaleRule(precision.loss_scale)
        self._moments: dict[str, Moments] = {}
        self._done = 0
        self._skipped = 0

    def step(self) -> float:
        """Runs one step and gives its loss. Where gradients overflow nothing is updated, and the schedule waits."""
        masters, rule = self._masters, self._scale
        scaled = {} if rule is None else {"scale": torch.tensor(rule.scale).mul}
        loss = accumulate_gradients(self.model, self.batches, self.accumulate, after_backward=masters.gather, **scaled)
        gradients = masters.take_gradients()
        with torch.no_grad():
            if rule is not None and unscale_(gradients.values(), rule):
                self._skipped += 1
            else:
                self._update(gradients)
        return loss

    def _update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self.clip is not None:
            clip_(list(gradients.values()), self.clip)
        hyper = replace(
            self.optimizer,
            lr=self.schedule.lr(self._done, self.optimizer.lr),
            betas=self.schedule.betas(self._done) or self.optimizer.betas,
        )
        for name, gradient in gradients.items():
            master = self._masters[name]
            if name not in self._moments:
                self._moments[name] = Moments(torch.zeros_like(master), torch.zeros_like(master))
            update_(master, gradient, self._moments[name], hyper)
        self._masters.write_back()
        self._done += 1

    @property
    def scaling(self) -> Scaling | None:
        """Scaling of the losses so far."""
        return None if self._scale is None else Scaling(self._scale.scale, self._skipped)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The final state: of the model, with fp32 masters for parameters of 16 bits."""
        return self._masters.state_dict()


def update_(p: torch.Tensor, g: torch.Tensor, moments: Moments, hyper: OptimizerSettings) -> None:
    """One update of Adam for a parameter, in place, in fp32. Scalars are computed in double and rounded once."""
    beta1, beta2 = hyper.betas
    m, v = moments.exp_avg, moments.exp_avg_sq
    moments.steps += 1
    if hyper.decoupled:
        p.mul_(1 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay:
        g = g.add(p, alpha=hyper.weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    # torch's own fp32 root is off by one bit now and then; rounded from fp64 it is the IEEE root.
    root = v.double().sqrt_().float()
    root.div_(math.sqrt(1 - beta2**moments.steps)).add_(hyper.eps)
    p.addcdiv_(m, root, value=-hyper.lr / (1 - beta1**moments.steps))


def unscale_(gradients: Iterable[torch.Tensor], rule: ScaleRule) -> bool:
    """Divides fp32 gradients by the scale, which ends the scale's step; gives whether any gradient had overflowed."""
    overflowed, reciprocal = False, torch.tensor(1 / rule.scale)
    for gradient in gradients:
        overflowed = overflowed or not bool(torch.isfinite(gradient).all())
        gradient.mul_(reciprocal)
    rule.update(overflowed=overflowed)
    return overflowed


def clip_(gradients: Sequence[torch.Tensor], max_norm: float) -> None:
    """Scales gradients in place so that their global norm is at most `max_norm`."""
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    for gradient in gradients:
        in_memory_order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        for block in gradient.permute(in_memory_order).reshape(-1).split(NORM_BLOCK):
            total += sum_of_squares(block)
    norm = total.sqrt().float()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def sum_of_squares(block: torch.Tensor) -> torch.Tensor:
    """The squares of a block, in fp64, added as `docs/bits.md` has it: rows of 16 pairwise, then halves of the row that is left."""
    squares = block.new_zeros(NORM_BLOCK, dtype=torch.float64)
    squares[: len(block)] = block
    rows = squares.square_().view(-1, NORM_ROW)
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    row = rows[0]
    while len(row) > 1:
        row = row[: len(row) // 2] + row[len(row) // 2 :]
    return row[0]


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A digest of every tensor's bytes, read one at a time: the weights of a managed model need not fit twice."""
    return {name: digest(state[name]) for name in state}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 over type, shape and bytes of a tensor, in hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data.tobytes()).hexdigest()


def compare_plain(run: PlainRun, managed: ManagedRun, *, advance: Callable[[int], None]) -> Comparison:
    """Runs as many steps as the managed run has losses, from the same random numbers, and says what differs."""
    rng.restore(managed.random_state)
    different: list[int] = []
    for number, loss in enumerate(managed.losses, start=1):
        # Bits, not values: NaN equals NaN here, and -0.0 does not equal 0.0.
        if run.step().hex() != loss.hex():
            different.append(number)
        advance(1)
    plain, final = digests(run.state_dict()), managed.final
    names = plain.keys() | final.keys()
    tensors = sorted(name for name in names if plain.get(name) != final.get(name))
    return Comparison(tuple(different), tuple(tensors), len(names), (managed.scaling, run.scaling))
