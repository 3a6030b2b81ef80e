"""Makes the CPU build of torch believe that it has one CUDA device. To be imported before torch, in a process of its own.

`torch.cuda` is filled in with what a CPU build lacks: everything goes to the compiled library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.accelerator.build import MODULE, library

if "torch" in sys.modules:
    raise ImportError("the test accelerator has to be loaded before torch, which asks once whether there is a device")

LIBRARY = library()
# Its symbols are looked for by all that comes later: the hooks of CUDA, and the driver's functions.
DRIVER = ctypes.CDLL(str(LIBRARY), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402

_spec = importlib.util.spec_from_file_location(MODULE, LIBRARY)
assert _spec is not None
assert _spec.loader is not None
_module: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

DEFAULT_CAPACITY = 1 << 32


class Accelerator:
    """The device that tests see: its schedule, its capacity and its faults, and what it has noticed."""

    def configure(
        self,
        share: float = 0.0,
        seed: int = 0,
        *,
        capacity: int = DEFAULT_CAPACITY,
        most_pinned: int = DEFAULT_CAPACITY,
    ) -> None:
        """Begins anew, when all that is queued has run.

        `share` is how much of what is queued runs before somebody must wait for it: 0 for nothing, 1 for everything at
        once, between them as the seed has it. `capacity` in bytes is of torch's allocator and of the driver's together; `most_pinned` is of the host.
        """
        _module.configure(share, seed, capacity, most_pinned)

    def fail(self, operation: str, after: int = 0) -> None:
        """Fails the next operation whose name contains this, after so many that do not; nothing runs after it, and all that is asked of the
        device from then on raises `torch.AcceleratorError`."""
        _module.fail(operation, after)

    def finish(self) -> None:
        """Runs all that is queued, and forgets a failure."""
        _module.finish()

    @contextmanager
    def watching_the_host(self) -> Iterator[None]:
        """Checks what the host does with pinned memory: torch's operations, and reads and writes of files."""
        number = _module.observe_host()
        calls = {"preadv": os.preadv, "pwritev": os.pwritev, "pwrite": os.pwrite}
        try:
            for name, call in calls.items():
                setattr(os, name, self.seen(name, call, writes=name == "preadv"))
            yield
        finally:
            for name, call in calls.items():
                setattr(os, name, call)
            _module.unobserve_host(number)

    def seen(self, name: str, call: Callable[..., int], *, writes: bool) -> Callable[..., int]:
        """The call, which uses its buffers from its begin to its end."""

        def seen(descriptor: int, buffers: Any, *others: int) -> int:
            each = buffers if isinstance(buffers, list | tuple) else [buffers]
            uses = [partial(_module.touch_host, *_extent(buffer), writes, name) for buffer in each]
            for use in uses:
                use()
            try:
                return call(descriptor, buffers, *others)
            finally:
                for use in uses:
                    use()

        return seen

    def races(self) -> list[str]:
        """Accesses that nothing orders, and those of memory that is not there, since they were last asked for."""
        races: list[str] = _module.take_races()
        return races

    def waits(self) -> dict[int, Counter[str]]:
        """How often each thread (by its native id) has waited for the device, by what for, since it was last asked."""
        threads: dict[int, Counter[str]] = {}
        for (thread, kind), count in _module.take_waits().items():
            threads.setdefault(thread, Counter())[kind] += count
        return threads

    def eager_operations(self) -> Counter[str]:
        """Operations that had to run at once to be emulated, which a device does not wait for."""
        return Counter(_module.take_eager_operations())

    def pending(self) -> int:
        """Tasks that are queued."""
        return int(_module.pending())

    def run_one(self) -> bool:
        """Runs a task that can run, if there is one."""
        return bool(_module.run_one())

    def driver_bytes(self) -> int:
        """Bytes made at the driver, beside those of torch's allocator."""
        return int(_module.driver_bytes())

    def pinned_bytes(self) -> int:
        """Bytes of the host that are pinned."""
        return int(_module.pinned_bytes())

    def resize_storage(self, tensor: torch.Tensor, nbytes: int) -> None:
        """`tensor.untyped_storage().resize_(nbytes)`, which a CPU build refuses for CUDA."""
        _module.resize_storage(tensor, nbytes)


def _extent(buffer: Any) -> tuple[int, int]:
    """The address and length of a buffer."""
    there = np.frombuffer(buffer, dtype=np.uint8) if len(buffer) else np.empty(0, dtype=np.uint8)
    return int(there.ctypes.data), there.nbytes


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> _Stream:
        if keywords:
            return super().__new__(cls, **keywords)
        return super().__new__(cls, "cuda", priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> _Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing)


class _Runtime:
    """The functions of the CUDA runtime that libraries call through `torch.cuda.cudart()`."""

    class cudaError:  # noqa: N801
        success = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return 0 if _module.register_host(address, nbytes) else 2

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if _module.unregister_host(address) else 1

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return "no error" if error == 0 else "out of memory" if error == 2 else "invalid argument"


@contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


class _OnDevice:
    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def _without_device(function: Any) -> Any:
    return lambda device=None: function()


def _fill_in() -> None:
    cuda: Any = torch.cuda
    accelerator = torch.accelerator
    constants = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "test accelerator",
        "get_device_properties": SimpleNamespace(
            name="test accelerator", total_memory=DEFAULT_CAPACITY, major=9, minor=0, multi_processor_count=1
        ),
        "_is_in_bad_fork": False,
        "_lazy_init": None,
        "init": None,
        "set_device": None,
    }
    for name, value in constants.items():
        setattr(cuda, name, lambda *arguments, value=value, **keywords: value)
    cuda._initialized = True
    cuda.Stream = cuda.streams.Stream = _Stream
    cuda.Event = cuda.streams.Event = _Event
    cuda.device = _OnDevice
    cuda.stream = _on_stream
    cuda.cudart = _Runtime
    cuda.current_stream = _without_device(accelerator.current_stream)
    cuda.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=1)
    cuda.set_stream = accelerator.set_stream
    cuda.synchronize = _without_device(accelerator.synchronize)
    cuda.mem_get_info = _without_device(accelerator.get_memory_info)
    for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache",
    ):  # fmt: skip
        for module in (cuda, cuda.memory):
            setattr(module, name, _without_device(getattr(accelerator, name)))
    generator = _module.generator()
    cuda.get_rng_state = lambda device="cuda": generator.get_state()
    cuda.get_rng_state_all = lambda: [generator.get_state()]
    cuda.set_rng_state = lambda state, device="cuda": generator.set_state(state)
    cuda.set_rng_state_all = lambda states: generator.set_state(states[0])
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: generator.manual_seed(seed)
    cuda.initial_seed = lambda: generator.initial_seed()
    cuda.default_generators = (generator,)
    torch._C._cuda_getDefaultDevice = lambda: 0  # type: ignore[attr-defined]
    torch._C._cuda_attach_out_of_memory_observer = _module.attach_out_of_memory_observer  # type: ignore[attr-defined]


_fill_in()
torch.empty(1, pin_memory=True)  # torch takes nothing for pinned before something has been
ACCELERATOR = Accelerator()
