"""Python code in a process of its own that has this package without what the package imports by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import patrickstar

# torch would take seconds, and its freed blocks would be in the way of what is measured.
PRELUDE = f"""
import sys, types
sys.modules["patrickstar"] = package = types.ModuleType("patrickstar")
package.__path__ = [{str(Path(patrickstar.__file__).parent)!r}]
"""


def run(code: str, **environment: str) -> str:
    """What the code prints; fails where it does."""
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
