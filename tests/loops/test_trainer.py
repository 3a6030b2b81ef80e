"""`transformers.Trainer`, with its own clipping, accumulation and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from tests.loops.runs import Run, budgets, expect_same, llama, manage, sentences

pytestmark = pytest.mark.slow


def train(memory: Mapping[str, Any] | None, output: Path) -> Run:
    model, run = llama(), Run()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    session = None if memory is None else manage(model, optimizer, memory)
    if session is not None:
        optimizer = session.optimizer
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 3)
    trainer = Trainer(model, arguments, train_dataset=sentences(12), optimizers=(optimizer, schedule))  # type: ignore[arg-type]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    run.losses = [torch.tensor(entry["loss"]) for entry in logs]
    run.norms = [torch.tensor(float(entry["grad_norm"])) for entry in logs]
    return run.finish(model, optimizer, session)


@pytest.mark.parametrize("memory", ["roomy", "tight", "tight, on disk"])
def test_the_trainer_has_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk")[memory], tmp_path)
    expect_same(train(None, tmp_path), got, moves=memory != "roomy")
    assert max(float(norm) for norm in got.norms) > 0.5, "nothing was clipped"
