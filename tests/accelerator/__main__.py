"""`python -m tests.accelerator [OPTIONS OF PYTEST]`: the tests that need a device, on the one that these tests bring with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.accelerator import build

HERE = Path(__file__).parent
NOTE = """\
{line}
NOT TESTED: device="cuda". {why}.
The tests in tests/accelerator and tests/cuda bring a device of their own, which has to be compiled.
{line}"""


def main(options: list[str]) -> int:
    missing = build.why_not()
    if missing is not None:
        print(NOTE.format(line="!" * 100, why=missing), file=sys.stderr)
        return 0
    build.library()
    folders = [str(HERE), str(HERE.parent / "cuda")]
    command = [sys.executable, "-m", "pytest", "-p", "tests.accelerator.plugin"]
    paths = [option for option in options if Path(option.partition("::")[0]).exists()]
    return subprocess.run([*command, *options, *(() if paths else folders)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
