"""Bytes a parameter as the system counts them. `tests/session/` counts the same over all tiers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.memory.bytes_child import CASES

MORE = 1.02
"""Of what is planned: padding, and the few pages that a session takes beside its data."""


IN_BRIEF = ("bf16-in-backward",)
"""What `make test` measures; `make test-full` measures all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_BRIEF else pytest.mark.campaign) for name in CASES]
)
def test_the_process_grows_by_what_a_parameter_is_to_take(name: str) -> None:
    command = [sys.executable, "-m", "tests.memory.bytes_child", name]
    environment = {**os.environ, "LD_PRELOAD": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown = float(done.stdout)
    print(f"{name}: {grown:.4f} of what was planned")
    assert grown <= MORE
    assert grown >= 0.98, "it was not all there when it was counted"
