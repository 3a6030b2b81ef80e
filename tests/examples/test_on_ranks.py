"""The examples under torchrun: what they save has the bits of one process that adds the gradients of all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.docs.pages import ROOT
from tests.examples.test_finetune import directory  # noqa: F401  (a fixture)
from tests.forked import as_torchrun

RANKS, SEQ_LEN, STEPS, LR = 2, 32, 3, 1e-3


def run(script: str, *arguments: object, cwd: Path) -> list[CompletedProcess[str]]:
    return as_torchrun(RANKS, ROOT / "examples" / script, *arguments, cwd=cwd)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{n} bottles stand on the wall, and {n} bottles stay.\n" for n in range(60)))
    return file


def windows_of(model: Path, text: Path) -> Tensor:
    tokens = AutoTokenizer.from_pretrained(model)(text.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    return tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)


def expect_trained(model_directory: Path, out: Path, steps: list[list[list[Tensor]]], clip: float | None) -> None:
    """The saved model is what one process makes of these batches: of each step, each micro-batch, each rank."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for parts in steps:
        for of_ranks in parts:
            losses = [model(input_ids=rows, labels=rows).loss / len(parts) for rows in of_ranks]
            alone = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
            for parameter, first, *others in zip(model.parameters(), *alone, strict=True):
                mean = sum(others, first) * (1.0 / RANKS)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    saved = AutoModelForCausalLM.from_pretrained(out)
    for (name, got), want in zip(saved.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want), name


def well(ended: list[CompletedProcess[str]]) -> str:
    """What rank 0 has said; the others have said nothing."""
    for done in ended:
        assert done.returncode == 0, done.stderr
    assert not any(done.stdout for done in ended[1:])
    return ended[0].stdout


def of_sampler(windows: Tensor, rank: int) -> Iterator[int]:
    return iter(DistributedSampler(windows, RANKS, rank, shuffle=True, seed=0, drop_last=True))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plain_loop_with_a_distributed_sampler(directory: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    tries = ["--steps", STEPS, "--batch-size", 4, "--seq-len", SEQ_LEN, "--lr", LR, "--out", tmp_path / "out"]
    memory = ["--host-memory", "5MiB", "--disk", tmp_path / "disk"]
    said = well(run("train_on_ranks.py", directory, text, *tries, *memory, cwd=tmp_path))
    assert len(re.findall(r"^step \d of 3: loss of rank 0 \S+$", said, re.MULTILINE)) == STEPS
    windows = windows_of(directory, text)
    orders = [list(of_sampler(windows, rank)) for rank in range(RANKS)]
    steps = [[[windows[order[2 * step : 2 * step + 2]] for order in orders]] for step in range(STEPS)]
    expect_trained(directory, tmp_path / "out", steps, clip=None)


@pytest.mark.slow
def test_accelerate_with_all_but_the_model_prepared(directory: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    tries = ["--batches", 2 * STEPS, "--batch-size", 2, "--seq-len", SEQ_LEN, "--lr", LR, "--out", tmp_path / "out"]
    said = well(run("accelerate_on_ranks.py", directory, text, *tries, cwd=tmp_path))
    assert len(re.findall(r"^batch \d: loss \S+$", said, re.MULTILINE)) == 2 * STEPS
    batches = windows_of(directory, text).split(2)  # dealt to ranks one after the other
    parts = [list(batches[RANKS * part : RANKS * part + RANKS]) for part in range(2 * STEPS)]
    expect_trained(directory, tmp_path / "out", [parts[2 * step : 2 * step + 2] for step in range(STEPS)], clip=1.0)
