"""The command line's `train` and `plan` on the device: batches go where the model computes, and the bits are those of plain PyTorch there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from patrickstar.cli.main import main
from tests.accelerator.cuda import Accelerator
from tests.cli.runs import TINY
from tests.docs.pages import ROOT
from tests.examples.test_finetune import directory  # noqa: F401  (a fixture)

BUDGET = "48MiB"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    model = tmp_path / "config.json"
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # Its query, key and value are matrices of more than a granule, so that something moves in this budget.
    larger = {"n_embd": 512, "n_layer": 2, "vocab_size": 256}
    model.write_text(json.dumps({**TINY, **larger, **quiet, "bos_token_id": 0, "eos_token_id": 0}))
    shape = ["--batch-size", "1", "--seq-len", "8"]
    return ["--model", str(model), "--device", "cuda", "--precision", "fp32", *shape]


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param((), marks=pytest.mark.campaign),
        pytest.param(("--clip", "0.5"), marks=pytest.mark.campaign),
        ("--step", "in_backward"),
        ("--precision", "bf16", "--clip", "0.5"),
        pytest.param(("--precision", "bf16"), marks=pytest.mark.campaign),
        pytest.param(("--precision", "fp16"), marks=pytest.mark.campaign),
    ],
    ids=lambda ways: " ".join(ways) or "fp32",
)
def test_a_run_has_the_bits_of_plain_pytorch_there(
    ways: tuple[str, ...],
    arguments: list[str],
    accelerator: Accelerator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "log.jsonl"
    run = [*arguments, *ways, "--data", "random", "--steps", "2", "--device-memory", BUDGET, "--compare-plain"]
    assert main(["train", *run, "--log-json", str(log)]) == 0, capsys.readouterr()
    said = capsys.readouterr()
    assert "computes on the GPU cuda:0 (test accelerator)" in said.out + said.err
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    summary = rows[-1]
    assert summary["moved"]["H>D"] > 0
    assert summary["peak"]["device"] <= 48 << 20
    narrowest = 4 if rows[0]["config"]["precision"] == "fp32" else 2
    assert rows[0]["plan"]["chunk_numel"] * narrowest % (2 << 20) == 0
    assert not accelerator.races()


def test_the_example_fine_tunes_a_model_that_the_device_does_not_hold(
    directory: Path,  # noqa: F811
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Five bottles stand on the wall, and five bottles stay. " * 20)
    shape = ["--steps", "2", "--seq-len", "16", "--out", str(tmp_path / "out")]
    command = ["finetune_7b.py", str(directory), str(text), *shape, "--device-memory", "32MiB"]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "examples" / "finetune_7b.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("computes on test accelerator\n")
    assert "step 2 of 2: loss " in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not accelerator.races()
