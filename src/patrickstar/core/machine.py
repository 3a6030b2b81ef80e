"""The tiers of memory a step may use, the links between them, and how much each may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from patrickstar.core.fixed_costs import FixedCosts


class Tier(str, Enum):
    """A kind of memory. Its value is the letter that actions and links print."""

    DEVICE = "D"
    HOST = "H"
    DISK = "K"

    __hash__ = str.__hash__  # that of an Enum is a call in Python, at each look into a table

    def __str__(self) -> str:
        return self.value

    @property
    def label(self) -> str:
        """The word users read: `device`, `host` or `disk`."""
        return self.name.lower()

    @property
    def below(self) -> Tier:
        """The tier that comes after this one on the way to the disk."""
        return Tier.HOST if self is Tier.DEVICE else Tier.DISK


# Every pair of neighbours, by the name of the way: device and disk never exchange bytes but through the host.
LINKS: Final = ("H>D", "D>H", "H>K", "K>H")


@dataclass(frozen=True, slots=True)
class Machine:
    """The tier that computes, and the bytes each tier may hold. Prints as `H: H=1024 K=4096`.

    A tier without a budget does not exist. Without an accelerator the host computes and only disk lies below it.

    Attributes:
        budget: what chunks and activations may take of each tier.
        costs: what the user's budget of the compute tier holds beside those. Decides nothing and is not printed: refusals say budgets as
            they are given.
    """

    compute: Tier
    budget: Mapping[Tier, int]
    costs: FixedCosts = field(default=FixedCosts(), compare=False)

    def __post_init__(self) -> None:
        budget = {tier: self.budget[tier] for tier in Tier if tier in self.budget}
        object.__setattr__(self, "budget", MappingProxyType(budget))
        if self.compute not in budget:
            raise ValueError(f"the {self.compute.label} computes but has no budget")
        if self.compute is Tier.DISK:
            raise ValueError("the disk does not compute")
        if self.compute is Tier.HOST and Tier.DEVICE in budget:
            raise ValueError("where the host computes there is no device")
        if self.compute is Tier.DEVICE and Tier.HOST not in budget:
            raise ValueError("a device needs a host below it")

    def given(self, tier: Tier) -> int:
        """A tier's budget as the user gave it."""
        return self.budget[tier] + (self.costs.set_aside_bytes if tier is self.compute else 0)

    def __str__(self) -> str:
        return f"{self.compute.value}: " + " ".join(f"{tier.value}={nbytes}" for tier, nbytes in self.budget.items())

    def __reduce__(self) -> tuple[Callable[..., Machine], tuple[Any, ...]]:
        return Machine, (self.compute, dict(self.budget), self.costs)  # a mapping proxy neither pickles nor copies
