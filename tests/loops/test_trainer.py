"""`transformers.Trainer`, with its own clipping, accumulation and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from tests.loops.runs import Run, budgets, expect_same, llama, optimize, rows, run_trainer, sentences, trainer_arguments

pytestmark = pytest.mark.slow


def train(memory: Mapping[str, Any] | None, output: Path) -> Run:
    model = llama()
    optimizer, session = optimize(model, memory)
    arguments = TrainingArguments(**trainer_arguments(output))
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 3)
    trainer = Trainer(model, arguments, train_dataset=sentences(12), optimizers=(optimizer, schedule))  # type: ignore[arg-type]
    return run_trainer(trainer, optimizer, session)


@rows
def test_the_trainer_has_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk")[memory], tmp_path)
    expect_same(train(None, tmp_path), got, memory)
    assert max(float(norm) for norm in got.norms) > 0.5, "nothing was clipped"
