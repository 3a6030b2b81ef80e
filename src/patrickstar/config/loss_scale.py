"""`LossScale`: how the loss is scaled in fp16."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from patrickstar.config.kinds import COUNT, FLAG, POSITIVE, number
from patrickstar.config.problems import problems_of, refuse, unknown_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """A loss scale that follows the gradients, or stays.

    Source: DeepSpeed's `DynamicLossScaler`, whose names are in brackets. The loss is multiplied with the scale before the backward, gradients are
    divided by it before they are used. A step whose gradients overflow is skipped. Checked as a whole: a `ConfigError` has every problem.
    """

    initial: float = 2.0**16
    """The scale at the start [`2 ** initial_scale_power`, or `loss_scale` of a static one]."""

    dynamic: bool = True
    """False: the scale stays what it is at the start. Steps whose gradients overflow are skipped all the same."""

    window: int = 1000
    """Steps without overflow after which the scale grows [`loss_scale_window`]."""

    factor: float = 2.0
    """What it is multiplied with when it grows, and divided by when it backs off [`scale_factor`]."""

    hysteresis: int = 2
    """Overflows before the scale backs off: all but the first time at once [`hysteresis`]. A growth counts anew."""

    consecutive_hysteresis: bool = False
    """Whether each step without overflow counts anew as well [`consecutive_hysteresis`]."""

    minimum: float = 1.0
    """The scale is never less [`min_loss_scale`]."""

    def __new__(cls, *_: Any, **given: Any) -> LossScale:
        unknown = [name for name in given if name not in cls.__dataclass_fields__]
        refuse([unknown_argument(name, cls.__dataclass_fields__) for name in unknown], of="LossScale")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        problems = problems_of(self, _KINDS)
        if not problems and self.dynamic and self.initial < self.minimum:
            problems.append(f"initial={self.initial} is less than minimum={self.minimum}")
        refuse(problems, of="LossScale")


_KINDS: Final = MappingProxyType(
    {
        "initial": POSITIVE,
        "minimum": POSITIVE,
        "factor": number("a finite number above 1", lambda value: value > 1),
        "window": COUNT,
        "hysteresis": COUNT,
        "dynamic": FLAG,
        "consecutive_hysteresis": FLAG,
    }
)
