"""Resources of a machine for one session: read from the machine at hand, or said of another that a step is planned for."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch

from patrickstar.core.fixed_costs import CONSTANT_BYTES, GPU_WORKSPACE_PERCENT
from patrickstar.memory.allocator import allocator
from patrickstar.memory.driver import granule_bytes
from patrickstar.memory.process import available_bytes, resident_bytes, total_bytes
from patrickstar.torch_private import computes_bf16, computes_fp16
from patrickstar.units import MIB

_FAST_BF16_FROM = (8, 0)  # compute capability; before, bf16 is computed in fp32
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_COARSE_SETTINGS = ("max_split_size_mb", "roundup_power2_divisions")
_FAST_FP16_FROM = (7, 0)
# Of oneDNN, and of what torch has above it. Each is read when the first kernel is kept, and counts kernels, not bytes.
KERNEL_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_FIXED_BYTES_A_KERNEL = 3 * MIB  # one takes 0.6 MiB: a fifth of the fixed costs is for kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of a machine, of which a session takes its budgets. Plans are made for what stands here, and ask no machine themselves.

    Attributes:
        device: what computes: "cpu", "emulated", or a GPU such as "cuda:0". fast_types: of 16 bits ("bf16", "fp16"), those it computes fast in.
        host_free_bytes, host_total_bytes: what the process may take of the host's memory, and all that it has.
        device_free_bytes, device_total_bytes: the same of a GPU; 0 where there is none. granule_bytes: memory of the GPU comes in whole ones of
            these; 0: in pages.
        workspace_percent: of a GPU's budget, what is left for workspaces of kernels (`core.fixed_costs.WorkspaceCosts`).
        disk_free_bytes: what is free for the disk tier; None: to be asked of its directory.
        threads: that compute on the host. retains, extra_bytes: what the host's allocator takes, as `memory.allocator.Allocator` has it.
        resident_bytes: of the process before it is given a model. staging_bytes: of the host, in each rank, through which its data go to others.
    """

    device: str
    fast_types: frozenset[str]
    host_free_bytes: int
    host_total_bytes: int
    device_free_bytes: int = 0
    device_total_bytes: int = 0
    granule_bytes: int = 0
    workspace_percent: int = 0
    disk_free_bytes: int | None = None
    threads: int = 1
    retains: float = 1.0
    extra_bytes: int = 0
    resident_bytes: int = 0
    staging_bytes: int = 0

    @classmethod
    def of_this_machine(cls, device: str) -> Resources:
        """Resources of this machine and this process now. `device`: one that is there."""
        on_gpu = device.startswith("cuda")
        free, total = torch.cuda.mem_get_info(torch.device(device)) if on_gpu else (0, 0)
        known = allocator(returning=True)
        return cls(
            device=device,
            fast_types=_fast_types(device, on_gpu=on_gpu),
            host_free_bytes=available_bytes(),
            host_total_bytes=total_bytes(),
            device_free_bytes=free,
            device_total_bytes=total,
            granule_bytes=granule_bytes(torch.device(device).index or 0) if on_gpu else 0,
            workspace_percent=_workspace_percent() if on_gpu else 0,
            threads=torch.get_num_threads(),
            retains=known.retains,
            extra_bytes=known.extra_bytes,
            resident_bytes=resident_bytes(),
        )

    @property
    def on_gpu(self) -> bool:
        """True where a GPU computes."""
        return self.device not in ("cpu", "emulated")


def _workspace_percent() -> int:
    # The kernels of a device that tests bring take nothing.
    return GPU_WORKSPACE_PERCENT if torch.version.cuda is not None else 0


def uncounted_settings(environment: Mapping[str, str]) -> list[str]:
    """Settings of torch's allocator with which it gives out larger blocks than are counted. `environment`: of the process."""
    given = ",".join(environment.get(name, "") for name in _ALLOCATOR_VARIABLES)
    return [setting for setting in _COARSE_SETTINGS if setting in given]


def bound_kernels(environment: MutableMapping[str, str], *, set_aside_bytes: int) -> None:
    """Has torch keep no more kernels than fixed costs hold: one for each shape of a product in 16 bits, or a convolution, 1,024 of them as a rule.

    For the whole process, from its first such kernel on: one that has made some before keeps 1,024. What `environment` has already stays.
    """
    kept = min(1024, max(CONSTANT_BYTES, set_aside_bytes) // _FIXED_BYTES_A_KERNEL)
    for name in KERNEL_VARIABLES:
        environment.setdefault(name, str(kept))


def _fast_types(device: str, *, on_gpu: bool) -> frozenset[str]:
    if on_gpu:
        capability = torch.cuda.get_device_capability(torch.device(device))
        fast = {"bf16": capability >= _FAST_BF16_FROM, "fp16": capability >= _FAST_FP16_FROM}
    else:
        fast = {"bf16": computes_bf16(), "fp16": computes_fp16()}
    return frozenset(name for name, is_fast in fast.items() if is_fast)
