"""How many bytes a parameter takes: `python -m tests.memory.bytes_child CASE` prints what the process grew by over what was planned.

Everything rests in memory. What a first session leaves behind (libraries, thread pools, kernels' workspaces) is there before the counting begins.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

import patrickstar
from patrickstar.memory.allocator import release_free_memory
from patrickstar.memory.process import resident_bytes
from patrickstar.session.start import BindingKind, set_up

WIDTH = 1024


@dataclass(frozen=True)
class Case:
    """A way of training, and the bytes that a parameter takes in it.

    `frozen`: those of a frozen one, where all layers but the last are. `binding`: how parameters are bound at most.
    """

    precision: str
    trained: int
    step: str = "deferred"
    accumulate: int | None = None
    frozen: int | None = None
    binding: BindingKind = "use"


CASES = {
    "bf16": Case("bf16", 14),
    "bf16-accumulating": Case("bf16", 16, accumulate=2),
    "bf16-in-backward": Case("bf16", 12, step="in_backward"),
    "bf16-frozen": Case("bf16", 14, frozen=2),
    "fp16": Case("fp16", 14),
    "fp16-accumulating": Case("fp16", 16, accumulate=2),
    "fp16-frozen": Case("fp16", 14, frozen=2),
    "bf16-whole": Case("bf16", 16, binding="whole"),
    "bf16-whole-in-backward": Case("bf16", 14, step="in_backward", binding="whole"),
    "fp32": Case("fp32", 16),
    "fp32-whole": Case("fp32", 16, binding="whole"),
    "fp32-frozen": Case("fp32", 16, frozen=4),
}


def settled_bytes() -> int:
    """What the process holds, less what the allocator keeps of memory that is free."""
    release_free_memory()
    return resident_bytes()


def grown(case: Case, layers: int) -> float:
    """Trains a step; what the process has grown by, when gradients and moments are all there, over what was planned."""
    torch.manual_seed(0)
    with patrickstar.deferred_init():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model.requires_grad_(case.frozen is None)
    model[-1].requires_grad_(True)
    planned = sum(
        parameter.numel() * (case.trained if parameter.requires_grad else case.frozen or 0)
        for parameter in model.parameters()
    )
    set_up.__kwdefaults__["binding"] = case.binding
    compute = "bf16" if case.precision == "bf16" else None  # where fp32 computes, whole weights have a copy
    before = settled_bytes()
    session = patrickstar.manage(
        model,
        torch.optim.AdamW(model.parameters()),
        precision=case.precision,
        step=case.step,
        device="cpu",
        options=patrickstar.Options(accumulate=case.accumulate, compute=compute),
    )
    loss = model(torch.randn(2, WIDTH)).float().square().mean()
    session.scaler.scale(loss).backward()
    del loss
    session.scaler.step(session.optimizer)
    if case.step == "deferred":
        next(session.gradients())  # the update is done, and gradients are still there
    after = settled_bytes()
    session.close(keep_weights=False)
    return (after - before) / planned


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = CASES[sys.argv[1]]
    grown(chosen, 2)
    print(grown(chosen, 64))
