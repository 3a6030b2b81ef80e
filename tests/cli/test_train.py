import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from patrickstar.checkpoint import storage
from patrickstar.cli import plain
from patrickstar.cli.display import EventLog
from patrickstar.cli.models import ModelSource
from patrickstar.memory.allocator import tcmalloc_library
from patrickstar.memory.store import ChunkStore
from patrickstar.units import MIB
from tests.docs.pages import ROOT

START = {"event", "config", "parameters", "model_data_bytes", "predicted", "plan"}
STEP = {"event", "step", "loss", "loss_hex", "seconds", "tokens_per_second", "grad_norm", "peak", "rss"}
SUMMARY = {"event", "steps", "first_loss", "last_loss", "validation_loss", "peak", "rss_peak_growth", "moved"} | {
    *("predicted", "model_data_bytes", "parameters")
}
# Embedding and positions, one block, the last norm.
PARAMETERS = 512 * 64 + 64 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64


@pytest.fixture
def signal_after(monkeypatch):
    """Sends this process a signal, once or more often, when a step's row has been written."""

    def arm(step, number, times=1):
        write = EventLog.write

        def write_and_send(log, row):
            write(log, row)
            if row.get("step") == step and row["event"] == "step":
                for _ in range(times):
                    os.kill(os.getpid(), number)

        monkeypatch.setattr(EventLog, "write", write_and_send)

    return arm


def test_a_run_logs_its_start_every_step_and_a_summary(runs, capsys):
    assert runs.train("--lr", "3e-3", steps=12) == 0
    start, *steps, summary = runs.rows()
    assert set(start) >= START
    assert all(set(row) >= STEP for row in steps)
    assert set(summary) >= SUMMARY
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert start["parameters"] == summary["parameters"] == PARAMETERS
    assert set(start["predicted"]) == set(summary["predicted"]) == {"peak", "moved", "step_seconds"}
    assert set(summary["peak"]) == {"device", "host", "disk"}
    assert set(summary["moved"]) == {"H>D", "D>H", "H>K", "K>H", "ranks"}
    assert (summary["steps"], summary["first_loss"]) == (12, steps[0]["loss"])
    assert summary["last_loss"] == steps[-1]["loss"] == float.fromhex(steps[-1]["loss_hex"])
    assert summary["validation_loss"] < summary["first_validation_loss"] - 0.3
    assert steps[0]["grad_norm"] is None
    assert "12/12" in capsys.readouterr().out


def test_stopping_and_resuming_gives_the_bits_of_not_stopping(runs, capsys):
    assert runs.train(steps=6, log="whole") == 0
    assert runs.train("--seed", 2, steps=1, log="other") == 0
    assert runs.losses("other")[1] != runs.losses("whole")[1]
    assert runs.train("--checkpoint-dir", runs.checkpoints, steps=3) == 0
    assert runs.saved() == ["step-00000003"]
    assert runs.train("--checkpoint-dir", runs.checkpoints, "--resume", steps=6) == 0
    assert runs.losses() == runs.losses("whole")
    assert [row["event"] for row in runs.rows()].count("start") == 2
    assert runs.rows()[-1]["first_loss"] == runs.rows("whole")[-1]["first_loss"]
    assert runs.rows()[-1]["validation_loss"] == runs.rows("whole")[-1]["validation_loss"]


def test_a_signal_saves_and_the_run_goes_on_later_as_if_nothing_had_been(runs, signal_after):
    assert runs.train(steps=5, log="whole") == 0
    arguments = ["--checkpoint-dir", runs.checkpoints]
    for at, number, status in ((2, signal.SIGINT, 130), (4, signal.SIGTERM, 143)):
        signal_after(at, number)
        assert runs.train(*arguments, steps=5) == status
        assert runs.saved()[-1] == f"step-{at:08d}"
        assert runs.rows()[-1]["event"] == "summary"
        arguments = ["--checkpoint-dir", runs.checkpoints, "--resume"]
    assert runs.train(*arguments, steps=5) == 0
    assert runs.losses() == runs.losses("whole")


def test_a_second_signal_stops_at_once_and_saves_nothing(runs, signal_after):
    signal_after(2, signal.SIGINT, times=2)
    assert runs.train("--checkpoint-dir", runs.checkpoints) == 130
    assert runs.saved() == []
    assert [row["event"] for row in runs.rows()] == ["start", "step", "step"]


@pytest.mark.parametrize("where", ["while something is transferred", "while the next checkpoint is written"])
def test_a_second_signal_leaves_the_last_checkpoint_intact(runs, monkeypatch, where):
    arguments = ("--device", "emulated", "--device-memory", "2MiB")
    assert runs.train(*arguments, steps=6, log="whole") == 0

    def stop(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    if where == "while something is transferred":
        carry_out = ChunkStore.carry_out

        def carry(store, actions, **during):
            carry_out(store, actions, **during)
            if runs.saved() == ["step-00000002"] and store.state.in_flight:
                stop()

        monkeypatch.setattr(ChunkStore, "carry_out", carry)
    else:
        publish = storage._publish

        def published(written, final, io):
            publish(written, final, io)
            if final.name == "step-00000004":
                stop()  # before `latest` is moved

        monkeypatch.setattr(storage, "_publish", published)
    assert runs.train(*arguments, "--checkpoint-dir", runs.checkpoints, "--save-every", 2, steps=6) == 130
    assert "step-00000002" in runs.saved()
    monkeypatch.undo()
    assert runs.train(*arguments, "--checkpoint-dir", runs.checkpoints, "--resume", steps=6) == 0
    assert runs.losses() == runs.losses("whole")


def test_resuming_where_nothing_was_saved_starts_afresh_and_a_finished_run_takes_no_step(runs, capsys):
    assert runs.train("--checkpoint-dir", runs.checkpoints, "--resume") == 0
    assert "no checkpoint to resume from yet: starting afresh" in capsys.readouterr().out
    assert runs.train("--checkpoint-dir", runs.checkpoints, "--resume") == 0
    assert len(runs.rows(event="step")) == 4
    assert runs.rows()[-1]["steps"] == 4


def test_the_newest_checkpoints_stay_and_a_damaged_one_is_refused_naming_the_newest_intact_one(runs, capsys):
    assert runs.train("--checkpoint-dir", runs.checkpoints, "--save-every", 1, "--keep", 3) == 0
    assert runs.saved() == ["step-00000002", "step-00000003", "step-00000004"]
    damaged = max((runs.checkpoints / "step-00000004").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    assert runs.train("--checkpoint-dir", runs.checkpoints, "--resume", steps=6) == 1
    error = capsys.readouterr().err
    assert damaged.name in error
    assert "step-00000003" in error
    assert len(runs.rows(event="step")) == 4


SAVED = ["--checkpoint-dir", "checkpoints"]


@pytest.mark.parametrize(
    ("before", "arguments", "status", "says"),
    [
        (SAVED, SAVED, 2, "--resume goes on from it"),
        (SAVED, [*SAVED, "--resume", "--seed", 5, "--steps", 6], 1, "seed was 0, is 5"),
        (None, ["--log-json", "missing/log.jsonl"], 1, "No such file or directory"),
        (None, ["--data", "empty.txt"], 1, "is empty"),
        (None, ["--seq-len", 4000], 2, "this model has 64 positions"),
        (None, ["--data", "missing.txt"], 2, "no such file or directory"),
    ],
)
def test_what_a_run_cannot_do_has_its_status_and_its_message(
    runs, capsys, monkeypatch, before, arguments, status, says
):
    monkeypatch.chdir(runs.home)
    (runs.home / "empty.txt").touch()
    if before is not None:
        assert runs.train(*before) == 0
    assert runs.train(*arguments) == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--clip", 0.1, "--accumulate", 3], ["--step", "in_backward"]])
def test_plain_pytorch_gives_the_same_bits(runs, capsys, arguments):
    assert runs.train("--compare-plain", *arguments) == 0
    assert "plain PyTorch gives the same bits: every loss and all 17 tensors" in capsys.readouterr().out
    norms = [row["grad_norm"] for row in runs.rows(event="step")]
    assert all(norm > 0.1 for norm in norms) if "--clip" in arguments else norms == [None] * 4


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments",
    [pytest.param([], marks=pytest.mark.campaign), ["--clip", 0.1, "--accumulate", 2]],
    ids=["", "accumulated"],
)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "widened"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_plain_pytorch_gives_the_same_bits_in_16_bits(runs, capsys, monkeypatch, precision, is_fast, arguments):
    """On processors that are fast in the type, and on those that are not: there weights are widened to compute."""
    monkeypatch.setattr(f"patrickstar.step.resources.computes_{precision}", lambda: is_fast)
    assert runs.train("--compare-plain", "--precision", precision, *arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "plain PyTorch gives the same bits: every loss and all 17 tensors" in shown
    assert ("a loss scale of 65536 after 0 skipped steps" in shown) is (precision == "fp16")


@pytest.mark.parametrize(("fast", "want"), [(True, "bf16"), (False, "fp32")])
def test_the_precision_is_chosen_here_and_said_in_a_line(runs, capsys, monkeypatch, fast, want):
    monkeypatch.setattr("patrickstar.step.resources.computes_bf16", lambda: fast)
    assert runs.train(steps=1) == 0
    out = capsys.readouterr().out
    assert runs.rows()[0]["config"]["precision"] == want
    assert out.count("the compute device is fast in bf16: weights are bf16, with fp32 masters") == fast
    assert "precision was not given" not in out
    assert runs.train("--precision", "fp32", steps=1, log="said") == 0
    assert "fast in" not in capsys.readouterr().out


def test_a_difference_from_plain_pytorch_fails_the_run(runs, capsys, monkeypatch):
    padded = plain._padded
    monkeypatch.setattr(plain, "_padded", lambda tensor: padded(tensor).mul_(1 + 2**-20))
    assert runs.train("--compare-plain") == 1
    assert "plain PyTorch gives other bits" in capsys.readouterr().out


def test_files_that_are_no_text_are_skipped_in_one_warning(runs, capsys):
    for name in ("a.png", "b.png"):
        (runs.home / name).write_bytes(b"\x89PNG\xff")
    assert runs.train("--data", runs.home) == 0
    assert capsys.readouterr().out.count("warning: skipped 2 files that are not UTF-8 text") == 1


@pytest.mark.campaign
def test_a_process_of_its_own_trains_on_disk_under_tcmalloc_and_leaves_nothing_there(runs):
    command = [sys.executable, "-m", "patrickstar", "train", "--model", runs.model, "--data", runs.text, "--steps", 2]
    command += ["--device", "cpu", "--host-memory", "1200KiB", "--disk", runs.home / "disk", "--batch-size", 2]
    command += ["--seq-len", 16, "--compare-plain", "--log-json", runs.home / "log.jsonl"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PATRICKSTAR_ALLOCATOR")
    }
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "plain PyTorch gives the same bits" in done.stdout
    assert runs.rows()[-1]["moved"]["H>K"] > 0
    assert list((runs.home / "disk").iterdir()) == []
    assert ("starting over under tcmalloc" in done.stderr) == (tcmalloc_library() is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights", [pytest.param(False, marks=pytest.mark.campaign), True], ids=["fresh", "from a directory"]
)
def test_from_its_start_a_run_stays_within_a_budget_smaller_than_its_weights(runs, weights):
    budget = 320 * MIB
    big = runs.home / "big"
    big.mkdir()
    settings = {**json.loads(runs.model.read_text()), "n_embd": 1024, "n_layer": 8, "n_head": 16}
    (big / "config.json").write_text(json.dumps(settings))
    model = ModelSource.find(str(big / "config.json"))
    with torch.device("meta"):
        weight_bytes = sum(p.nbytes for p in model.build().parameters())
    assert weight_bytes > budget + 64 * MIB
    if weights:
        model.build().save_pretrained(big)
    common = ["train", "--data", "random", "--steps", 2, "--batch-size", 1, "--seq-len", 16, "--device", "cpu"]
    common += ["--precision", "fp32", "--host-memory", "320MiB", "--disk", runs.home / "disk", "--model"]
    commands = [[*common, runs.model], [*common, big if weights else big / "config.json"]]
    command = [sys.executable, "-m", "tests.cli.resident_child", json.dumps([[str(w) for w in c] for c in commands])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    grew = json.loads(done.stdout.splitlines()[-1])
    assert grew["status"] == 0, done.stderr
    assert max(grew["building"], grew["training"]) <= budget
