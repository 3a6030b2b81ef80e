"""The machines that `--machine` knows by name. Figures are vendors' data sheets unless a line says otherwise.

A preset is one node. Rates are peaks, in bytes and floating-point operations per second, in one direction: what a plan
may hope for at best. Matmul rates are dense (without sparsity), 16-bit with fp32 accumulation.

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

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from patrickstar.core.fixed_costs import GPU_WORKSPACE_PERCENT
from patrickstar.units import GIB

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
    devices: int,
    device: str,
    device_gib: int,
    *,
    tflops: float,
    link: float,
    host_bytes: int,
    disk_tb: int = 0,
    disk_read: float = 0.0,
    fast: tuple[str, ...] = BOTH,
) -> MachinePreset:
    """A node with accelerators of one kind; rates of `link` and `disk_read` in GB/s."""
    return MachinePreset(
        host_bytes=host_bytes,
        disk_bytes=disk_tb * 1000 * GB,
        device=device,
        devices=devices,
        device_bytes=device_gib * GIB,
        context_bytes=GIB,
        workspace_percent=GPU_WORKSPACE_PERCENT,
        fast_16bit=fast,
        matmul_16bit=tflops * TERA,
        link=link * GB,
        disk_read=disk_read * GB,
    )


MACHINES: Final[Mapping[str, MachinePreset]] = MappingProxyType(
    {
        "v100-yard": _with_gpus(8, "V100-SXM2-32GB", 32, tflops=125, link=15.75, host_bytes=240 * GB, fast=("fp16",)),
        "a100-superpod": _with_gpus(8, "A100-SXM4-40GB", 40, tflops=312, link=31.5, host_bytes=1000 * GB),
        "h200": _with_gpus(1, "H200-SXM-141GB", 139, tflops=989, link=63, host_bytes=128 * GIB, disk_tb=1, disk_read=7),
        "gpu-24g": _with_gpus(
            1, "RTX 4090 24GB", 24, tflops=165.2, link=31.5, host_bytes=64 * GIB, disk_tb=2, disk_read=7
        ),
        "laptop-8g": _with_gpus(
            1, "RTX 4060 Laptop 8GB", 8, tflops=30, link=15.75, host_bytes=32 * GIB, disk_tb=1, disk_read=3.5
        ),
        "cpu": MachinePreset(
            host_bytes=24 * GIB, disk_bytes=100 * GB, threads=2, matmul_16bit=0.047 * TERA, disk_read=0.9 * GB
        ),
    }
)
