"""Machines that a step is planned for without being there: a name of the table, or a file as `doctor --measure` writes it; the verb `machines`.

Figures of the table are vendors' data sheets unless a line says otherwise. A preset is one node. Rates are peaks, in bytes and floating-point
operations per second, in one direction: what a plan may hope for at best. Matmul rates are dense (without sparsity), 16-bit with fp32 accumulation.

    v100-yard       the paper's first platform: 8 V100-SXM2-32GB, 240 GB of host memory (arXiv:2108.05818); NVIDIA V100
                    data sheet: 125 TFLOP/s, PCIe 3 x16
    a100-superpod   the paper's second platform: 8 A100-40GB, 1 TB; NVIDIA A100 data sheet: 312 TFLOP/s, PCIe 4 x16
    h200            NVIDIA H200 SXM data sheet: 989 TFLOP/s, PCIe 5 x16; with 128 GiB of host memory, and 139 GiB of the
                    device's as torch reports them
    gpu-24g         NVIDIA Ada architecture paper, GeForce RTX 4090: 165.2 TFLOP/s, PCIe 4 x16
    laptop-8g       the same paper and NVIDIA's laptop page, GeForce RTX 4060 Laptop: PCIe 4 x8; 30 TFLOP/s at 100 W are
                    our reading of its clocks
    cpu             two cores and 24 GiB, measured: matmul 47 GFLOP/s in 16 bits, disk 0.9 GB/s

Which 16-bit types are fast: bf16 from compute capability 8.0 on, fp16 from 7.0 on (NVIDIA's CUDA C++ programming guide);
the two cores are slow in both. How much of a device its driver and CUDA's context take was measured on none of them:
1 GiB is set aside by rule. What kernels take as workspaces was measured on none either: 3 % of a device's budget, and 256 MiB
at least, are left for them by rule, until a first step there has shown it.

NVMe rates are those of a drive common in such a machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from patrickstar.config.arguments import MemoryOptions
from patrickstar.config.json_file import read_json
from patrickstar.config.kinds import RATE, TEXT, WHOLE, Kind
from patrickstar.core.fixed_costs import GPU_WORKSPACE_PERCENT
from patrickstar.core.shard_layout import RankOf
from patrickstar.errors import ConfigError, Error, nearest
from patrickstar.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from patrickstar.step.resources import Resources

_GRANULE_BYTES: Final = 2 * MIB  # of the driver's virtual memory, on every device so far
GB: Final = 10**9
TERA: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePreset:
    """One node: its accelerators, its memory by tier, and the peak rates between and inside them. 0: it has none, or it is not known."""

    host_bytes: int
    disk_bytes: int = 0
    threads: int = 0
    """Threads that compute on the host; 0: nothing can be planned for the host alone."""

    device: str = ""
    """Name of the accelerator; "" where there is none."""
    devices: int = 0
    device_bytes: int = 0
    context_bytes: int = 0
    """Memory of one accelerator that nobody can allocate: the driver's, and of the context of one process."""
    workspace_percent: int = 0
    """Of the budget of one accelerator, what is left for workspaces of kernels until a first step has shown what they take."""
    fast_16bit: tuple[str, ...] = ()
    """The 16-bit types that what computes is fast in: "bf16", "fp16"."""

    matmul_16bit: float = 0.0
    """FLOP/s of one accelerator, or of the node's CPU."""
    link: float = 0.0
    """Bytes per second between host and one accelerator, each way."""
    disk_read: float = 0.0


RATES: Final = ("matmul_16bit", "link", "disk_read")
BOTH: Final = ("bf16", "fp16")


def _with_gpus(
    devices: int, device: str, device_gib: int, *, tflops: float, link: float, disk_tb: int = 0, **more: Any
) -> MachinePreset:
    """A node with accelerators of one kind; the rate of `link` in GB/s."""
    by_rule = {"context_bytes": GIB, "workspace_percent": GPU_WORKSPACE_PERCENT, "fast_16bit": BOTH}
    sizes = {"device_bytes": device_gib * GIB, "disk_bytes": disk_tb * 1000 * GB}
    rates = {"matmul_16bit": tflops * TERA, "link": link * GB}
    return MachinePreset(device=device, devices=devices, **{**by_rule, **sizes, **rates, **more})


MACHINES: Final[Mapping[str, MachinePreset]] = MappingProxyType(
    {
        "v100-yard": _with_gpus(
            8, "V100-SXM2-32GB", 32, tflops=125, link=15.75, host_bytes=240 * GB, fast_16bit=("fp16",)
        ),
        "a100-superpod": _with_gpus(8, "A100-SXM4-40GB", 40, tflops=312, link=31.5, host_bytes=1000 * GB),
        "h200": _with_gpus(
            1, "H200-SXM-141GB", 139, tflops=989, link=63, host_bytes=128 * GIB, disk_tb=1, disk_read=7 * GB
        ),
        "gpu-24g": _with_gpus(
            1, "RTX 4090 24GB", 24, tflops=165.2, link=31.5, host_bytes=64 * GIB, disk_tb=2, disk_read=7 * GB
        ),
        "laptop-8g": _with_gpus(
            1, "RTX 4060 Laptop 8GB", 8, tflops=30, link=15.75, host_bytes=32 * GIB, disk_tb=1, disk_read=3.5 * GB
        ),
        "cpu": MachinePreset(
            host_bytes=24 * GIB, disk_bytes=100 * GB, threads=2, matmul_16bit=0.047 * TERA, disk_read=0.9 * GB
        ),
    }
)


@click.command()
def machines() -> None:
    """Machines with known figures, each one node."""
    from patrickstar.cli.display import print_table

    rows: list[tuple[str, ...]] = [
        ("name", "accelerators", "each", "host", "16-bit matmul", "link each way", "disk read")
    ]
    for name, machine in MACHINES.items():
        devices = f"{machine.devices} x {machine.device}" if machine.devices else "none"
        each = format_bytes(machine.device_bytes) if machine.devices else "-"
        rates = [f"{rate / 1e9:.4g} GB/s" if rate else "-" for rate in (machine.link, machine.disk_read)]
        matmul = f"{machine.matmul_16bit / 1e12:.4g} TFLOP/s"
        rows.append((name, devices, each, format_bytes(machine.host_bytes), matmul, *rates))
    print_table(rows)


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
        """The machine that `--machine NAME|FILE` means; a file goes first. ConfigError: it is neither. MachineError: the file is none."""
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
