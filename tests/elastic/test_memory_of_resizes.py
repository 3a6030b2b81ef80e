"""`host_memory` bounds what each rank of a job really holds, while it is resized too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.running import ENVIRONMENT, SOURCE

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(("budget_mib", "on_disk"), [(600, False), (400, True), (280, True)])
def test_no_rank_holds_more_than_its_share_in_a_resize(budget_mib: int, on_disk: bool, tmp_path: Path) -> None:
    """600 MiB hold all states of one, and not beside those of one of two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    job = f"--min 1 --max 2 --threads 1 --save-every 0 --at 3:2,6:1,9:2 --job-dir {tmp_path / 'job'}".split()
    program = ["-W", "ignore", "-m", "tests.elastic.grown", f"{2 * budget_mib}MiB", str(disk) if on_disk else ""]
    command = [sys.executable, "-m", "patrickstar", "elastic", "run", *job, "--", sys.executable, *program]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=SOURCE, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.partition("grown ")[2].split() for line in done.stdout.splitlines() if "grown " in line]
    assert "".join(size for _, size, _ in sorted(told, key=lambda one: int(one[0]))) == "111222222111222222"
    over = [(step, size, int(grown) >> 20) for step, size, grown in told if int(grown) > budget_mib << 20]
    assert not over, over
