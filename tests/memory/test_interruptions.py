"""memory/interruptions.py: SIGINT waits, and is not lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from patrickstar.memory.interruptions import InterruptionsPutOff


@pytest.fixture(autouse=True)
def handler_of_python() -> Iterator[None]:
    """Test processes may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_has_begun_ends_and_whoever_asked_is_told_then(depth: int) -> None:
    done = list[int]()

    def work(depth: int) -> None:
        with InterruptionsPutOff():
            if depth > 1:
                work(depth - 1)
            else:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            done.append(depth)

    with pytest.raises(KeyboardInterrupt):
        work(depth)
    assert done == list(range(1, depth + 1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_is_not_hidden_by_nothing() -> None:
    with pytest.raises(ValueError, match="own"), InterruptionsPutOff():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_so_and_other_threads_touch_no_handler() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with InterruptionsPutOff():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = list[object]()

    def look() -> None:
        with InterruptionsPutOff():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
