"""Machines that a step is planned for without being there: a name of the table, or a file as `doctor --measure` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from patrickstar.cli.machines import BOTH, MACHINES, RATES, MachinePreset
from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.json_file import read_json
from patrickstar.config.kinds import RATE, TEXT, WHOLE, Kind
from patrickstar.core.shard_layout import RankOf
from patrickstar.errors import ConfigError, Error, nearest
from patrickstar.units import MIB, format_bytes

if TYPE_CHECKING:
    from patrickstar.step.resources import Resources

_GRANULE_BYTES: Final = 2 * MIB  # of the driver's virtual memory, on every device so far


class MachineError(Error):
    """A machine's file holds something other than a machine's figures."""


@dataclass(frozen=True, slots=True)
class MachineSource:
    """A machine that is known by its figures: one rank of a step is planned for.

    It has one of the accelerators, and of the host's memory its share among the ranks there; alone all of it.
    """

    name: str
    figures: MachinePreset

    @classmethod
    def find(cls, name: str) -> MachineSource:
        """The machine that `--machine NAME|FILE` means; a file of that name goes before a known name.

        Raises:
            ConfigError: nothing of that name. MachineError: the file is no machine's.
        """
        path = Path(name)
        if path.is_file():
            return cls(name, _read(path))
        if path.suffix == ".json" or len(path.parts) > 1 or path.is_dir():
            raise ConfigError(f"--machine {name}: no such file")
        if name not in MACHINES:
            raise ConfigError(
                f"--machine {name}: no name that `patrickstar machines` lists, and no file{nearest(name, MACHINES)}"
            )
        return cls(name, MACHINES[name])

    def resources(self, memory: MemoryOptions) -> Resources:
        """Resources of the machine for a session with these arguments. ConfigError: it has no such device, or no disk."""
        from patrickstar.memory.allocator import allocator
        from patrickstar.step.resources import Resources

        figures, device = self.figures, self._device(memory.device)
        on_gpu = device not in ("cpu", "emulated")
        if memory.disk is not None and not figures.disk_bytes:
            raise ConfigError(f"--disk with --machine {self.name}: its figures have no disk; leave it out")
        known = allocator(returning=True)  # of this computer: those that are found as a rule do the same
        return Resources(
            device=device,
            fast_types=frozenset(figures.fast_16bit if on_gpu or not figures.devices else ()),
            host_free_bytes=figures.host_bytes,
            host_total_bytes=figures.host_bytes,
            device_free_bytes=figures.device_bytes - figures.context_bytes if on_gpu else 0,
            device_total_bytes=figures.device_bytes if on_gpu else 0,
            granule_bytes=_GRANULE_BYTES if on_gpu else 0,
            workspace_percent=figures.workspace_percent if on_gpu else 0,
            disk_free_bytes=figures.disk_bytes,
            threads=max(1, figures.threads),
            retains=known.retains,
            extra_bytes=known.extra_bytes,
        )

    def _device(self, wanted: str | None) -> str:
        figures = self.figures
        if wanted is None:
            return "cuda:0" if figures.devices else "cpu"
        if wanted == "cpu" and not figures.threads:
            raise ConfigError(
                f"--device cpu with --machine {self.name}: its figures do not say how many threads compute on the host; "
                "leave --device out to plan for its accelerator"
            )
        if wanted.startswith("cuda"):
            number = int(wanted.partition(":")[2] or 0)
            if number >= figures.devices:
                has = f"{figures.devices} CUDA devices" if figures.devices else "no CUDA device"
                raise ConfigError(f"--device {wanted} with --machine {self.name}: it has {has}; leave --device out")
            return f"cuda:{number}"
        return wanted

    def expect_within(self, budgets: Mapping[str, int], resources: Resources) -> None:
        """Raises ConfigError where a budget is more than the machine has. `budgets`: by tier."""
        has = {
            "device": resources.device_total_bytes or resources.host_total_bytes,
            "host": resources.host_total_bytes,
            "disk": resources.disk_free_bytes or 0,
        }
        for tier, budget_bytes in budgets.items():
            if budget_bytes > has[tier]:
                raise ConfigError(
                    f"--{tier}-memory {format_bytes(budget_bytes)} with --machine {self.name}: it has {format_bytes(has[tier])}; "
                    "give less, or leave it out"
                )

    def lines(self, memory: MemoryOptions, resources: Resources, which: RankOf) -> list[str]:
        """The machine and its budgets in words: what is set aside, and for what."""
        from patrickstar.step.budgets import DEVICE_SHARE, HOST_SHARE

        figures = self.figures
        host, device = format_bytes(figures.host_bytes), format_bytes(figures.device_bytes)
        has = f"{figures.devices} x {figures.device} of {device}, host {host}" if figures.devices else f"host {host}"
        lines = [f"machine {self.name}: {has}; a forecast from figures, nothing of it was run there"]
        if figures.devices > 1 and which.size == 1:
            lines.append(
                f"  one rank, alone on the node: 1 of its {figures.devices} devices, and all of its host memory"
            )
        if resources.on_gpu and memory.device_memory is None:
            lines.append(
                f"  device  {DEVICE_SHARE:.0%} of free memory: {device} less {format_bytes(figures.context_bytes)} for the driver and CUDA's "
                "context. The rest is for fragments in torch's allocator"
            )
        if memory.host_memory is None:
            lines.append(f"  host    {HOST_SHARE:.0%} of {host}. The rest is for the system and the process itself")
        return lines


def write_machine(figures: MachinePreset, path: Path) -> None:
    """Writes a machine's file; speeds that are 0 were not measured, and are left out."""
    row = {name: value for name, value in asdict(figures).items() if name not in RATES or value}
    path.write_text(json.dumps(row, indent=2) + "\n")


def _read(path: Path) -> MachinePreset:
    row = read_json(path, what="--machine", damaged=MachineError)
    problems = [f"{name}: there is no such figure{nearest(name, _KINDS)}" for name in row if name not in _KINDS]
    kinds = {name: kind for name, kind in _KINDS.items() if name in row}
    problems += [problem for name, kind in kinds.items() for problem in kind.problems(name, row[name])]
    if not problems:
        found = MachinePreset(**{"host_bytes": 0} | {name: kind.convert(row[name]) for name, kind in kinds.items()})
        problems = _together(found)
        if not problems:
            return found
    raise MachineError(f"--machine {path}: " + "\n  ".join(problems))


_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        **dict.fromkeys(MachinePreset.__dataclass_fields__, WHOLE),
        **dict.fromkeys(RATES, RATE),
        "device": Kind("the name of the accelerator, or an empty text", TEXT.takes),
        "fast_16bit": Kind(
            "a list of bf16 and fp16", lambda v: isinstance(v, list) and all(x in BOTH for x in v), tuple
        ),
    }
)


def _together(found: MachinePreset) -> list[str]:
    """Problems of figures that are each well."""
    problems = []
    if not found.host_bytes:
        problems.append("host_bytes=0: every machine has host memory")
    if bool(found.devices) != bool(found.device_bytes):
        problems.append(f"devices={found.devices} with device_bytes={found.device_bytes}: give both, or 0 for both")
    if found.context_bytes >= found.device_bytes > 0:
        problems.append(f"context_bytes={found.context_bytes}: nothing is left of device_bytes={found.device_bytes}")
    if found.workspace_percent >= 100:
        problems.append(f"workspace_percent={found.workspace_percent}: nothing is left of a device's budget")
    if not found.devices and not found.threads:
        problems.append("threads=0: without an accelerator the host computes; say on how many threads")
    return problems
