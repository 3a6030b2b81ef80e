"""The pytest plugin that has Triton interpret kernels, on the CPU: `python -m tests.triton` loads it, before torch and Triton."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["TRITON_INTERPRET"] = "1"  # before triton is

from collections.abc import Iterator

import numpy as np
import pytest
import triton

assert tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9), "the interpreter's fma rounds twice before 3.9"


@pytest.fixture(autouse=True)
def nothing_is_wrong_with_inf() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of each overflow and each NaN."""
    with np.errstate(all="ignore"):
        yield
