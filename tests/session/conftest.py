"""What every test of a session may ask for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from patrickstar.core.planes import STEP
from patrickstar.plan.actions import Issue
from patrickstar.tracing.seen_operations import show_to, shown_to
from tests.faults import FaultyIO
from tests.session.builders import MACHINES, Pair, store_of
from tests.session.script import Script
from tests.session.test_exceptions import Trips


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No session sees operations when it is closed; if one does, the next test has none of it."""
    yield
    left = shown_to()
    if left:
        show_to(())
    assert not left, f"operations are still shown to {left}"


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


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """A `mlp()` on a device on which it has to move, and its plain twin."""
    return make_pair()


@pytest.fixture
def trained(pair: Pair) -> Pair:
    """The same after a step."""
    pair.train(1)
    return pair


@pytest.fixture
def make_script() -> Iterator[Callable[..., Script]]:
    """Makes scripts whose sessions are closed when the test is over, whatever has become of them."""
    scripts: list[Script] = []

    def make(*args: Any, **keywords: Any) -> Script:
        scripts.append(Script(*args, **keywords))
        return scripts[-1]

    yield make
    for script in scripts:
        script.managed.close()


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Memory so small that a `mlp()` has to move, on each kind of machine."""
    return MACHINES[request.param](tmp_path / "disk")


@pytest.fixture
def on_disk(tmp_path: Path) -> dict[str, Any]:
    """The machine with a disk tier, on which what a test itself makes is no matter of a bounded arena."""
    return MACHINES["cpu+disk"](tmp_path / "disk")


@pytest.fixture
def moving(make_pair: Callable[..., Pair], machine: dict[str, Any]) -> Pair:
    """A pair on each kind of machine."""
    return make_pair(**machine)


@pytest.fixture
def disk_pair(make_pair: Callable[..., Pair], on_disk: dict[str, Any]) -> Pair:
    return make_pair(**on_disk)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyIO:
    """The calls of the next session's disk: real ones, until a fault is added."""
    io = FaultyIO()
    monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: io)
    return io


@pytest.fixture
def disarmed() -> Iterator[None]:
    """What was to raise in a backward does so no more."""
    yield
    Trips.armed = False


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pair], AbstractContextManager[None]]:
    """Has the first wait for an update interrupted while that is in the middle of its work, in the lane's thread."""

    @contextmanager
    def interrupted(pair: Pair) -> Iterator[None]:
        begun, may_end = threading.Event(), threading.Event()
        passes, store = type(pair.session._parts.training.updates.passes["cpu"]), type(store_of(pair.session))
        update, real_wait, real_land = passes.update, store._wait, store._land

        def slow(*args: Any, **keywords: Any) -> None:
            begun.set()
            assert may_end.wait(60)
            update(*args, **keywords)

        def wait(self: Any, issue: Issue) -> None:
            if issue.of.plane == STEP and not may_end.is_set():
                assert begun.wait(60)
                raise KeyboardInterrupt
            real_wait(self, issue)

        def land(self: Any, issue: Issue) -> None:
            threading.Timer(0.1, may_end.set).start()
            real_land(self, issue)
            assert issue.of.plane != STEP or may_end.is_set(), "it goes on while it is under way"

        with monkeypatch.context() as patched:
            patched.setattr(passes, "update", slow)
            patched.setattr(store, "_wait", wait)
            patched.setattr(store, "_land", land)
            yield

    return interrupted


@pytest.fixture
def failing_update(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pair, int], AbstractContextManager[None]]:
    """Has the kernel of the n-th update raise."""

    @contextmanager
    def failing(pair: Pair, nth: int) -> Iterator[None]:
        passes, calls = type(pair.session._parts.training.updates.passes["cpu"]), itertools.count(1)
        update = passes.update

        def fails(*args: Any, **keywords: Any) -> None:
            if next(calls) == nth:
                raise MemoryError
            update(*args, **keywords)

        with monkeypatch.context() as patched:
            patched.setattr(passes, "update", fails)
            yield

    return failing
