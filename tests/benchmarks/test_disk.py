"""`benchmarks/disk.py` from beginning to end, on a few units."""

import re

import pytest

from tests.benchmarks.scripts import run


@pytest.mark.campaign
@pytest.mark.parametrize("depth", [1, 3])
def test_both_sides_move_all_units_in_each_direction(depth, tmp_path):
    sizes = ["--directory", tmp_path, "--pairs", 2, "--units", 5, "--unit-mib", 1, "--depth", depth]
    line = r"^(\w+) +raw \d+ MiB/s, ours \d+ MiB/s; ([\d.]+) \(([\d.]+) to ([\d.]+)\)$"
    cases = re.findall(line, run("disk.py", *sizes), re.MULTILINE)
    assert [case for case, *_ in cases] == ["read", "write", "both"]
    assert all(0 < float(low) <= float(median) <= float(high) for _, median, low, high in cases)
    assert not list(tmp_path.iterdir())
