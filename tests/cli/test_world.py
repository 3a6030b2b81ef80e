"""`train` on several ranks: the bits of one process that has everybody's gradients, one voice, and one end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from patrickstar.cli import loop
from patrickstar.cli.batches import Batches, prepare_data
from patrickstar.cli.display import Display, EventLog
from patrickstar.cli.main import main
from patrickstar.cli.world import World
from tests.cli.runs import Runs
from tests.docs.pages import ROOT
from tests.forked import as_torchrun
from tests.ranks import Team, all_well

LR = 1e-3


def train(rank: int, home: Path, arguments: list[str], signals_at: dict[int, int] | None = None) -> tuple[Any, ...]:
    """One rank of `patrickstar train`: exit status, what it said and complained about. `signals_at`: by rank, after which step it is stopped."""
    write = EventLog.write

    def write_and_stop(log: EventLog, row: Any) -> None:
        write(log, row)
        if row["event"] == "step" and row["step"] == (signals_at or {}).get(rank):
            os.kill(os.getpid(), signal.SIGTERM)

    out, err = io.StringIO(), io.StringIO()
    EventLog.write = write_and_stop  # type: ignore[method-assign]
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(["train", *(word.replace("RANK", str(rank)) for word in arguments)])
    finally:
        EventLog.write = write  # type: ignore[method-assign]
    return status, out.getvalue(), err.getvalue()


def run(ranks: Team, runs: Runs, *arguments: object, **signals: Any) -> list[tuple[int, str, str]]:
    common = ["--device", "cpu", "--precision", "fp32", "--seq-len", "16", "--schedule", "constant", "--warmup", "1"]
    data = [] if "--data" in arguments else ["--data", runs.text]
    words = [*common, "--lr", LR, *data, "--model", runs.model, "--log-json", runs.home / "log.jsonl", *arguments]
    return all_well(ranks.run(train, runs.home, [str(word) for word in words], *signals.values(), within_s=120))


def words_of(runs: Runs, words: str) -> list[object]:
    files = ["--data", runs.text, "--model", runs.model, "--log-json", runs.home / "log.jsonl"]
    return ["train", *f"--device cpu --precision fp32 --batch-size 4 --seq-len 16 --steps 3 {words}".split(), *files]


def test_under_torchrun_it_has_the_bits_of_one_process_and_speaks_with_one_voice(runs: Runs) -> None:
    first, second = as_torchrun(2, "patrickstar", *words_of(runs, "--accumulate 2 --clip 1 --compare-plain"), cwd=ROOT)
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr + second.stderr
    for said in ("2 ranks", "plain PyTorch gives the same bits", "step 3/3", "predicted and measured"):
        assert first.stdout.count(said) == 1, first.stdout
    start_row, *steps, summary = runs.rows()
    assert (start_row["config"]["ranks"], [row["step"] for row in steps]) == (2, [1, 2, 3])
    assert summary["validation_loss"] < summary["first_validation_loss"]


@pytest.mark.campaign  # a start of torchrun, whose ranks import torch
@pytest.mark.parametrize("status", [0, 3])
def test_torchrun_sees_all_ranks_end_with_the_status_of_the_error_that_one_of_them_says(
    runs: Runs, status: int
) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "patrickstar"]
    words = [str(word) for word in (*start, *words_of(runs, "--host-memory 40KiB" if status else ""))]
    known = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    done = subprocess.run(words, env=known, capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr.count("patrickstar: BudgetError") == (status == 3)
    assert re.findall(r"^ +exitcode +: (-?\d+)", done.stderr, re.MULTILINE) == ["3", "3"] * (status == 3), done.stderr
    assert (done.returncode == 0) == (status == 0)


def plain_losses(model_file: Path, text_batches: list[torch.Tensor], ranks: int) -> list[str]:
    """The losses of one process that forms f(1/p) * (g0 + g1) of the rows of each rank."""
    torch.manual_seed(0)
    settings = json.loads(model_file.read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    losses = []
    for batch in text_batches:
        alone, total = [], 0.0
        for rows in batch.chunk(ranks):
            loss = model(input_ids=rows, labels=rows).loss
            total += loss.item()
            alone.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, first, *others in zip(model.parameters(), *alone, strict=True):
            parameter.grad = sum(others, first) * (1.0 / ranks)
        optimizer.step()
        losses.append((total / ranks).hex())
    return losses


def test_each_rank_has_its_rows_of_the_batch_and_the_log_the_mean_of_their_losses(two: Team, runs: Runs) -> None:
    settings = {**json.loads(runs.model.read_text()), "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    runs.model.write_text(json.dumps(settings))
    first, second = run(two, runs, "--batch-size", 6, "--steps", 3)
    assert (first[0], second) == (0, (0, "", "")), first
    data = prepare_data([str(runs.text)], vocab_size=512, own_tokenizer=None, display=Display())
    batches = Batches(data.train, batch_size=6, seq_len=16, seed=0)
    want = plain_losses(runs.model, [batches.next()["input_ids"] for _ in range(3)], 2)
    assert list(runs.losses().values()) == want


@pytest.mark.parametrize("method", ["ring", pytest.param("ulysses", marks=pytest.mark.campaign)])
def test_ranks_with_parts_of_the_sequences_have_the_losses_of_one_process(
    two: Team, runs: Runs, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**json.loads(runs.model.read_text()), "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    runs.model.write_text(json.dumps(settings))
    flags = ["--context-parallel", 2, "--sequence-method", method]
    first, second = run(two, runs, "--batch-size", 2, "--steps", 3, "--host-memory", "240MiB", *flags)
    assert (first[0], second) == (0, (0, "", "")), first
    start, *steps, _ = runs.rows()
    assert start["mesh"] == {"dp": 1, "cp": 2}
    assert all(row["sent"]["cp"] > 0 and row["sent"]["dp"] > 0 for row in steps)
    words = [
        "--precision",
        "fp32",
        "--batch-size",
        "2",
        "--steps",
        "3",
        "--schedule",
        "constant",
        "--warmup",
        "1",
        "--seq-len",
        "16",
    ]
    assert runs.train(*words, "--lr", LR, log="alone.jsonl") == 0
    want = [row["loss"] for row in runs.rows("alone.jsonl", "step")]
    assert [row["loss"] for row in steps] == pytest.approx(want, abs=2e-5)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(two: Team, runs: Runs) -> None:
    first, second = run(two, runs, "--batch-size", 2, "--steps", 9, signals_at={1: 2})
    assert (first[0], second[0]) == (143, 143)
    assert [row["step"] for row in runs.rows(event="step")] == [1, 2]
    assert runs.rows()[-1]["validation_loss"] is None


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--batch-size", 3], 2, "--batch-size 3 over 2 ranks: it is of all of them together; give a multiple of 2"),
        pytest.param(
            ["--batch-size", 2, "--seq-len", 65],
            2,
            "--seq-len 65: this model has 64 positions",
            marks=pytest.mark.campaign,
        ),
        (["--batch-size", 2, "--host-memory", "40KiB"], 3, "what fits is for the 2 ranks of a machine"),
        (["--batch-size", 2, "--data", "text-of-RANK.txt"], 2, "of rank 1 and of rank 0 differ"),
        pytest.param(
            ["--batch-size", 2, "--data", "only-of-RANK.txt"],
            2,
            "only-of-1.txt: no such file",
            marks=pytest.mark.campaign,
        ),
        (["--context-parallel", 3], 2, "--context-parallel 3: 3 ranks work on a batch together, and there are 2"),
        pytest.param(
            ["--tensor-2d", "2x2"], 2, "--tensor-2d 2x2: 4 ranks work on a batch together", marks=pytest.mark.campaign
        ),
        (["--tensor-2d", "2x2", "--context-parallel", 2], 2, "in one run come later"),
        (["--context-parallel", 2, "--compare-plain"], 2, "sums of several ranks have another order"),
    ],
)
def test_an_error_is_said_once_and_all_ranks_end_alike(
    two: Team, runs: Runs, arguments: list[object], status: int, said: str
) -> None:
    for name in ("text-of-0", "text-of-1", "only-of-0"):
        (runs.home / f"{name}.txt").write_text(name + runs.text.read_text())
    found = [runs.home / word if str(word).endswith("txt") else word for word in arguments]
    ends = run(two, runs, "--steps", 2, *found)
    assert [end[0] for end in ends] == [status, status], ends
    complaints = [end[2] for end in ends if end[2]]
    assert len(complaints) == 1
    assert said in complaints[0]
    assert "Traceback" not in complaints[0]


def raise_in_a_step(rank: int, home: Path, arguments: list[str]) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(loop, "backward", None)
        return train(rank, home, arguments)


def test_what_befalls_one_rank_alone_ends_the_others_with_an_error_that_names_it(two: Team, runs: Runs) -> None:
    words = [str(word) for word in words_of(runs, "")[1:]]
    first, second = all_well(two.run(raise_in_a_step, runs.home, words, within_s=120))
    assert first[0] == second[0] == 1
    assert "TypeError" in second[2]
    assert "rank 1" in first[2]


def test_the_environment_of_torchrun_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (World().rank, World().size) == (0, 1)
    for name, value in {"LOCAL_RANK": 1, "RANK": 5, "WORLD_SIZE": 8, "MASTER_ADDR": "there", "MASTER_PORT": 1}.items():
        assert World().size == 1
        monkeypatch.setenv(name, str(value))
    other = World()
    assert (other.rank, other.size, other.rows(16)) == (5, 8, slice(10, 12))
    assert not other.tells("what is wrong"), "the first rank of the machine does"
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    alone = World()
    alone.join()
    assert alone.agree("a", "letters") == ["a"]
