"""The ordinary training loop, with AdamW written out by its definition: what the library must equal, bit for bit.

Shares nothing with the library. Forward and backward are plain PyTorch; the update is that of `tests/optim/definition.py`, which
depends on no kernel that the library may use.

Of several ranks it is one process that runs the forward and backward of each, one after the other, on replicas with the same parameters, and forms
f(1/p) * (((g0 + g1) + g2) + ...) in fp32 of each backward's gradients; zeros stand for those that a rank has not.

The definition, for a parameter p with gradient g at its t-th update; f(x) is x in double, rounded once to fp32:

    AdamW:  p = p * f(1 - lr * wd)                       Adam:  g = fma(f(wd), p, g)
    m = fma(f(1 - b1), g - m, m)
    v = fma(f(1 - b2) * g, g, v * f(b2))
    d = sqrt(v) / f(sqrt(1 - b2^t)) + f(eps)
    p = p + (f(-lr / (1 - b1^t)) * m) / d
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.optim.definition import Definition
from tests.parity.tiles import tiled_products
from tests.parity.zoo import STEPS, Case, micro_seed, schedule

Tensors = dict[str, Tensor]

NORM_BLOCK = 65_536
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}

# How losses are scaled in fp16, by DeepSpeed's rule: small numbers, so that five steps see all of it.
SCALE, WINDOW, HYSTERESIS = 2.0**17, 2, 2


@dataclass(frozen=True)
class Types:
    """What a precision such as "bf16", or "bf16-fp32" (kept in bf16, computed in fp32), means."""

    kept: torch.dtype
    compute: torch.dtype
    scales: bool

    @classmethod
    def of(cls, precision: str) -> Types | None:
        """None for fp32."""
        if precision == "fp32":
            return None
        kept, _, wide = precision.partition("-")
        return cls(NARROW[kept], torch.float32 if wide else NARROW[kept], kept == "fp16")


class LossScale:
    """A dynamic loss scale, from DeepSpeed's description of its own."""

    def __init__(self) -> None:
        self.scale = SCALE
        self.overflows_left = HYSTERESIS
        self.since_overflow = 0

    def update(self, *, overflowed: bool) -> None:
        if overflowed:
            self.since_overflow = 0
            if self.overflows_left > 1:
                self.overflows_left -= 1
            else:
                self.scale = max(1.0, self.scale / 2)
        else:
            self.since_overflow += 1
            if self.since_overflow % WINDOW == 0:
                self.scale *= 2
                self.overflows_left = HYSTERESIS


@dataclass
class Record:
    """Everything of a run that must have the same bits. Tensors are copies that nothing else writes to."""

    losses: list[Tensor] = field(default_factory=list)
    """One for each micro-step, before it is divided by their number."""
    gradients: list[Tensors] = field(default_factory=list)
    """By step: what has accumulated, before clipping; no entry for `None`."""
    norms: list[Tensor] = field(default_factory=list)
    """By step, fp32; empty without clipping."""
    evaluations: list[Tensor] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    """At the end, in fp32, by parameter name."""
    exp_avg: Tensors = field(default_factory=dict)
    exp_avg_sq: Tensors = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    """The loss scale after each step; empty where losses are not scaled."""
    skipped: int = 0
    """Steps whose gradients overflowed."""
    updates: dict[str, int] = field(default_factory=dict)
    """How often each parameter was updated; no entry for never."""
    buffers: Tensors = field(default_factory=dict)


@dataclass
class Moments:
    """What AdamW remembers of one parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    updates: int = 0


def train(
    case: Case,
    *,
    checkpointing: str = "none",
    accumulation: int = 1,
    clipping: bool = False,
    steps: int = STEPS,
    precision: str = "fp32",
    tile_rows: int | None = None,
    device: str = "cpu",
) -> Record:
    """A run in plain PyTorch, as a record on the CPU. `tile_rows`: how many rows of a weight are multiplied with at a time.

    `device`: where forward and backward run; updates are computed on the CPU wherever that is.
    """
    model = case.build(checkpointing).to(device)
    with nullcontext() if tile_rows is None else tiled_products(model, tile_rows) as tiled:
        (record,) = _train(case, [model], accumulation, clipping, steps, precision, device)
    assert tiled is None or tiled.count, f"{case.name}: no weight has more than {tile_rows} rows"
    return record


def train_ranks(
    case: Case,
    world: int,
    *,
    checkpointing: str,
    accumulation: int,
    clipping: bool,
    precision: str,
    no_sync: bool = False,
    steps: int = STEPS,
    device: str = "cpu",
) -> list[Record]:
    """The run of each of several ranks: they differ in losses, evaluations and buffers.

    `no_sync`: whether the mean is of the sums of all backwards of a step, which each rank adds in fp32; else of each backward.
    """
    replicas = [case.build(checkpointing).to(device) for _ in range(world)]
    return _train(case, replicas, accumulation, clipping, steps, precision, device, syncs=not no_sync)


def _train(
    case: Case,
    replicas: Sequence[nn.Module],
    accumulation: int,
    clipping: bool,
    steps: int,
    precision: str,
    device: str,
    *,
    syncs: bool = True,
) -> list[Record]:
    model, world = replicas[0], len(replicas)
    groups = case.groups(model)
    base = [dict(group) for group in groups]
    parameters = dict(model.named_parameters())
    kept = whole_parameters(model)
    types = Types.of(precision)
    scaling = LossScale() if types is not None and types.scales else None
    masters = make_masters(parameters, types, kept=kept)
    prepare(replicas, types)
    batches = [on(device, batch) for batch in case.batches(seed=0, count=steps * accumulation * world)]
    moments: dict[str, Moments] = {}
    records = [Record() for _ in replicas]
    record = records[0]
    for step in range(1, steps + 1):
        for replica in replicas:
            case.before_step(replica, step)
        for group, initial in zip(groups, base, strict=True):
            group.update(schedule(initial, step))
        micro_batches = batches[(step - 1) * accumulation * world : step * accumulation * world]
        scale = 1.0 if scaling is None else scaling.scale
        gradients = _backwards(case, replicas, micro_batches, step, records, types, scale, syncs=syncs)
        skips = scaling is not None and unscale(gradients, scaling, record)
        record.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        if clipping:
            record.norms.append(clip(gradients, case.max_norm))
        if not skips:
            update_all(
                groups, gradients, parameters, masters, moments, types=types, kept=kept, algorithm=case.algorithm
            )
        zeroed = parameters.values() if case.zero == "model" else [p for group in groups for p in group["params"]]
        for parameter in zeroed:
            parameter.grad = None
        for replica, of_rank in zip(replicas, records, strict=True):
            evaluate(case, replica, batches[0], step, of_rank)
    record.weights = {name: master.detach().clone() for name, master in masters.items()}
    record.exp_avg = {name: kept.exp_avg for name, kept in moments.items()}
    record.exp_avg_sq = {name: kept.exp_avg_sq for name, kept in moments.items()}
    record.updates = {name: kept.updates for name, kept in moments.items()}
    for replica, of_rank in zip(replicas, records, strict=True):
        of_rank.buffers = {name: buffer.detach().cpu().clone() for name, buffer in replica.named_buffers()}
    return [replace(record, losses=own.losses, evaluations=own.evaluations, buffers=own.buffers) for own in records]


def prepare(replicas: Sequence[nn.Module], types: Types | None) -> None:
    """Gives replicas the parameters of the first, and all of them buffers and inputs of the type that computes."""
    parameters = dict(replicas[0].named_parameters())
    for replica in replicas:
        for name, parameter in replica.named_parameters() if replica is not replicas[0] else ():
            parameter.data = parameters[name].data  # the same memory
        narrow_buffers_and_inputs(replica, None if types is None else types.compute)


def _backwards(
    case: Case,
    replicas: Sequence[nn.Module],
    batches: Sequence[dict[str, Any]],
    step: int,
    records: Sequence[Record],
    types: Types | None,
    scale: float,
    *,
    syncs: bool,
) -> Tensors:
    """The gradients of a step, by the batches of its micro-steps: of each one for each replica."""
    of_ranks, kept = [dict(replica.named_parameters()) for replica in replicas], whole_parameters(replicas[0])
    world, parameters = len(replicas), of_ranks[0]
    accumulation = len(batches) // world
    # One backward's gradients are kept in 16 bits, several add up in fp32.
    narrow_to = types.kept if types is not None and accumulation == 1 else None
    gradients: Tensors = {}
    alone = [Tensors() for _ in replicas]
    for number, batch in enumerate(batches):
        micro, rank = divmod(number, world)
        torch.manual_seed(micro_seed(step, micro, rank))
        loss = case.loss_of(replicas[rank], batch)
        (loss / accumulation * (1.0 if types is None or not types.scales else torch.tensor(scale))).backward()
        records[rank].losses.append(loss.detach().cpu().clone())
        if world > 1 or types is not None:
            add_up(gradients if world == 1 else alone[rank], of_ranks[rank], kept=narrow_to, whole=kept)
        if world > 1 and rank == world - 1 and (syncs or micro == accumulation - 1):
            add_mean(gradients, alone, parameters)
    if types is None and world == 1:
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {name: gradients[name].cpu() for name in parameters if name in gradients}


def evaluate(case: Case, model: nn.Module, batch: dict[str, Any], step: int, record: Record) -> None:
    """Looks at the model between steps: after the second under `no_grad`, after the fourth under `inference_mode`."""
    mode = {2: torch.no_grad, 4: torch.inference_mode}.get(step)
    if mode is None:
        return
    model.eval()
    with mode():
        record.evaluations.append((case.look or case.loss_of)(model, batch).cpu().clone())
    model.train()


def on(device: str, value: Any) -> Any:
    """A batch whose tensors are on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: on(device, item) for name, item in value.items()}
    return type(value)(on(device, item) for item in value) if isinstance(value, list | tuple) else value


# 16-bit types: an fp32 master beside each parameter, gradients widened after every backward


def make_masters(parameters: dict[str, nn.Parameter], types: Types | None, *, kept: Collection[str]) -> Tensors:
    """The tensors that are updated: the parameters themselves in fp32, else copies of them from before narrowing."""
    if types is None:
        return {name: parameter.detach().cpu() for name, parameter in parameters.items()}
    masters = {
        name: parameter.detach() if name in kept and parameter.is_cpu else parameter.detach().cpu().clone()
        for name, parameter in parameters.items()
    }
    for name, parameter in parameters.items():
        if name not in kept:
            if not parameter.requires_grad:  # of what is frozen the rounded weight is all there is
                masters[name].copy_(narrow(masters[name], types.kept))
            narrowed = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=types.compute, device=parameter.device
            )
            parameter.data = narrowed.copy_(narrow(masters[name], types.kept))
    return masters


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def whole_modules(model: nn.Module) -> list[nn.Module]:
    """What stays fp32 beside 16 bits: batch norms, and modules that the model itself lists."""
    listed = getattr(model, "_keep_in_fp32_modules", None) or ()
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, BATCH_NORMS) or set(path.split(".")) & set(listed)
    ]


def whole_parameters(model: nn.Module) -> set[str]:
    """Their parameters, by name."""
    whole = {id(parameter) for module in whole_modules(model) for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in whole}


def narrow_buffers_and_inputs(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Persistent floating buffers are of the 16-bit type, if there is one, and so is what the model is called with."""
    if dtype is None:
        return
    whole = {id(buffer) for module in whole_modules(model) for buffer in module.buffers()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            persistent = buffer is not None and name not in module._non_persistent_buffers_set
            if persistent and buffer.is_floating_point() and id(buffer) not in whole:
                module._buffers[name] = buffer.to(dtype)

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {name: cast(item) for name, item in value.items()}
        return type(value)(cast(item) for item in value) if isinstance(value, list | tuple) else value

    model.register_forward_pre_hook(lambda _, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True)


def narrow(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that stands for a master: fp16 to nearest even; bf16 to nearest, ties away from zero."""
    if dtype is torch.float16:
        return master.half()
    # Adding half of the last kept place to the magnitude carries exactly where the dropped half is 0.5 or more.
    rounded = (master.contiguous().view(torch.int32) + 0x8000) & -0x10000
    return rounded.view(torch.float32).bfloat16()


def unscale(gradients: Tensors, scaling: LossScale, record: Record) -> bool:
    """Divides by the scale, which changes for the next step; gives back whether this step's gradients overflowed."""
    overflowed = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    for gradient in gradients.values():
        gradient.mul_(torch.tensor(1.0 / scaling.scale))
    scaling.update(overflowed=overflowed)
    record.scales.append(scaling.scale)
    record.skipped += overflowed
    return overflowed


def add_up(
    gradients: Tensors, parameters: dict[str, nn.Parameter], *, kept: torch.dtype | None, whole: Collection[str]
) -> None:
    """Adds one backward's gradients, which autograd summed in the parameter's type, in fp32; the first is copied.

    `kept`: the 16-bit type that they are kept in until the step, but for those of `whole`, if any.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            wide = parameter.grad.float()
            if kept is not None and name not in whole:
                wide = wide.to(kept).float()
            gradients[name] = gradients[name].add_(wide) if name in gradients else wide
            parameter.grad = None


def add_mean(gradients: Tensors, alone: Sequence[Tensors], parameters: dict[str, nn.Parameter]) -> None:
    """Adds the mean of what ranks have alone, summed in their order, and takes it from them."""
    for name, parameter in parameters.items():
        if any(name in own for own in alone):
            zeros = torch.zeros_like(parameter, dtype=torch.float32)
            total, *others = (own.pop(name, zeros) for own in alone)
            for other in others:
                total = total + other
            mean = total * torch.tensor(1.0 / len(alone))
            gradients[name] = gradients[name].add_(mean) if name in gradients else mean


# Norm and clipping


def global_norm(gradients: Tensors) -> Tensor:
    """The norm over all gradients, fp32: squares summed in fp64 by a tree for each block of each tensor, in order, rounded once."""
    total = 0.0
    for gradient in gradients.values():  # in the order of `named_parameters`
        flat = in_memory_order(gradient).numpy().astype(np.float64)
        for start in range(0, flat.size, NORM_BLOCK):
            total += sum_of_squares(flat[start : start + NORM_BLOCK])
    return torch.tensor(math.sqrt(total), dtype=torch.float64).float()


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as 1-D, in the order in which it lies in memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def sum_of_squares(block: np.ndarray[Any, Any]) -> float:
    """Of up to 65,536 elements, in rows of 16: neighbours are added until a row is left, then halves until a number is."""
    squares = np.zeros(NORM_BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        squares[: block.size] = block * block
        rows = squares.reshape(-1, 16)
        while len(rows) > 1:
            rows = rows.reshape(-1, 2, 16)
            rows = rows[:, 0] + rows[:, 1]
        (row,) = rows
        for width in (8, 4, 2, 1):
            row = np.array([row[i] + row[i + width] for i in range(width)])
    return float(row[0])


def clip(gradients: Tensors, max_norm: float) -> Tensor:
    """Scales the gradients in place, by 1 where they are within the norm already; returns the norm before."""
    norm = global_norm(gradients)
    factor = clip_factor(norm, max_norm)
    for gradient in gradients.values():
        gradient.mul_(factor)
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What `torch.nn.utils.clip_grads_with_norm_` multiplies by, one fp32 operation at a time.

    PyTorch computes a number divided by a tensor as the tensor's reciprocal times the number.
    """
    one = np.float32(1.0)
    factor = (one / (np.float32(norm.item()) + np.float32(1e-6))) * np.float32(max_norm)
    return torch.tensor(min(factor, one), dtype=torch.float32)


# The update


def update_all(
    groups: list[dict[str, Any]],
    gradients: Tensors,
    parameters: dict[str, nn.Parameter],
    masters: Tensors,
    moments: dict[str, Moments],
    *,
    types: Types | None,
    kept: Collection[str],
    algorithm: str,
) -> None:
    """Updates every parameter that a group holds and that has a gradient; the rest keep their bits."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name in gradients:
                update(masters[name], gradients[name], moments, name, group, algorithm=algorithm)
                if types is not None and name not in kept:
                    parameter.data.copy_(narrow(masters[name], types.kept))
                elif not parameter.is_cpu:
                    parameter.data.copy_(masters[name])


def update(
    weight: Tensor, gradient: Tensor, moments: dict[str, Moments], name: str, group: dict[str, Any], *, algorithm: str
) -> None:
    """One step of the definition, in place on the weight (of any strides) and on the parameter's moments."""
    kept = moments.setdefault(name, Moments(torch.zeros_like(weight), torch.zeros_like(weight)))
    kept.updates += 1
    numbers = {key: group[key] for key in ("lr", "eps", "weight_decay")}
    hyper = SimpleNamespace(beta1=group["betas"][0], beta2=group["betas"][1], decoupled=algorithm == "AdamW", **numbers)
    Definition().update(weight, gradient, kept.exp_avg, kept.exp_avg_sq, step=kept.updates, hyper=hyper)
