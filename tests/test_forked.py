"""A script that is forked says and does what one of its own interpreter would."""

import os
import subprocess
import sys

import pytest

from tests.forked import run_script

SCRIPT = """
import os, sys
sys.path.insert(0, "")
from beside import NAME
print(NAME, sys.argv[1:], os.getcwd(), os.environ["ASKED"], __name__)
print("said", file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError("of the script")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["0", "3", "raise"])
def test_a_script_is_run_as_an_interpreter_would(tmp_path, how):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "ASKED": "yes"}
    want = subprocess.run(
        [sys.executable, str(script), how], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    got = run_script(script, how, cwd=tmp_path, environment={"ASKED": "yes"})
    assert (got.returncode, got.stdout) == (want.returncode, want.stdout)
    assert got.stderr.splitlines()[0] == want.stderr.splitlines()[0] == "said"
    assert got.stderr.splitlines()[-1] == want.stderr.splitlines()[-1]


def test_a_script_that_does_not_end_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(TimeoutError, match="has not ended"):
        run_script(script, timeout=0.5)
