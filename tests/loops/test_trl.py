"""TRL's trainer for supervised fine-tuning. `make test-full` installs it: its dependencies are large."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, get_constant_schedule

from tests.loops.runs import (
    VOCABULARY,
    Run,
    budgets,
    expect_same,
    llama,
    optimize,
    rows,
    run_trainer,
    sentences,
    trainer_arguments,
)  # fmt: skip

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("default")]


def tokenizer() -> PreTrainedTokenizerFast:
    """One that is never asked for a token: the examples have theirs."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w1", eos_token="w2"
    )


def train(memory: Mapping[str, Any] | None, output: Path) -> Run:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = llama(width=64, layers=8)
    optimizer, session = optimize(model, memory)
    arguments = SFTConfig(gradient_checkpointing=False, max_length=8, bf16=False, **trainer_arguments(output))
    examples = Dataset.from_list([{"input_ids": example["input_ids"].tolist()} for example in sentences(12)])
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=examples,
        processing_class=tokenizer(),
        optimizers=(optimizer, get_constant_schedule(optimizer)),
    )
    return run_trainer(trainer, optimizer, session)


TIGHT = "2.5MiB"
"""Half of the model data; its loss takes 2 MiB whatever the model."""


@rows
def test_fine_tuning_has_the_bits_of_the_same_program_without_us(memory: str, tmp_path: Path) -> None:
    got = train(budgets(tmp_path / "disk", tight=TIGHT)[memory], tmp_path)
    expect_same(train(None, tmp_path), got, memory)
    assert max(float(norm) for norm in got.norms) > 0.5, "nothing was clipped"
