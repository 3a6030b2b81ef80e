"""One thread, so that runs compare and shared machines do not oversubscribe; Hypothesis derandomised, so that the suite is deterministic."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in child processes

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """torch computes on one thread in every test."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_bf16_by_default() -> Iterator[None]:
    """Where no precision is given, tests run in fp32 on every machine; those that ask for bf16 say what computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar.runtime.precision.computes_bf16", lambda: False)
        yield
