"""Memory of a GPU stays within the budget, and is what was foreseen: slots as the driver maps them, and torch's allocations above what was there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchmarks.gpu.decoder import Decoder, Shape

import patrickstar
from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.core.fixed_costs import GPU_WORKSPACE_PERCENT
from patrickstar.step import resources
from tests.gpu import test_bits

if TYPE_CHECKING:
    from tests.gpu.plugin import GPU

SHAPE = Shape(layers=6, width=1024, heads=16, kv_heads=8, inner=2816, vocab=8192)
MIB = 1 << 20
GRANULES = 4 * MIB  # what the driver maps at a time, at both ends


def step(session: Any, model: torch.nn.Module, seed: int) -> None:
    tokens = torch.randint(SHAPE.vocab, (4, 1024), generator=torch.Generator().manual_seed(seed)).cuda()
    model(tokens, tokens.roll(-1, 1)).backward()
    session.optimizer.step()
    session.optimizer.zero_grad()


@pytest.mark.device_only
@pytest.mark.parametrize("way", ["deferred", "in_backward"])
@pytest.mark.parametrize("mib", [1100, 1600, 2600])
def test_what_is_measured_is_within_the_budget_and_near_what_was_foreseen(
    mib: int, way: str, accelerator: GPU, record_property: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, for which a share is left for workspaces of kernels: those of cuBLAS, and whatever others take."""
    monkeypatch.setattr(resources, "_workspace_percent", lambda: GPU_WORKSPACE_PERCENT)
    with patrickstar.deferred_init():
        model = Decoder(SHAPE)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    with patrickstar.manage(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        device="cuda",
        precision="bf16",
        step=way,
        device_memory=mib * MIB,
    ) as session:
        for numbers in (range(1), range(1, 6)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            accelerator.most_driver_bytes()
            for number in numbers:
                step(session, model, number)
            torch.cuda.synchronize()
            mapped, allocated = accelerator.most_driver_bytes(), torch.cuda.max_memory_allocated() - base
            record_property(f"bytes from step {numbers.start}", {"mapped": mapped, "allocated": allocated})
            assert mapped + allocated <= mib * MIB + GRANULES
        stats = session.stats()
        record_property("foreseen_over_measured", stats.peak["device"] / (mapped + allocated))
        record_property(
            "steps", {"planned": stats.planned_steps, "reactive": stats.reactive_steps, "why": stats.reason}
        )
        assert stats.peak["device"] <= mib * MIB


def test_no_block_of_torchs_allocator_is_larger_than_was_counted(accelerator: GPU) -> None:
    """Whatever has been freed before, and where the end of a large block has no other use."""
    gc.collect()  # or what earlier tests have left goes in the middle of this one
    torch.cuda.empty_cache()  # nothing larger is there to be cut
    generator = torch.Generator().manual_seed(0)
    alive = list[torch.Tensor]()
    torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")  # and freed: less of it is given whole
    wanted, most = [12 * MIB - 700_000], 0
    for number in range(300):
        wanted.append(int(torch.randint(1, (1, 2, 24)[number % 3] * MIB, (), generator=generator)))
    for nbytes in wanted:
        before = torch.cuda.memory_allocated()
        alive.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        took = torch.cuda.memory_allocated() - before
        assert nbytes <= took <= cuda_block_bytes(nbytes)
        most = max(most, took - nbytes)
        if len(alive) > 12:
            del alive[int(torch.randint(len(alive), (), generator=generator))]
    assert MIB // 2 < most <= MIB + 512


@pytest.mark.device_only
def test_pinned_memory_is_of_the_size_that_was_asked_for(
    accelerator: GPU, record_property: Callable[..., None]
) -> None:
    with patrickstar.deferred_init():
        model = Decoder(SHAPE)
    with patrickstar.manage(
        model, torch.optim.AdamW(model.parameters()), device="cuda", precision="bf16", device_memory=1100 * MIB
    ) as session:
        for number in range(3):
            step(session, model, number)
        ratio = accelerator.pinned_bytes() / session.stats().peak["host"]
        record_property("pinned_over_asked", ratio)
        assert 0 < ratio <= 1.02


@pytest.mark.device_only
def test_budgets_that_are_too_small_are_refused_with_one_that_trains(tmp_path: Path) -> None:
    way = test_bits.Way()
    device_memory = 1 << 20
    for _ in range(2):  # `manage` knows the model, the first forward its activations
        with pytest.raises(patrickstar.BudgetError) as refused:
            test_bits.train(way, tmp_path, device_memory=device_memory)
        assert refused.value.smallest_bytes is not None
        device_memory = refused.value.smallest_bytes
    test_bits.train(way, tmp_path, device_memory=device_memory)
