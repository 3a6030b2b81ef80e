"""`benchmarks/cluster.py` from beginning to end, in the part that measures."""

import pytest

from tests.benchmarks.scripts import run


@pytest.mark.campaign
def test_decisions_are_timed():
    out = run("cluster.py", "--only", "decisions")
    assert out.count("'p99'") == 8
