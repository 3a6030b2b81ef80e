"""Accelerate's loop: `prepare`, `accumulate`, `clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.loops.runs import Run, budgets, expect_same, llama, optimize, rows, sentences


def train(memory: Mapping[str, Any] | None, *, clip: str) -> Run:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, run = llama(), Run()
    optimizer, session = optimize(model, memory)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    loader = DataLoader(sentences(12), batch_size=2)  # type: ignore[arg-type]
    prepared, stepped, batches, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in batches:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip == "norm":
                run.norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.5))
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(prepared.parameters(), 1e-3)
            stepped.step()
            schedule.step()
            stepped.zero_grad()
            run.losses.append(loss.detach())
    assert accelerator.unwrap_model(prepared) is model
    return run.finish(model, optimizer, session)


@pytest.mark.parametrize("clip", ["norm", "value"])
@rows
def test_accelerates_loop_has_the_bits_of_the_same_program_without_us(memory: str, clip: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk")[memory], clip=clip)
    expect_same(train(None, clip=clip), got, memory)
