"""`benchmarks/disk.py` from beginning to end, on a few units."""

import re

import pytest

from tests.docs.pages import ROOT
from tests.forked import run_script

PATHS = f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"


@pytest.mark.campaign
@pytest.mark.parametrize("depth", [1, 3])
def test_both_sides_move_all_units_in_each_direction(depth, tmp_path):
    sizes = ["--directory", tmp_path, "--pairs", 2, "--units", 5, "--unit-mib", 1, "--depth", depth]
    done = run_script(ROOT / "benchmarks" / "disk.py", *sizes, environment={"PYTHONPATH": PATHS})
    assert done.returncode == 0, done.stderr
    cases = re.findall(
        r"^(\w+) +raw \d+ MiB/s, ours \d+ MiB/s; ([\d.]+) \(([\d.]+) to ([\d.]+)\)$", done.stdout, re.MULTILINE
    )
    assert [case for case, *_ in cases] == ["read", "write", "both"]
    assert all(0 < float(low) <= float(median) <= float(high) for _, median, low, high in cases)
    assert not list(tmp_path.iterdir())
