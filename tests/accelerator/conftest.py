"""These tests need the device: without it they are not collected. `python -m tests.accelerator` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

if "tests.accelerator.cuda" not in sys.modules:
    collect_ignore_glob = [str(Path(__file__).parent / "test_*.py")]
