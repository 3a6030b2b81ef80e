"""`Options`: what nobody should need to set."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.config.loss_scale import LossScale
from patrickstar.config.problems import choice, later, parsed, refuse, unknown_argument
from patrickstar.units import parse_rate

CHUNK_GRAIN: Final = 1024  # elements: a slot is whole pages of 4096 bytes in fp32
EVICTION_POLICIES: Final = ("next-use", "lru")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a session beyond budgets. Checked as a whole: a `ConfigError` has every problem."""

    chunk_size: int | None = None
    """Elements of a chunk, a multiple of 1024; in 16-bit modes rounded up to one of 2048. `None`: searched for, from the model alone."""

    eviction: str = "next-use"
    """The units that are evicted first: `"next-use"`, with the furthest next use; `"lru"`, least recently used."""

    prefetch: int | None = None
    """The prefetch distance: how many ops before its use a transfer may begin, at most. An op is a use of a parameter, the arrival of a gradient, or
    the update of a chunk. `None`: as early as the plan has slots for it. 0: when it is needed, and computing waits. No bit depends on it."""

    compute: str | None = None
    """The type that 16-bit weights compute in: their own (`"bf16"`, `"fp16"`), or `"fp32"`, to which they are upcast at each use. `None`: their own
    where the processor is fast in it, else fp32."""

    loss_scale: LossScale | None = None
    """How the loss is scaled in fp16. `None`: `LossScale()`, a dynamic scale as DeepSpeed defines it."""

    accumulate: int | None = None
    """Backwards per step; `None`: plan for one, and make room at the second."""

    keep_fp32: tuple[str, ...] = ()
    """Names of modules that stay fp32 whole in 16-bit modes: any part of a path, as in `_keep_in_fp32_modules`."""

    tile_rows: int | None = None
    """Rows of the weights of `nn.Linear` and `nn.Embedding` modules that are resident at a time, so that the smallest budget is not the
    largest matrix. Each tile is a product of its own, which may give other bits than one product; so no budget ever switches this on.
    `None`: whole weights."""

    chunked_loss: bool | None = None
    """Whether the loss is computed without whole logits. Arrives in a later version."""

    poison: bool = False
    """Whether freed slots are filled with NaN, so that a stale view shows, and each new plan is checked. For tests."""

    emulated_link: int | str | None = None
    """The speed of the link of `device="emulated"`, in each direction: bytes per second, or text such as `"2GiB/s"`. A transfer then takes as long as
    over such a link, both directions at once, and keeps no core busy meanwhile. `None`: as fast as memory is copied."""

    stress_seed: int | None = None
    """Makes every transfer, and every freed slot, late by a random time, the same for the same seed. For tests: no bit depends on it."""

    collective_timeout: int = 600
    """Seconds after which ranks that wait for another give up. Other times arrive in a later version."""

    def __new__(cls, *_: Any, **given: Any) -> Options:
        unknown = {name: value for name, value in given.items() if name not in cls.__dataclass_fields__}
        problems = [
            f"{name}={value!r}: {_GONE[name]}" if name in _GONE else unknown_argument(name, cls.__dataclass_fields__)
            for name, value in unknown.items()
        ]
        refuse(problems, of="Options")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        problems = [
            *_multiple("chunk_size", self.chunk_size, of=CHUNK_GRAIN),
            *choice("eviction", self.eviction, EVICTION_POLICIES),
            *_multiple("accumulate", self.accumulate, of=1),
            *_multiple("tile_rows", self.tile_rows, of=1),
            *choice("compute", self.compute, (None, "fp32", "bf16", "fp16")),
            *_names("keep_fp32", self.keep_fp32),
            *parsed(parse_rate, self.emulated_link, name="emulated_link"),
            *_natural("prefetch", self.prefetch),
            *_natural("stress_seed", self.stress_seed),
        ]
        if not isinstance(self.loss_scale, LossScale | None):
            problems.append(f"loss_scale={self.loss_scale!r}: expected patrickstar.LossScale(...), or None")
        if not isinstance(self.poison, bool):
            problems.append(f"poison={self.poison!r}: expected True or False")
        problems += later("chunked_loss", self.chunked_loss, default=None)
        problems += later("collective_timeout", self.collective_timeout, default=600)
        refuse(problems, of="Options")


_GONE: Final = MappingProxyType(
    {
        "embedding_rows": "no option any more; use tile_rows=, the rows of tables and other weights that are resident at a time"
    }
)


def _names(name: str, value: object) -> list[str]:
    if isinstance(value, tuple | list) and all(isinstance(item, str) and item for item in value):
        return []
    return [f"{name}={value!r}: expected a tuple of names of modules"]


def _natural(name: str, value: object) -> list[str]:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return []
    return [f"{name}={value!r}: expected a number from 0 on, or None"]


def _multiple(name: str, value: object, *, of: int) -> list[str]:
    what = f"a positive multiple of {of}" if of > 1 else "a positive number"
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{name}={value!r}: expected {what}, or None"]
    if value <= 0:
        return [f"{name}={value}: expected {what}; the smallest is {of}"]
    if value % of:
        near = {value - value % of, value - value % of + of} - {0}
        return [f"{name}={value}: expected {what}, such as {' or '.join(map(str, sorted(near)))}"]
    return []
