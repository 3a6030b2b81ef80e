"""These tests need a device: without one they are not collected. `python -m tests.gpu` and `python -m tests.accelerator` run them."""

from __future__ import annotations

import sys
from pathlib import Path

if not {"tests.gpu.plugin", "tests.accelerator.plugin"} & set(sys.modules):
    collect_ignore_glob = [str(Path(__file__).parent / "test_*.py")]
