"""The Triton that these tests run, in a folder of its own: what is installed for everybody else stays as it is. Imports no torch."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENT = ROOT / "requirements" / "triton.txt"
BUILDS = ROOT / "build" / "triton"
CACHE = BUILDS / "cache"
"""What Triton has compiled."""

NEEDED_BYTES = 1 << 30


class EnvironmentFailure(Exception):
    """pip could not install it."""


def why_never() -> str | None:
    """Why there can be no Triton on this platform, or None."""
    if platform.system() != "Linux":
        return f"Triton is there for Linux, and this is {platform.system()}"
    return None


def why_not() -> str | None:
    """What is missing here to run it, or None."""
    if importlib.util.find_spec("numpy") is None:
        return "its interpreter needs numpy, which is not installed"
    BUILDS.mkdir(parents=True, exist_ok=True)
    if not folder().exists() and shutil.disk_usage(BUILDS).free < NEEDED_BYTES:
        return f"it needs {NEEDED_BYTES >> 20} MiB of disk"
    return None


def folder() -> Path:
    """Where it is, or will be: a folder to import from."""
    (line,) = [line for line in REQUIREMENT.read_text().splitlines() if line and not line.startswith("#")]
    return BUILDS / f"{line.replace('==', '-')}-python{sys.version_info.major}.{sys.version_info.minor}"


def installed() -> Path:
    """The folder, after it has been filled if it was not there.

    Raises:
        EnvironmentFailure: pip's own words.
    """
    target = folder()
    if not target.exists():
        # As a whole or not at all: an interrupted pip leaves nothing behind that looks complete.
        with tempfile.TemporaryDirectory(dir=BUILDS) as temporary:
            filled = Path(temporary) / "filled"
            # It needs nothing but what torch needs too.
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(filled)]
            done = subprocess.run(
                [*command, "--requirement", str(REQUIREMENT)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise EnvironmentFailure(done.stderr.strip() or f"pip ended with {done.returncode}")
            filled.rename(target)
    return target
