"""Budgets: the bytes that each tier may hold, from what was asked for and what the machine has."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.fixed_costs import FixedCosts
from patrickstar.core.machine import Machine, Tier
from patrickstar.errors import ConfigError, DeviceError
from patrickstar.memory.allocator import allocator
from patrickstar.memory.filesystem import default_disk_bytes, free_bytes
from patrickstar.memory.process import available_bytes, resident_bytes, total_bytes
from patrickstar.units import MIB, format_bytes, parse_size

__all__ = ["Budgets", "find_budgets"]

_CPU = torch.device("cpu")
_HOST_SHARE = 0.8
_DEVICE_SHARE = 0.9  # of what is free
_FLOOR_BYTES = 240 * MIB  # and what kernels keep for each thread
_SPARE_SHARE = 16
_THREAD_BYTES = 8 * MIB  # what the matrix kernels keep for each thread that computes: decision record 0002
_EXPECTED_BYTES = 24 * MIB  # of `extra_bytes`, as a rule: the same record
_SMALL_BYTES = 16 * MIB  # of weights: the kernels of smaller models keep next to nothing
_log = logging.getLogger("patrickstar")


@dataclass(frozen=True, slots=True)
class Budgets:
    """The tiers and what they may hold.

    Attributes:
        host_binds: whether the user gave a bound on what the process holds, so that what the allocator keeps matters.
        resident_limit_bytes: what the process is to have resident at most but for its fixed costs: its size now less the weights that it will let go,
            and what chunks and activations may take of the host.
        retains: bytes the allocator takes for each byte of activations alive. fixed_bytes: what kernels keep between their calls, which counts
            as activations do. extra_bytes: what else the first steps leave in the process whatever their size (pages of libraries, imports,
            thread pools); kept free where it can be.
    """

    machine: Machine
    host_binds: bool
    resident_limit_bytes: int
    retains: float
    extra_bytes: int = 0
    fixed_bytes: int = 0
    device: torch.device = _CPU
    """Where the model computes, as torch names it: the CPU's for an emulated device too."""

    @property
    def stream_device(self) -> torch.device | None:
        """The device whose streams move and compute, if there is one."""
        return None if self.device.type == "cpu" else self.device

    @property
    def bind(self) -> bool:
        """True where there is a bound, or a tier below, for which something may have to move."""
        return self.host_binds or self.machine.compute is not Tier.HOST or Tier.DISK in self.machine.budget

    def machine_for(self, need_bytes: int, *, taken_bytes: int = 0) -> Machine:
        """The machine to plan a stretch for that needs at least so much of the compute tier.

        Args:
            taken_bytes: what the user has taken of that tier's budget.
        """
        compute = self.machine.compute
        budget = self.machine.budget[compute] - taken_bytes
        room = max(budget - self.spare_bytes, min(budget, need_bytes))
        return Machine(compute, {**self.machine.budget, compute: room}, self.machine.costs)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the compute tier that are kept free where it can be: `extra_bytes`, but no more than a sixteenth of a small budget."""
        return min(self.extra_bytes, self.machine.budget[self.machine.compute] // _SPARE_SHARE)

    @property
    def beside_bytes(self) -> int:
        """Bytes that the process is expected to take beside those that are counted: 0 where nobody gave a bound, little under a small one."""
        return min(_EXPECTED_BYTES, self.machine.budget[Tier.HOST] // _SPARE_SHARE) if self.extra_bytes else 0

    def __str__(self) -> str:
        return ", ".join(f"{tier.label} {format_bytes(self.machine.given(tier))}" for tier in self.machine.budget)


def resolve_device(device: str | None) -> str:
    """The device a session uses: "cpu", "emulated" or that of a GPU, such as "cuda:0".

    Raises:
        DeviceError: CUDA was asked for and there is none, or no such device.
    """
    if device is None:
        if torch.cuda.is_available():
            _log.warning(
                'device was not given: this session uses device="cpu". device="cuda" trains on the GPU, as far as that is there yet'
            )
        return "cpu"
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise DeviceError(f'device="{device}": torch sees no CUDA device here; use device="cpu"')
        number = int(device.partition(":")[2] or torch.cuda.current_device())
        if number >= torch.cuda.device_count():
            raise DeviceError(f'device="{device}": torch sees {torch.cuda.device_count()} CUDA devices here')
        return f"cuda:{number}"
    return device


def find_budgets(memory: MemoryOptions, *, weight_bytes: int, absent_bytes: int = 0) -> Budgets:
    """Budgets in bytes. `weight_bytes`: of the parameters as they are now, to be taken over. `absent_bytes`: of those without memory."""
    device = resolve_device(memory.device)
    host_binds = memory.host_memory is not None
    if host_binds:
        host = parse_size(memory.host_memory, name="host_memory", total_bytes=total_bytes())  # type: ignore[arg-type]
    else:
        host = int((available_bytes() + weight_bytes) * _HOST_SHARE)
    costs = FixedCosts(host, _floor_bytes()) if host_binds and device == "cpu" else FixedCosts(host)
    budget = {Tier.HOST: costs.room_bytes}
    limit = resident_bytes() - weight_bytes + costs.room_bytes
    if memory.disk is not None:
        budget[Tier.DISK] = _disk_budget(memory.disk, memory.disk_memory)
    if device == "cpu":
        if memory.device_memory is not None:
            raise ConfigError(
                f'device_memory={memory.device_memory!r} with device="cpu": there is no device tier, the host computes; '
                f"give host_memory={memory.device_memory!r}"
            )
        if not host_binds:
            return Budgets(Machine(Tier.HOST, budget), host_binds, limit, 1.0)
        known = allocator(returning=True)
        fixed = min(
            _THREAD_BYTES * torch.get_num_threads(), max(0, weight_bytes + absent_bytes - _SMALL_BYTES) // _SPARE_SHARE
        )
        return Budgets(Machine(Tier.HOST, budget, costs), host_binds, limit, known.retains, known.extra_bytes, fixed)
    wanted = memory.device_memory
    if device != "emulated":
        free, total = torch.cuda.mem_get_info(torch.device(device))
        budget[Tier.DEVICE] = (
            int(free * _DEVICE_SHARE) if wanted is None else parse_size(wanted, name="device_memory", total_bytes=total)
        )
        return Budgets(Machine(Tier.DEVICE, budget), host_binds, limit, 1.0, device=torch.device(device))
    budget[Tier.DEVICE] = (
        host if wanted is None else parse_size(wanted, name="device_memory", total_bytes=total_bytes())
    )
    return Budgets(Machine(Tier.DEVICE, budget), host_binds, limit, 1.0)


def _floor_bytes() -> int:
    """The smallest `host_memory` that the process never grows past, fixed costs included: decision record 0022."""
    return _FLOOR_BYTES + _THREAD_BYTES * torch.get_num_threads()


def _disk_budget(directory: Path, wanted: int | str | None) -> int:
    if wanted is None:
        return default_disk_bytes(directory)
    return parse_size(wanted, name="disk_memory", total_bytes=free_bytes(directory))
