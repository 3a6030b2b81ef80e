"""`Options`: what nobody should need to set, and `LossScale`, how the loss is scaled in fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from patrickstar.config import kinds as k
from patrickstar.units import parse_rate

CHUNK_GRAIN: Final = 1024  # elements: a slot is whole pages of 4096 bytes in fp32
EVICTION_POLICIES: Final = ("next-use", "lru")
_LOSS_SCALE: Final = k.Kind("patrickstar.LossScale(...), or None", lambda value: isinstance(value, LossScale | None))
_NAMES: Final = k.Kind(
    "a tuple of names of modules",
    lambda value: isinstance(value, tuple | list) and all(isinstance(item, str) and item for item in value),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale(k.OptionGroup):
    """A loss scale that follows the gradients, or stays.

    Source: DeepSpeed's `DynamicLossScaler`, whose names are in brackets. The loss is multiplied with the scale before the backward, gradients are
    divided by it before they are used. A step whose gradients overflow is skipped. Checked as a whole: a `ConfigError` has every problem.
    """

    initial: float = k.option(2.0**16, k.POSITIVE)
    """The scale at the start [`2 ** initial_scale_power`, or `loss_scale` of a static one]."""

    dynamic: bool = k.option(True, k.FLAG)
    """False: the scale stays what it is at the start. Steps whose gradients overflow are skipped all the same."""

    window: int = k.option(1000, k.COUNT)
    """Steps without overflow after which the scale grows [`loss_scale_window`]."""

    factor: float = k.option(2.0, k.number("a finite number above 1", lambda value: value > 1))
    """What it is multiplied with when it grows, and divided by when it backs off [`scale_factor`]."""

    hysteresis: int = k.option(2, k.COUNT)
    """Overflows before the scale backs off: all but the first time at once [`hysteresis`]. A growth counts anew."""

    consecutive_hysteresis: bool = k.option(False, k.FLAG)
    """Whether each step without overflow counts anew as well [`consecutive_hysteresis`]."""

    minimum: float = k.option(1.0, k.POSITIVE)
    """The scale is never less [`min_loss_scale`]."""

    def __post_init__(self) -> None:
        problems = k.problems_of(self)
        if not problems and self.dynamic and self.initial < self.minimum:
            problems.append(f"initial={self.initial} is less than minimum={self.minimum}")
        k.refuse(problems, of="LossScale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(k.OptionGroup):
    """The options of a session beyond budgets. Checked as a whole: a `ConfigError` has every problem."""

    chunk_size: int | None = k.option(None, k.integer(least=CHUNK_GRAIN, of=CHUNK_GRAIN))
    """Elements of a chunk, a multiple of 1024; in 16-bit modes rounded up to one of 2048. `None`: searched for, from the model alone."""

    eviction: str = k.option("next-use", k.choice(*EVICTION_POLICIES))
    """The units that are evicted first: `"next-use"`, with the furthest next use; `"lru"`, least recently used."""

    prefetch: int | None = k.option(None, k.integer(least=0))
    """The prefetch distance: how many ops before its use a transfer may begin, at most. An op is a use of a parameter, the arrival of a gradient, or
    the update of a chunk. `None`: as early as the plan has slots for it. 0: when it is needed, and computing waits. No bit depends on it."""

    compute: str | None = k.option(None, k.choice(None, "fp32", "bf16", "fp16"))
    """The type that 16-bit weights compute in: their own (`"bf16"`, `"fp16"`), or `"fp32"`, to which they are upcast at each use. `None`: their own
    where the processor is fast in it, else fp32."""

    loss_scale: LossScale | None = k.option(None, _LOSS_SCALE)
    """How the loss is scaled in fp16. `None`: `LossScale()`, a dynamic scale as DeepSpeed defines it."""

    accumulate: int | None = k.option(None, k.integer(least=1))
    """Backwards per step; `None`: plan for one, and make room at the second."""

    keep_fp32: tuple[str, ...] = k.option((), _NAMES)
    """Names of modules that stay fp32 whole in 16-bit modes: any part of a path, as in `_keep_in_fp32_modules`."""

    tile_rows: int | None = k.option(None, k.integer(least=1))
    """Rows of the weights of `nn.Linear` and `nn.Embedding` modules that are resident at a time, so that the smallest budget is not the
    largest matrix. Each tile is a product of its own, which may give other bits than one product; so no budget ever switches this on.
    `None`: whole weights."""

    chunked_loss: bool | None = k.option(None, k.choice(None, to_come=["True"]))
    """Whether the loss is computed without whole logits. Arrives in a later version."""

    poison: bool = k.option(False, k.FLAG)
    """Whether freed slots are filled with NaN, so that a stale view shows, and each new plan is checked. For tests."""

    emulated_link: int | str | None = None
    """The speed of the link of `device="emulated"`, in each direction: bytes per second, or text such as `"2GiB/s"`. A transfer then takes as long as
    over such a link, both directions at once, and keeps no core busy meanwhile. `None`: as fast as memory is copied."""

    stress_seed: int | None = k.option(None, k.integer(least=0))
    """Makes every transfer, and every freed slot, late by a random time, the same for the same seed. For tests: no bit depends on it."""

    collective_timeout: int = k.option(600, k.integer(least=1))
    """Seconds after which ranks that wait for another give up."""

    def __post_init__(self) -> None:
        problems = k.problems_of(self) + k.parsed(parse_rate, self.emulated_link, name="emulated_link")
        k.refuse(problems, of="Options")
