"""One thread for models of this size, and what every test of a session may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from patrickstar.testing.faults import FaultyIO
from tests.session.builders import MACHINES, Pair


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny operations gain nothing from a second thread, and wait for it where another process has the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No session leaves a dispatch mode on torch's stack when it is closed; if one does, the next test has none of it."""
    yield
    left = len(_get_current_dispatch_mode_stack())
    for _ in range(left):
        _pop_mode()
    assert not left, f"{left} dispatch modes were left on the stack"


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs whose sessions are closed when the test is over, whatever has become of it."""
    pairs: list[Pair] = []

    def make(*args: Any, **keywords: Any) -> Pair:
        pairs.append(Pair(*args, **keywords))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.session.close()


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Memory so small that a `mlp()` has to move, on each kind of machine."""
    return MACHINES[request.param](tmp_path / "disk")


@pytest.fixture
def on_disk(tmp_path: Path) -> dict[str, Any]:
    """The machine with a disk tier, on which what a test itself makes is no matter of a bounded arena."""
    return MACHINES["cpu+disk"](tmp_path / "disk")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyIO:
    """The calls of the next session's disk: real ones, until a fault is added."""
    io = FaultyIO()
    monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: io)
    return io
