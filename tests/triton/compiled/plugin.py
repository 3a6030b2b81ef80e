"""The pytest plugin that has Triton compile kernels, for GPUs that are not there: `python -m tests.triton` loads it, before torch and Triton."""

from __future__ import annotations

import os

from tests.triton.environment import CACHE

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["TRITON_CACHE_DIR"] = str(CACHE)
os.environ.pop("TRITON_INTERPRET", None)
