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

MACHINES: Final[Mapping[str, MachinePreset]] = MappingProxyType(
    {
        "v100-yard": MachinePreset(
            host_bytes=240 * GB,
            device="V100-SXM2-32GB",
            devices=8,
            device_bytes=32 * GIB,
            fast_16bit=("fp16",),
            matmul_16bit=125 * TERA,
            link=15.75 * GB,
            context_bytes=GIB,
            workspace_percent=GPU_WORKSPACE_PERCENT,
        ),
        "a100-superpod": MachinePreset(
            host_bytes=1000 * GB,
            device="A100-SXM4-40GB",
            devices=8,
            device_bytes=40 * GIB,
            fast_16bit=("bf16", "fp16"),
            matmul_16bit=312 * TERA,
            link=31.5 * GB,
            context_bytes=GIB,
            workspace_percent=GPU_WORKSPACE_PERCENT,
        ),
        "h200": MachinePreset(
            host_bytes=128 * GIB,
            disk_bytes=1000 * GB,
            device="H200-SXM-141GB",
            devices=1,
            device_bytes=139 * GIB,
            fast_16bit=("bf16", "fp16"),
            matmul_16bit=989 * TERA,
            link=63 * GB,
            disk_read=7 * GB,
            context_bytes=GIB,
            workspace_percent=GPU_WORKSPACE_PERCENT,
        ),
        "gpu-24g": MachinePreset(
            host_bytes=64 * GIB,
            disk_bytes=2000 * GB,
            device="RTX 4090 24GB",
            devices=1,
            device_bytes=24 * GIB,
            fast_16bit=("bf16", "fp16"),
            matmul_16bit=165.2 * TERA,
            link=31.5 * GB,
            disk_read=7 * GB,
            context_bytes=GIB,
            workspace_percent=GPU_WORKSPACE_PERCENT,
        ),
        "laptop-8g": MachinePreset(
            host_bytes=32 * GIB,
            disk_bytes=1000 * GB,
            device="RTX 4060 Laptop 8GB",
            devices=1,
            device_bytes=8 * GIB,
            fast_16bit=("bf16", "fp16"),
            matmul_16bit=30 * TERA,
            link=15.75 * GB,
            disk_read=3.5 * GB,
            context_bytes=GIB,
            workspace_percent=GPU_WORKSPACE_PERCENT,
        ),
        "cpu": MachinePreset(
            host_bytes=24 * GIB,
            disk_bytes=100 * GB,
            threads=2,
            matmul_16bit=0.047 * TERA,
            disk_read=0.9 * GB,
        ),
    }
)
