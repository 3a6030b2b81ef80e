"""Agreement of passes with the definition, on a small sample, before a session relies on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from patrickstar.optim.fma import Emulated
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.masters import rest_type
from patrickstar.optim.norm import BLOCK_NUMEL
from patrickstar.optim.passes import Passes, TorchPasses
from patrickstar.optim.reference import Reference

__all__ = ["differences"]

_NUMEL = 4_099  # several programs of a kernel, and a tail
# Types of weights (fp32: whole masters) and of gradients.
_FORMATS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
)
_VARIANTS = ((True, 0.9), (False, 0.9), (True, 0.25))


@torch.no_grad()
def differences(passes: Passes, device: torch.device) -> list[str]:
    """The names of passes that have other bits on this device than the definition; none where all agree. Waits for the device.

    Compared are updates from gradients of each type, of whole and of split masters, with factors on the device and on the host; gradients that are
    written and added, with an overflow and without; and the norm over several blocks.
    """
    host = torch.device("cpu")
    definition = TorchPasses(Reference(operations=Emulated()))
    pairs = zip(_outcomes(definition, host), _outcomes(passes, device), strict=True)
    return [
        name for (name, want), (_, got) in pairs if not torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))
    ]


def _outcomes(passes: Passes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Results of each pass on the sample, under its name."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    sample = torch.randn(4, _NUMEL, generator=generator, device="cpu", dtype=torch.float32).to(device)
    sample[3].abs_()
    factors = (torch.tensor(0.7, device=device), torch.tensor(1 / 3, device="cpu"))
    for kept, dtype in _FORMATS:
        is_split = kept is not torch.float32
        for decoupled, beta1 in _VARIANTS:
            hyper = Hyper(lr=1e-3, beta1=beta1, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
            master, grad, exp_avg, exp_avg_sq = sample.clone()
            narrow, averages = grad.to(dtype), (exp_avg, exp_avg_sq)
            used = factors if dtype is torch.bfloat16 else factors[:1] if is_split else ()
            if is_split:
                weight, rest = (
                    torch.empty_like(master, dtype=kept),
                    torch.empty_like(master, dtype=rest_type(kept)),
                )
                passes.split(master, weight, rest)
                passes.update(weight, rest, narrow, *averages, step=3, hyper=hyper, factors=used)
                passes.join(weight, rest, master)
            else:
                passes.update(master, None, narrow, *averages, step=3, hyper=hyper, factors=used)
            yield f"update, {kept}, {dtype}, {decoupled=}, {beta1=}", torch.stack([master, *averages])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        target = sample[0].to(dtype, copy=True)
        for adds, source in ((True, sample[1]), (False, sample[2].half())):
            flag = torch.ones((), dtype=torch.int32, device=device)
            passes.put_and_look(target, source, flag, adds=adds)
            yield f"gradients in {dtype}, {adds=}", torch.cat([target.float(), flag.float()[None]])
        target[77] = torch.nan
        flag = torch.ones((), dtype=torch.int32, device=device)
        passes.look(target, flag)
        yield f"overflow in {dtype}", flag.float()
    norm = passes.norm(device)
    long = sample.reshape(-1).repeat(10)  # two blocks and a part of a third
    assert long.numel() > 2 * BLOCK_NUMEL
    norm.add(long[:1_001])
    norm.add(long[1_001:], factors)
    norm.end_tensor()
    # Before it is rounded: another order of sums mostly shows in fp64 only.
    yield "norm", torch.tensor([norm.sum_of_squares()], dtype=torch.float64, device="cpu")
