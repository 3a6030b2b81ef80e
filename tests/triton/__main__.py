"""`python -m tests.triton [OPTIONS OF PYTEST]`: the tests of Triton's kernels, by its interpreter and by its compiler. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.triton import environment

HERE = Path(__file__).parent
NOTE = """\
{line}
NOT TESTED: Triton's kernels. {why}.
The tests in tests/triton install a Triton of their own into build/triton, some 700 MiB.
{line}"""
# Triton asks once, when it is imported, whether it is to interpret kernels or to compile them: a process for each.
PARTS = ("interpreted", "compiled")
NO_TESTS = 5  # pytest's exit code
NOT_INSTALLED = 1


def main(options: list[str]) -> int:
    never = environment.why_never()
    missing = never or environment.why_not()
    if missing is None:
        try:
            found = environment.installed()
        except environment.EnvironmentFailure as failure:
            missing = f"it could not be installed: {failure}"
    if missing is not None:
        print(NOTE.format(line="!" * 100, why=missing), file=sys.stderr)
        return 0 if never else NOT_INSTALLED  # nobody can mend the platform
    paths = [option for option in options if Path(option.partition("::")[0]).exists()]
    codes = []
    for part in PARTS:
        if paths and not any(
            (HERE / part).is_relative_to(_absolute(path)) or _absolute(path).is_relative_to(HERE / part)
            for path in paths
        ):
            continue
        own = [option for option in options if option not in paths or _absolute(option).is_relative_to(HERE / part)]
        command = [sys.executable, "-m", "pytest", "-p", f"tests.triton.{part}.plugin", *own]
        if len(own) == len(options) - len(paths):
            command.append(str(HERE / part))
        path = os.pathsep.join(filter(None, (str(found), os.environ.get("PYTHONPATH"))))
        codes.append(subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode)
    ran = [code for code in codes if code != NO_TESTS]
    return max(ran) if ran else NO_TESTS


def _absolute(path: str) -> Path:
    return Path(path.partition("::")[0]).resolve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
