"""What a launch would run on a GPU that is not there: Triton compiles it as it would for one, and nothing is launched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

ARITHMETIC = re.compile(
    r"^\s*(?:@!?%\w+ )?((?:add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt|neg|abs|min|max|ex2|lg2|sin|cos|tanh)\.\S*[fb](?:16|32|64)\S*)",
    re.MULTILINE,
)
THREADS = 128


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled for one launch."""

    name: str
    ptx: str
    binary: bytes
    """What ptxas made of it."""
    key: str
    """By which Triton keeps it: other keys are compiled anew."""

    def arithmetic(self) -> Counter[str]:
        """How often each floating-point instruction stands there. Without a loop, a thread executes it so often."""
        found = Counter(name.rstrip(";") for name in ARITHMETIC.findall(self.ptx))
        return Counter({name: n for name, n in found.items() if re.search(r"\.b?f(16|32|64)", name)})

    def has_loop(self) -> bool:
        """Tells whether there is a branch to somewhere above it."""
        labels = {label.group(1): label.start() for label in re.finditer(r"^(\$\w+):", self.ptx, re.MULTILINE)}
        branches = re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", self.ptx)
        return any(labels[branch.group(1)] < branch.start() for branch in branches)

    def each(self, numel: int) -> dict[str, int]:
        """The same for each of so many elements of a program."""
        mine, left = divmod(numel, THREADS)
        assert not left
        counts = self.arithmetic()
        assert all(n % mine == 0 for n in counts.values()), counts
        return {name: n // mine for name, n in counts.items()}


class NoGpu:
    """As much of Triton's driver as a launch needs to get to its end."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *arguments: None


@contextmanager
def compiling_for(capability: int, patch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """A context in which launches are compiled for a GPU of this compute capability (80: 8.0), and noted in the list."""
    launched: list[Compiled] = []
    run = triton.JITFunction.run

    def note(self: Any, *arguments: object, **others: object) -> object:
        kernel = run(self, *arguments, **others)
        launched.append(Compiled(self.__name__, kernel.asm["ptx"], kernel.asm["cubin"], kernel.hash))
        return kernel

    with patch.context() as inside:
        inside.setattr(triton.JITFunction, "run", note)
        inside.setattr(driver, "_active", NoGpu(capability))
        yield launched
