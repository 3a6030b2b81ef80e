"""`--compare-plain`: the steps of a run in plain PyTorch, and whether they have the same bits.

The update is torch's own fused Adam on fp32 masters, on the CPU; what it does to the last elements of a tensor depends on where the tensor ends
(`docs/bits.md`), so masters end with zeros in a whole vector. Clipping and the rounding of 16-bit weights are written out below, in torch's own
operations. The gradients are autograd's. Of the library's arithmetic only the schedule and the rule of the loss scale take part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from patrickstar.checkpoint import rng
from patrickstar.cli.batches import Batches
from patrickstar.cli.loop import backward
from patrickstar.config.options import LossScale
from patrickstar.config.settings import OptimizerSettings
from patrickstar.optim.hyper import Scheduler, build_optimizer
from patrickstar.optim.scale_rule import ScaleRule
from patrickstar.optim.schedules import Rates
from patrickstar.parameters.bound import names_by_id
from patrickstar.step.precision import lies_in

VECTOR_NUMEL: Final = 16  # the most elements of a processor's vector
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrecision:
    """The type that weights are rounded to, and the type that they compute in.

    Attributes:
        kept: bfloat16 or float16; float32: nothing is rounded. compute: that, or float32: then a weight is the very same rounded value, in fp32.
        gradient: what one backward's gradients are rounded to; float32: not at all, because several add up.
        whole: paths of modules that stay fp32 whole, and of all inside of them. loss_scale: of losses; None: they are not scaled.
    """

    kept: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    whole: Collection[str] = ()
    loss_scale: LossScale | None = None


@dataclass(eq=False)
class PlainRun:
    """The steps of a run, from the model, batches and schedule that the managed run began with.

    The model is narrowed to 16 bits, with fp32 masters beside, but for modules that stay fp32 whole. `batches`: those of each rank, in order.
    Each rank draws what the others draw; gradients of ranks are added in that order in fp32, and multiplied by f(1/p).
    """

    model: nn.Module
    batches: Sequence[Batches]
    optimizer: OptimizerSettings
    schedule: Rates
    clip: float | None
    accumulate: int
    precision: PlainPrecision

    def __post_init__(self) -> None:
        model, precision = self.model, self.precision
        named, whole = dict(model.named_parameters()), precision.whole
        self._kept = {name: torch.float32 if lies_in(name, whole) else precision.kept for name in named}
        self._masters = {name: nn.Parameter(_padded(p)) for name, p in named.items() if p.requires_grad}
        self._optimizer = build_optimizer(self._masters.values(), self.optimizer, fused=True)
        self._scheduler = Scheduler(self._optimizer, self.schedule)
        for name, parameter in named.items():
            if self._kept[name] is not torch.float32:
                # Strides stay as they are: torch may choose another kernel by them.
                strides, device = parameter.stride(), parameter.device
                weight = torch.empty_strided(parameter.shape, strides, dtype=precision.compute, device=device)
                parameter.data = weight.copy_(narrow(parameter.detach(), precision.kept))
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to(torch.float32 if path in whole else precision.compute)
        self._gradients: dict[str, Tensor] = {}
        self._scale = None if precision.loss_scale is None else ScaleRule(precision.loss_scale)
        self._skipped = 0
        device = next(model.parameters()).device
        self._draws_too = None if device.type == "cpu" else device  # beside the CPU

    def step(self) -> float:
        """Runs one step and gives its loss. Where gradients overflow nothing is updated, and the schedule waits."""
        rule = self._scale
        scale = (lambda loss: loss) if rule is None else torch.tensor(rule.scale).mul
        losses = [0.0] * len(self.batches)
        for _ in range(self.accumulate):
            drawn, of_ranks = rng.capture(self._draws_too), list[dict[str, Tensor]]()
            for rank, batches in enumerate(self.batches):
                rng.restore(drawn, self._draws_too)
                losses[rank] += backward(self.model, batches, self.accumulate, scale=scale)
                of_ranks.append(self._take())
            self._add(of_ranks)
        loss = sum(total / self.accumulate for total in losses) / len(losses)
        gradients = {name: self._gradients[name] for name in self._masters if name in self._gradients}
        self._gradients = {}
        with torch.no_grad():
            if rule is not None and unscale_(gradients.values(), rule):
                self._skipped += 1
            else:
                self._update(gradients)
        return loss

    def _take(self) -> dict[str, Tensor]:
        """The gradients of a backward that is over, in fp32."""
        taken = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                is_whole = self._kept[name] is torch.float32
                taken[name] = parameter.grad.to(torch.float32 if is_whole else self.precision.gradient).float()
                parameter.grad = None
        return taken

    def _add(self, of_ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Adds the mean of all ranks' gradients to the sums. A rank without one adds zeros where another has one."""
        for name in self._kept:
            if any(name in own for own in of_ranks):
                first, *others = (own.get(name, torch.zeros(())) for own in of_ranks)
                mean = sum(others, first).mul(1 / len(of_ranks)) if others else first
                self._gradients[name] = self._gradients[name].add_(mean) if name in self._gradients else mean

    def _update(self, gradients: dict[str, Tensor]) -> None:
        if self.clip is not None:
            clip_(list(gradients.values()), self.clip)
        for name, master in self._masters.items():
            master.grad = _padded(gradients[name]) if name in gradients else None
        self._optimizer.step()
        self._scheduler.step()
        for name, parameter in self.model.named_parameters():
            if name in self._masters:
                parameter.data.copy_(narrow(self._master(name, parameter), self._kept[name]))

    def _master(self, name: str, parameter: nn.Parameter) -> Tensor:
        """A parameter's values in fp32: of what is frozen the rounded weight is all there is."""
        if name not in self._masters:
            return parameter.detach().float()
        return self._masters[name].detach()[: parameter.numel()].view(parameter.shape)

    @property
    def scaling(self) -> Scaling | None:
        """Scaling of the losses so far."""
        return None if self._scale is None else Scaling(self._scale.scale, self._skipped)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, with masters for parameters."""
        names = names_by_id(dict(self.model.named_parameters()))
        state = self.model.state_dict(keep_vars=True)
        return {
            key: self._master(names[id(value)], value) if id(value) in names else value for key, value in state.items()
        }


@dataclass(frozen=True, slots=True)
class ManagedRun:
    """A managed run to compare with: its losses step by step, digests of its final state, and the random numbers at its beginning (`rng.capture`)."""

    losses: Sequence[float]
    final: Mapping[str, str]
    random_state: Mapping[str, Any]
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a managed run and the plain one: steps whose losses differ, from 1, and names of final tensors that do or that one lacks.

    Attributes:
        scaling: of losses, managed and plain; None: they were not scaled.
    """

    losses: tuple[int, ...]
    tensors: tuple[str, ...]
    compared: int
    scaling: tuple[Scaling | None, Scaling | None]

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
    tensors = sorted({name for name, _ in plain.items() ^ final.items()})
    return Comparison(
        tuple(different), tuple(tensors), len(plain.keys() | final.keys()), (managed.scaling, run.scaling)
    )


def _padded(tensor: Tensor) -> Tensor:
    """A copy of the elements in fp32, on the CPU, with zeros up to a whole number of vectors."""
    numel = tensor.numel()
    flat = torch.zeros(numel + -numel % VECTOR_NUMEL)
    flat[:numel] = tensor.detach().reshape(-1)
    return flat


def unscale_(gradients: Iterable[Tensor], rule: ScaleRule) -> bool:
    """Divides fp32 gradients by the scale, which ends the scale's step; gives whether any gradient had overflowed."""
    overflowed, reciprocal = False, torch.tensor(1 / rule.scale)
    for gradient in gradients:
        overflowed = overflowed or not bool(torch.isfinite(gradient).all())
        gradient.mul_(reciprocal)
    rule.update(overflowed=overflowed)
    return overflowed


def clip_(gradients: Sequence[Tensor], max_norm: float) -> None:
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


def sum_of_squares(block: Tensor) -> Tensor:
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


def narrow(master: Tensor, kept: torch.dtype) -> Tensor:
    """The weight of a master: fp16 rounds ties to even, as torch does; bf16 away from zero, as a split master must.

    Half of the last place that is kept carries where it must.
    """
    if kept is not torch.bfloat16:
        return master.to(kept)
    rounded = (master.contiguous().view(torch.int32) + 0x8000) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16).view(master.shape)
