"""Adapters of PEFT: frozen weights below, torch's own clipping and accumulation above."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from tests.loops.runs import Run, budgets, expect_same, llama, optimize, rows, sentences
from tests.parity.compare import compare_mappings

pytestmark = pytest.mark.slow


def train(memory: Mapping[str, Any] | None) -> tuple[Run, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = get_peft_model(
        llama(), LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    run = Run()
    optimizer, session = optimize(model, memory, weight_decay=0.01)
    torch.manual_seed(1)
    data = sentences(12)
    for step in range(3):
        for example in data[4 * step : 4 * step + 4]:
            loss = model(**{key: value[None] for key, value in example.items()}).loss / 4
            loss.backward()
            run.losses.append(loss.detach())
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    adapters = {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}
    return run.finish(model, optimizer, session), adapters


@rows
def test_adapters_have_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    want, want_adapters = train(None)
    got, got_adapters = train(budgets(tmp_path / "disk")[memory])
    expect_same(want, got, memory)
    assert not compare_mappings("adapter", want_adapters, got_adapters)
    assert max(float(norm) for norm in got.norms) > 0.05, "nothing was clipped"
