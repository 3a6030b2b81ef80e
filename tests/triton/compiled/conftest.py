"""These tests need Triton: without it they are not collected. `python -m tests.triton` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

if "tests.triton.compiled.plugin" not in sys.modules:
    collect_ignore_glob = [str(Path(__file__).parent / "test_*.py")]
