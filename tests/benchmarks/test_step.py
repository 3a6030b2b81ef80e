"""`benchmarks/step.py` from beginning to end, on the smallest model of the table cut to one block."""

import json
import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.mark.slow
def test_a_round_gives_every_figure(tmp_path):
    out = tmp_path / "step.json"
    sizes = ["--model", "gpt2-120m", "--layers", 1, "--batch-size", 1, "--seq-len", 16, "--rounds", 1]
    variants = ["--variant", "plain", "--variant", "managed budget=half disk=on"]
    # No machine has the memory for this share.
    variants += ["--variant", "managed budget=1e6 disk=on"]
    done = run(*sizes, *variants, "--disk", tmp_path, "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    plain, half = result["rows"]
    assert (plain["variant"], half["variant"]) == ("plain", "managed budget=half disk=on")
    assert plain["ratios"] == [1.0]
    assert half["ratios"][0] == half["seconds"][0] / plain["seconds"][0]
    assert plain["moved"] == {}
    assert half["moved"]["K>H"] > 0
    assert half["grew_bytes"] > 0
    assert half["executed_tflops"] > half["model_tflops"] > 0
    assert half["tokens_per_second"] == pytest.approx(16 / half["median_seconds"])
    assert 0 < half["share_of_roofline"] < 1
    assert set(result["machine"]) >= {"cpu", "commit", "matmul_flops_per_second", "disk_bytes_per_second"}
    (why,) = result["refused"].values()
    assert "are available" in why
    assert "managed budget=half disk=on: " in done.stdout
