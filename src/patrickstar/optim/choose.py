"""Choice of the optimizer kernel for this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from patrickstar.errors import ConfigError, nearest
from patrickstar.optim.agreement import differences
from patrickstar.optim.fma import Emulated, fusing_operations
from patrickstar.optim.fused import VECTOR_NUMEL, Fused
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.kernel import Kernel
from patrickstar.optim.passes import Passes, TorchPasses
from patrickstar.optim.reference import Reference

__all__ = ["ENVIRONMENT_VARIABLE", "choose_kernel", "choose_kernels", "keeps_the_definition"]

ENVIRONMENT_VARIABLE = "PATRICKSTAR_ISA"
NATIVE = ("scalar", "avx2", "avx512", "neon")

_log = logging.getLogger("patrickstar")


def choose_kernel(requested: str | None = None) -> Kernel:
    """The fastest kernel that gives the definition's bits here: torch's fused one, else the reference.

    Args:
        requested: a name that `PATRICKSTAR_ISA` may have; None: what the environment says.
    Raises:
        ConfigError: a name that is not known, or a kernel that is not there yet.
    """
    if requested is None:
        requested = os.environ.get(ENVIRONMENT_VARIABLE) or "torch"
    if requested in NATIVE:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}={requested}: native optimizer kernels arrive in a later version; "
            f"unset it, or {ENVIRONMENT_VARIABLE}=torch"
        )
    if requested != "torch":
        known = ("torch", *NATIVE)
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}={requested} is no optimizer kernel: one of {', '.join(known)}"
            + nearest(requested, known)
        )
    fused = Fused()
    if keeps_the_definition(fused):
        return fused
    _log.warning(
        "torch's fused Adam rounds differently on this machine (CPU capability %s, no fused multiply-add): "
        "the reference kernel updates instead, with the same bits as everywhere, several times slower",
        torch.backends.cpu.get_cpu_capability(),
    )
    return Reference()


def choose_kernels(device: torch.device) -> Mapping[str, Passes]:
    """Passes by type of device, for a session that computes there: the host's, and that device's.

    On an NVIDIA GPU those are Triton's, where they can be compiled and give the definition's bits; else the definition in torch's operations, with a
    warning. Any other device, such as one that tests bring, has torch's operations.
    """
    passes: dict[str, Passes] = {"cpu": TorchPasses(choose_kernel())}
    if device.type != "cpu":
        on_gpu = _triton_passes(device) if device.type == "cuda" and torch.version.cuda is not None else None
        passes[device.type] = on_gpu or TorchPasses(Reference(operations=fusing_operations(device)))
    return passes


def _triton_passes(device: torch.device) -> Passes | None:
    """Triton's passes, where they do what they should on this GPU; None, and a warning why, where they do not."""
    try:
        # Neither triton nor the C compiler that it calls is everywhere: it comes with builds of torch for CUDA only.
        from patrickstar.optim.triton_passes import TritonPasses  # noqa: PLC0415

        passes = TritonPasses()
        wrong = differences(passes, device)
    except Exception as error:  # whatever fails in a compiler, an import or a driver: the definition needs none of them
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    else:
        if not wrong:
            return passes
        why = "other bits than the definition in: " + ", ".join(wrong)
    _log.warning(
        "Triton's kernels cannot be used on %s (%s): torch's operations update there instead, with the same bits, in many passes over memory",
        device,
        why,
    )
    return None


@torch.no_grad()
def keeps_the_definition(kernel: Kernel) -> bool:
    """Tells whether a kernel's update of a small sample has exactly the definition's bits. Takes about a millisecond."""
    # An odd number of vectors, so that a kernel that hands its threads parts of vectors is found out.
    numel = 67 * VECTOR_NUMEL
    generator = torch.Generator(device="cpu").manual_seed(1)
    sample = torch.randn(4, numel, generator=generator, device="cpu", dtype=torch.float32)
    definition = Reference(operations=Emulated())
    for decoupled, beta1 in ((True, 0.9), (False, 0.9), (True, 0.25)):
        hyper = Hyper(lr=1e-3, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
        seen = []
        for candidate in (kernel, definition):
            weight, grad, exp_avg, exp_avg_sq = sample.clone()
            exp_avg_sq.abs_()
            candidate.update(weight, grad, exp_avg, exp_avg_sq, step=3, hyper=hyper)
            seen.append(torch.stack([weight, exp_avg, exp_avg_sq]))
        if not torch.equal(*seen):
            return False
    return True
