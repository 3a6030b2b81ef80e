"""`benchmarks/planning.py` and `benchmarks/overlap.py` from beginning to end, on small models."""

import pytest

from tests.benchmarks.scripts import run


@pytest.mark.campaign
def test_a_trace_and_its_plans_are_timed():
    out = run("planning.py", "--model", "gpt2-120m", "--tokens", 16, "--rounds", 1)
    assert "trace: median" in out
    assert "plan: median" in out


@pytest.mark.campaign
@pytest.mark.slow
def test_steps_with_early_transfers_have_the_losses_of_others():
    out = run("overlap.py", "--pairs", 1, "--layers", 1, "--tokens", 8, "--width", 48, "--vocabulary", 128)
    assert out.count("x the bound") == 6
