"""The pytest plugin that gives every test of a process the GPU, behind the interface of the test device as far as a GPU has that.

What can only be asked of the test device (its schedule, its faults, its capacity, counts of waits) is left to it: such tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from patrickstar.memory import driver
from patrickstar.step import resources
from tests.gpu.workspaces import fill_workspaces

_UNBOUNDED = 1 << 62


class GPU:
    """The GPU, with what tests ask of `tests.accelerator.cuda.Accelerator`."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}  # by address
        self.most_mapped = 0
        self.registered: dict[int, int] = {}
        self.most_pinned = _UNBOUNDED

    def configure(
        self, share: float = 0.0, seed: int = 0, *, capacity: int | None = None, most_pinned: int = _UNBOUNDED
    ) -> None:
        if capacity is not None:
            pytest.skip("a GPU's capacity is what it is")
        self.most_pinned = most_pinned
        self.finish()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def fail(self, operation: str, after: int = 0) -> NoReturn:
        pytest.skip("a GPU does not fail on request")

    def waits(self) -> dict[int, Counter[str]]:
        """None: a GPU does not count who waits for it. Tests of the counts themselves are in `ONLY_THERE`."""
        return {}

    def eager_operations(self) -> Counter[str]:
        return Counter()

    def pending(self) -> NoReturn:
        pytest.skip("a GPU does not say what is queued")

    def run_one(self) -> NoReturn:
        pytest.skip("a GPU runs what is queued when it likes")

    def races(self) -> list[str]:
        return []

    def driver_bytes(self) -> int:
        return sum(self.mapped.values())

    def pinned_bytes(self) -> int:
        return sum(self.registered.values())

    def most_driver_bytes(self) -> int:
        """The most that `driver_bytes` has been since this was last asked for."""
        most, self.most_mapped = self.most_mapped, self.driver_bytes()
        return most

    @contextlib.contextmanager
    def watching_the_host(self) -> Iterator[None]:
        yield


class _Driver:
    """The driver's library, whose mappings are noted."""

    def __init__(self, library: Any, gpu: GPU) -> None:
        self._library, self._gpu = library, gpu

    def __getattr__(self, name: str) -> Any:
        function, mapped = getattr(self._library, name), self._gpu.mapped

        def noted(*arguments: Any) -> int:
            result = int(function(*arguments))
            if result == 0 and name == "cuMemMap":
                mapped[arguments[0].value] = arguments[1].value
                self._gpu.most_mapped = max(self._gpu.most_mapped, sum(mapped.values()))
            elif result == 0 and name == "cuMemUnmap":
                del mapped[arguments[0].value]
            return result

        return noted


class _Runtime:
    """The runtime's functions, whose registrations are noted, and refused where a test wants that."""

    def __init__(self, runtime: Any, gpu: GPU) -> None:
        self._runtime, self._gpu = runtime, gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:  # noqa: N802  the runtime's name
        if sum(self._gpu.registered.values()) + size > self._gpu.most_pinned:
            return 2  # cudaErrorMemoryAllocation
        error = self._runtime.cudaHostRegister(address, size, flags)
        if int(error) == 0:
            self._gpu.registered[address] = size
        return error

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802  the runtime's name
        self._gpu.registered.pop(address, None)
        return self._runtime.cudaHostUnregister(address)


_GPU = GPU()

# Tests that plant a fault for the checker of the test device to find, or whose only statement is a count of its own.
ONLY_THERE = (
    "test_a_wait_that_is_left_out_is_reported",
    "test_a_kernel_that_writes_waits_for_copies_that_read",
    "test_each_stream_waits_once_for_what_was_written",
    "test_a_step_never_waits_for_the_device",
    "test_a_step_that_needs_a_number_waits_for_that_alone",
    "test_the_host_waits_once_for_all_gradients",
    "test_torchs_operations_stand_in_for_triton",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What only the test device can show is skipped."""
    for item in items:
        if item.name.partition("[")[0] in ONLY_THERE:
            item.add_marker(pytest.mark.skip(reason="only the test device counts waits and reports races"))


@pytest.fixture
def accelerator() -> GPU:
    return _GPU


@pytest.fixture(autouse=True, scope="session")
def notes_are_taken() -> Iterator[None]:
    """What the library maps and registers is noted."""
    with pytest.MonkeyPatch.context() as patch:
        library, runtime = _Driver(driver._driver(), _GPU), _Runtime(torch.cuda.cudart(), _GPU)
        patch.setattr(driver, "_driver", lambda: library)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        yield


@pytest.fixture(autouse=True, scope="session")
def libraries_have_their_workspaces() -> Iterator[None]:
    """Products have been taken forward and backward, so that what cuBLAS keeps (32 MiB a thread and stream) is there before a session.

    On all streams that torch gives out, and on a thread's, whose place a later one takes. So nothing is left for it: budgets of tests are smaller.
    """
    fill_workspaces()
    for _ in range(32):
        with torch.cuda.stream(torch.cuda.Stream()):
            fill_workspaces()
    thread = threading.Thread(target=fill_workspaces)
    thread.start()
    thread.join()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "_workspace_percent", lambda: 0)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_to_chance() -> Iterator[None]:
    """Plain PyTorch has the same bits twice: deterministic algorithms, and no TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    _GPU.configure()
    yield
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)


# Time, and results as they come


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test begins after the limit that `python -m tests.gpu` gives a stage."""
    if time.time() > float(os.environ.get("PATRICKSTAR_TESTS_UNTIL", "inf")):
        pytest.skip("no time is left")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test, in the process that hears of all of them."""
    log = os.environ.get("PATRICKSTAR_TESTS_LOG")
    if log is None or "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    line = {
        "stage": os.environ.get("PATRICKSTAR_TESTS_STAGE", ""),
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "why": _why(report),
        "measured": dict(report.user_properties),
    }
    with Path(log).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _why(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash is not None else report.longrepr or "").split())
