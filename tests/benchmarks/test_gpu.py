"""`benchmarks/gpu` from beginning to end at a tiny scale on an emulated device, and the page that is made of its results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.decoder import Decoder, Shape
from benchmarks.gpu.eight import shares
from benchmarks.gpu.results import RESULTS, Result
from benchmarks.gpu.side import Side
from benchmarks.gpu.sides import Managed, busy

from tests.benchmarks.scripts import script
from tests.docs.pages import ROOT
from tests.forked import run_script

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, inner=64, vocab=64)
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def run_part(part: str, out: Path) -> dict[str, Any]:
    options = [part, "--scale", "tiny", "--device", "emulated", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *options],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / f"{part}.json").read_text())
    assert found["complete"]
    assert found["scale"] == "tiny"
    return found


@pytest.mark.campaign
def test_the_roofline_has_every_way(tmp_path: Path) -> None:
    rates = run_part("link", tmp_path)["bytes_per_second"]
    assert {"slots, up", "slots, down", "slots, both", "pageable, up", "host, read and write"} <= set(rates)
    assert all(0 < rate["least"] <= rate["median"] <= rate["most"] for rate in rates.values())


@pytest.mark.campaign
def test_passes_are_measured_beside_a_copy(tmp_path: Path) -> None:
    rates = run_part("kernels", tmp_path)["bytes_per_second"]
    assert {"cpu, copy", "cpu, norm", "cpu, update in fp32"} <= set(rates)
    assert not any("failed" in rate for rate in rates.values())


@pytest.mark.campaign
@pytest.mark.slow
def test_sides_take_turns_and_each_has_a_ratio(tmp_path: Path) -> None:
    found = run_part("step", tmp_path)
    for key, name in (
        ("states off, 32 tokens", "states off"),
        ("all off, 16 tokens", "all off"),
        ("deferred, 32 tokens", "deferred"),
    ):
        (plain,), (ours,) = (found[key]["seconds"][side] for side in ("plain", name))
        assert found[key]["speed_over_first"][name]["median"] == plain / ours
        assert found[key]["model_tflops"][name] == 6 * found["numel"] * found[key]["tokens_a_step"] / ours / 1e12


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("part", ["eight", "largest-in-backward", "largest-clipped"])
def test_parts_come_to_their_end(part: str, tmp_path: Path) -> None:
    assert run_part(part, tmp_path)["numel"] == SHAPE.numel()


@pytest.mark.slow
@pytest.mark.campaign
def test_placement_has_one_digest_at_all_budgets(tmp_path: Path) -> None:
    found = run_part("placement", tmp_path)
    assert found["equal"] is True
    assert len(found["runs"]) == 10
    assert sum(run["moved"]["H>D"] > 0 for run in found["runs"].values()) >= 4


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("peer", ["fsdp2", "deepspeed"])
def test_a_peer_is_compared_where_it_is_installed(peer: str, tmp_path: Path) -> None:
    found = run_part(peer, tmp_path)
    if peer == "deepspeed" and importlib.util.find_spec(peer) is None:
        assert found["missing"] == {"deepspeed": "NotMeasuredError: deepspeed is not installed"}
        assert "steps" not in found
        return
    assert set(found["steps"]["speed_over_first"]) == {"managed", "managed, deferred"}


def test_without_a_gpu_nothing_is_measured() -> None:
    done = run_script("benchmarks.gpu", "link", cwd=ROOT, environment=ENVIRONMENT)
    assert done.returncode == 2
    assert "NOT MEASURED" in done.stderr


def test_a_part_that_takes_too_long_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert command.run_apart("placement", ["--scale", "tiny", "--device", "emulated"], 1) == 1
    assert time.monotonic() - began < 10
    assert "ended after its limit of 1 s" in capsys.readouterr().out


def test_a_result_is_written_with_every_figure_and_tiny_ones_only_where_told(tmp_path: Path) -> None:
    given = Namespace(out=tmp_path, scale="full", device="emulated")
    result = Result("link", given)
    result.set(first=1)
    written = json.loads((tmp_path / "link.json").read_text())
    assert (written["first"], written["complete"]) == (1, False)
    result.end()
    assert json.loads((tmp_path / "link.json").read_text())["complete"]
    Result("nowhere", Namespace(out=None, scale="tiny", device="emulated")).end()
    assert not (RESULTS / "nowhere.json").exists()


def test_the_decoder_has_as_many_parameters_as_its_shape_says() -> None:
    assert sum(p.numel() for p in Decoder(SHAPE).parameters()) == SHAPE.numel()
    with torch.device("meta"):
        large = Shape(layers=36)
        assert sum(p.numel() for p in Decoder(large).parameters()) == large.numel()


def test_busy_time_counts_what_overlaps_once() -> None:
    found = busy([
        (0, 10, "gemm"), (5, 20, "gemm"), (30, 40, "add"), (0, 30, "Memcpy HtoD (Pinned -> Device)"), (2, 4, "Memset"),
    ])  # fmt: skip
    assert found["kernels_share"] == 30 / 40
    assert found["up_share"] == 30 / 40
    assert found["down_share"] == 0
    assert found["longest_seconds"]["gemm"] == 25 / 1e9


def test_foreseen_memory_is_compared_with_what_the_driver_and_torch_have() -> None:
    row = {
        "mapped_bytes": 60, "allocated_peak_bytes": 40, "pinned_bytes": 202,
        "foreseen_peak_bytes": {"device": 98, "host": 200},
    }  # fmt: skip
    assert shares(row) == {"device_foreseen_over_measured": 0.98, "pinned_over_asked": 1.01}


def test_a_budget_that_is_refused_in_the_first_step_is_followed_by_the_next() -> None:
    side = Side("managed", SHAPE, "emulated", device_memory=("64KiB", "16MiB"))
    library = Managed(side)
    loss = library.step(torch.zeros(2, 16, dtype=torch.int64))
    assert loss.isfinite()
    assert len(library.refusals) == 1
    assert library.session.stats().steps == 1
    library.close()


# the page


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = script("docs", "make_gpu_page")
    monkeypatch.setattr(found, "RESULTS", tmp_path)
    return found


def write(folder: Path, part: str, **figures: Any) -> None:
    machine = {"gpu": "H", "cuda": "13", "torch": "2", "commit": ""}
    about = {"scale": "full", "complete": True, "command": f"run {part}", "machine": machine}
    (folder / f"{part}.json").write_text(json.dumps({**about, **figures}))


def rows(text: str) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {row[0]: row[-1] for row in cells}


def test_what_no_result_has_is_not_measured(page: Any) -> None:
    assert set(rows(page.targets()).values()) == {"not measured"}
    assert set(rows(page.roofline()).values()) == {"not measured"}
    assert page.machine() == "No GPU has run them yet."


def test_figures_of_a_tiny_scale_are_none(page: Any, tmp_path: Path) -> None:
    write(tmp_path, "placement", scale="tiny", equal=True)
    assert rows(page.targets())["bits at all budgets and ways"] == "not measured"


def test_figures_stand_where_they_belong(page: Any, tmp_path: Path) -> None:
    spread = {"median": 0.96, "least": 0.95, "most": 0.97, "count": 6}
    sides = {f"{name}, 16384 tokens": {"speed_over_first": {name: spread}} for name in ("all off", "deferred")}
    write(tmp_path, "step", numel=4e9, **sides)
    write(tmp_path, "fsdp2", steps={"speed_over_first": {"managed": {**spread, "median": 5.0}}})
    write(tmp_path, "deepspeed", missing={"deepspeed": "NotMeasuredError: deepspeed is not installed"})
    write(tmp_path, "eight", complete=False, **{"8192 tokens": {"profile": {"kernels_share": 0.98}}})
    write(tmp_path, "placement", equal=False)
    found = rows(page.targets())
    assert found["all off the device, in backward, 16k tokens, 4.0B"] == "96.0% (95.0% to 97.0%, 6 times)"
    assert found["all off the device, deferred, 16k tokens, 4.0B"] == "96.0% (95.0% to 97.0%, 6 times)"
    assert found["against FSDP2 with CPU offload"].startswith("5.00 x")
    assert found["against DeepSpeed ZeRO-3 with CPU offload"] == "not measured: deepspeed is not installed"
    assert found["the device idles, 8B, 8k tokens"] == "2.0%"
    assert found["bits at all budgets and ways"] == "not equal"
    assert "`run eight`: H, CUDA 13, torch 2, ? cores, commit `not known`; it did not come to its end" in page.machine()
