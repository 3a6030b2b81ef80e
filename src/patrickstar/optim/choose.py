"""Choice of the optimizer kernel for this machine."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping

import torch

from patrickstar.config.kinds import choice, refuse
from patrickstar.errors import DeviceError
from patrickstar.optim import reference
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.passes import Passes
from patrickstar.optim.reference import Kernel

ENVIRONMENT_VARIABLE = "PATRICKSTAR_ISA"
_KERNELS = choice("torch", to_come=["scalar", "avx2", "avx512", "neon"])
_BASELINE = "DEFAULT"  # of torch's code paths for processors
_FUSES_IN_BASELINE = ("aarch64", "arm64")
_SAMPLE_NUMEL = 4_099  # several programs of a kernel, and a tail

_log = logging.getLogger("patrickstar")


def choose_kernel() -> Kernel:
    """torch's fused kernel, whose bits are the definition's where the processor fuses multiply-adds.

    Raises:
        ConfigError: `PATRICKSTAR_ISA` is no name that is known, or that of a kernel that is not there yet. DeviceError: torch does not fuse here.
    """
    requested = os.environ.get(ENVIRONMENT_VARIABLE) or "torch"
    refuse(_KERNELS.problems(ENVIRONMENT_VARIABLE, requested), of="environment")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == _BASELINE and platform.machine() not in _FUSES_IN_BASELINE:
        raise DeviceError(
            f"torch does not fuse multiply-adds on this processor ({platform.machine()}, CPU capability {capability}): updates would have other "
            "bits than on others, so nothing is trained. It does on processors with AVX2 or AVX-512, and on 64-bit ARM; where ATEN_CPU_CAPABILITY is "
            "set, unset it"
        )
    return reference.update_fused


def choose_kernels(device: torch.device) -> Mapping[str, Passes]:
    """Passes by type of device, for a session that computes there: the host's, and that device's.

    On an NVIDIA GPU those are Triton's, where they can be compiled and have the bits of the host's; else torch's operations, with a warning. Any
    other device, such as one that tests bring, has torch's operations.

    Raises:
        DeviceError: torch fuses no multiply-adds on the processor, or on the device. ConfigError: as `choose_kernel`.
    """
    host = Passes(choose_kernel())
    if device.type == "cpu":
        return {"cpu": host}
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    passes = (_triton_passes(device, host) if is_nvidia else None) or _torchs_passes(device, host)
    return {"cpu": host, device.type: passes}


def _torchs_passes(device: torch.device, host: Passes) -> Passes:
    passes = Passes()
    if _agrees(passes, host, device):
        return passes
    raise DeviceError(
        f"torch's operations on {device} round other than the host's, which fuse multiply-adds: updates there would have other bits, so nothing "
        "is trained. Use another device, or an installation of torch that has Triton there"
    )


def _triton_passes(device: torch.device, host: Passes) -> Passes | None:
    """Triton's passes, where they do what they should on this GPU; None, and a warning why, where they do not."""
    try:
        # Neither triton nor the C compiler that it calls is everywhere: it comes with builds of torch for CUDA only.
        from patrickstar.optim.triton_passes import TritonPasses  # noqa: PLC0415

        passes = TritonPasses()
        if _agrees(passes, host, device):
            return passes
        why = "other bits than the host's updates"
    except Exception as error:  # of a compiler, an import or a driver: torch's operations need none of them
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    _log.warning(
        "Triton's kernels cannot be used on %s (%s): torch's operations update there instead, with the same bits, and not as one fused kernel",
        device,
        why,
    )
    return None


@torch.no_grad()
def _agrees(passes: Passes, host: Passes, device: torch.device) -> bool:
    """Tells whether a small sample is updated on the device with the bits that it has on the host. Waits for the device."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    here = torch.randn(4, _SAMPLE_NUMEL, generator=generator, device="cpu", dtype=torch.float32)
    here[3].abs_()
    there = here.to(device, copy=True)
    # All three products that are added without being rounded.
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=False)
    for family, (weight, grad, *averages) in ((host, here), (passes, there)):
        family.update(weight, None, grad, *averages, step=3, hyper=hyper)
    return torch.equal(here, there.cpu())
