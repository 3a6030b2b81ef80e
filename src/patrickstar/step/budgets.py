"""Budgets: the bytes that each tier may hold, from what was asked for and what the machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.fixed_costs import FixedCosts, WorkspaceCosts
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG
from patrickstar.core.trace import Moment, Trace
from patrickstar.errors import ConfigError, DeviceError
from patrickstar.memory.allocator import Allocator
from patrickstar.memory.disk import DISK_SHARE, free_bytes
from patrickstar.optim.passes import PassBytes
from patrickstar.plan.planner import SPARE_SHARE, PlanBudgets
from patrickstar.plan.simulate import Simulation
from patrickstar.step.resources import Resources
from patrickstar.units import KIB, MIB, format_bytes, parse_size

_CPU = torch.device("cpu")
# What a tier's budget is of what is free there, where none is given.
HOST_SHARE = 0.8
DEVICE_SHARE = 0.9
_SMALL_TENSORS_BYTES = 4 * KIB  # of a step on a device: a loss that is kept, factors, counts, a grain for each
# And what kernels keep for each thread: no smaller host_memory is never grown past, decision record 0022.
_FLOOR_BYTES = 240 * MIB
_THREAD_BYTES = 8 * MIB  # what the matrix kernels keep for each thread that computes: decision record 0002
_EXPECTED_BYTES = 24 * MIB  # of `extra_bytes`, as a rule: the same record
_SMALL_BYTES = 16 * MIB  # of weights: the kernels of smaller models keep next to nothing


@dataclass(frozen=True, slots=True)
class Budgets(PlanBudgets):
    """The tiers and what they may hold.

    Attributes:
        host_binds: whether the user gave a bound on what the process holds, so that what the allocator keeps matters.
        resident_limit_bytes: what the process is to have resident at most but for its fixed costs: its size now less the weights that it will let go,
            and what chunks and activations may take of the host.
        retains: bytes the allocator takes for each byte of activations alive. fixed_bytes: what counts as activations at every moment: what kernels
            of the host keep between their calls, or the numbers of a step on a device. extra_bytes: what else the first steps leave in the process
            whatever their size (pages of libraries, imports, thread pools); kept free where it can be.
    """

    machine: Machine
    host_binds: bool
    resident_limit_bytes: int
    retains: float
    extra_bytes: int = 0
    fixed_bytes: int = 0
    passes: PassBytes = PassBytes()  # noqa: RUF009  (frozen)
    """The bytes that passes over planes take of a device, where one computes whose memory torch gives out."""
    device: torch.device = _CPU
    """Where the model computes, as torch names it: the CPU's for an emulated device too."""

    @property
    def stream_device(self) -> torch.device | None:
        """The device whose streams move and compute, if there is one."""
        return None if self.device.type == "cpu" else self.device

    @property
    def trial_device(self) -> torch.device:
        """The device of the tensors of a trial run: the one that computes, or the CPU in the place of one that is not here."""
        is_here = self.device.type == "cpu" or torch.get_device_module(self.device).is_available()
        return self.device if is_here else _CPU

    @property
    def bind(self) -> bool:
        """True where there is a bound, or a tier below, for which something may have to move."""
        return self.host_binds or self.machine.compute is not Tier.HOST or Tier.DISK in self.machine.budget

    def hold(self, state_bytes: int, beside_bytes: int) -> bool:
        """Tells whether all model states, of so many bytes, can stay on the compute tier beside so much of activations and workspaces."""
        return not self.bind or state_bytes + beside_bytes + self.spare_bytes <= self.room_bytes()

    @property
    def beside_bytes(self) -> int:
        """Bytes that the process is expected to take beside those that are counted: 0 where nobody gave a bound, little under a small one."""
        return min(_EXPECTED_BYTES, self.machine.budget[Tier.HOST] // SPARE_SHARE) if self.extra_bytes else 0

    def __str__(self) -> str:
        given = ", ".join(f"{tier.label} {format_bytes(self.machine.given(tier))}" for tier in self.machine.budget)
        if self.stream_device is None or not self.machine.costs.set_aside_bytes:
            return given
        left = format_bytes(self.machine.costs.set_aside_bytes)
        return f"{given}; of the device's {left} are fixed costs: left for workspaces of kernels until a first step has shown what they take"


def resolve_device(device: str | None) -> str:
    """The device a session uses: "cpu", "emulated" or that of a GPU, such as "cuda:0".

    Raises:
        DeviceError: CUDA was asked for and there is none, or no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise DeviceError(f'device="{device}": torch sees no CUDA device here; use device="cpu"')
        # Whoever has not chosen one takes that of the launcher's, which may show each process its own alone.
        local = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = torch.cuda.current_device() or (local if local < torch.cuda.device_count() else 0)
        number = int(device.partition(":")[2] or chosen)
        if number >= torch.cuda.device_count():
            raise DeviceError(f'device="{device}": torch sees {torch.cuda.device_count()} CUDA devices here')
        return f"cuda:{number}"
    return device


def find_resources(memory: MemoryOptions) -> Resources:
    """Resources of this machine for a session with these arguments. DeviceError: as `resolve_device`."""
    return Resources.of_this_machine(resolve_device(memory.device))


def find_budgets(
    memory: MemoryOptions,
    *,
    weight_bytes: int,
    absent_bytes: int = 0,
    has: Resources | None = None,
    local_ranks: int = 1,
) -> Budgets:
    """Budgets in bytes.

    Args:
        local_ranks: processes on this machine that share what its host and its disk may hold.
        weight_bytes: of the parameters as they are now, to be taken over. absent_bytes: of those without memory.
        has: what the machine has; None: this one now.
    Raises:
        ConfigError: `device_memory` where the host computes.
    """
    has = has or find_resources(memory)
    host_binds = memory.host_memory is not None
    if host_binds:
        host = parse_size(memory.host_memory, name="host_memory", total_bytes=has.host_total_bytes)  # type: ignore[arg-type]
    else:
        host = int((has.host_free_bytes + weight_bytes) * HOST_SHARE)
    host = max(0, host // local_ranks - has.staging_bytes)
    floor = _FLOOR_BYTES + _THREAD_BYTES * has.threads if host_binds and has.device == "cpu" else 0
    costs = FixedCosts(host, floor)
    budget = {Tier.HOST: costs.room_bytes}
    limit = has.resident_bytes - weight_bytes + costs.room_bytes
    if memory.disk is not None:
        free, wanted = has.disk_free_bytes, memory.disk_memory
        free = free_bytes(memory.disk) if free is None else free
        disk = int(free * DISK_SHARE) if wanted is None else parse_size(wanted, name="disk_memory", total_bytes=free)
        budget[Tier.DISK] = disk // local_ranks
    if has.device == "cpu":
        if memory.device_memory is not None:
            raise ConfigError(
                f'device_memory={memory.device_memory!r} with device="cpu": there is no device tier, the host computes; '
                f"give host_memory={memory.device_memory!r}"
            )
        if not host_binds:
            return Budgets(Machine(Tier.HOST, budget), host_binds, limit, 1.0)
        fixed = min(_THREAD_BYTES * has.threads, max(0, weight_bytes + absent_bytes - _SMALL_BYTES) // SPARE_SHARE)
        return Budgets(Machine(Tier.HOST, budget, costs), host_binds, limit, has.retains, has.extra_bytes, fixed)
    default, total = host, has.host_total_bytes
    if has.on_gpu:
        default, total = int(has.device_free_bytes * DEVICE_SHARE), has.device_total_bytes
    wanted = memory.device_memory
    given = default if wanted is None else parse_size(wanted, name="device_memory", total_bytes=total)
    costs = WorkspaceCosts(given, percent=has.workspace_percent)
    budget[Tier.DEVICE] = costs.room_bytes
    device = torch.device(has.device) if has.on_gpu else _CPU
    fixed = _SMALL_TENSORS_BYTES if has.on_gpu else 0
    return Budgets(Machine(Tier.DEVICE, budget, costs), host_binds, limit, 1.0, fixed_bytes=fixed, device=device)


def with_retention(trace: Trace, budgets: Budgets) -> Trace:
    """The trace as the process sees it.

    The allocator may take more than what is alive, kernels keep something between calls, and an update of a gradient that arrives takes scratch.
    """
    retains, fixed, scratch = budgets.retains, budgets.fixed_bytes, budgets.passes.update
    if retains == 1 and not fixed and not scratch:
        return trace

    def seen(moment: Moment) -> Moment:
        nonmodel, live = moment.nonmodel_bytes, moment.live_bytes
        if scratch and any(touch.ref.plane == EXP_AVG and touch.tier is None for touch in moment.touches):
            nonmodel = max(nonmodel, live + scratch)
        return replace(moment, nonmodel_bytes=int(nonmodel * retains) + fixed, live_bytes=int(live * retains) + fixed)

    return Trace(tuple(map(seen, trace.moments)))


def leaves_room(simulated: Simulation, trace: Trace, budgets: Budgets, found: Allocator) -> bool:
    """True where the worst moment of a plan leaves what the allocator may take beyond what is live."""
    tier = budgets.machine.compute
    return simulated.peak[tier.label] + int(trace.peak * found.overshoots) <= budgets.machine.budget[tier]
