"""Bytes by tier and by link, as actions and moments bring them: one book for the simulator and the executor."""

from __future__ import annotations

from patrickstar.core.machine import LINKS, Tier


class Ledger:
    """Counts of what each tier holds.

    Attributes:
        peak: by tier, the most bytes that it has held at once. moved: bytes that have crossed each link, by its name, such as "H>D".
    """

    def __init__(self) -> None:
        self._chunks = dict.fromkeys(Tier, 0)
        self._nonmodel = dict.fromkeys(Tier, 0)
        self.peak = dict.fromkeys(Tier, 0)
        self.moved = dict.fromkeys(LINKS, 0)

    def in_use(self, tier: Tier) -> int:
        """Bytes the tier holds now: chunks and non-model data."""
        return self._chunks[tier] + self._nonmodel[tier]

    def add(self, tier: Tier, nbytes: int) -> None:
        """A slot of the tier is taken: a copy's target, a first creation, a home."""
        assert nbytes >= 0, f"{nbytes} bytes are added to the {tier.label}"
        self._chunks[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self._chunks[tier] + self._nonmodel[tier])

    def remove(self, tier: Tier, nbytes: int) -> None:
        """A slot of the tier is given back."""
        has = self._chunks[tier]
        assert 0 <= nbytes <= has, f"{nbytes} bytes leave the {tier.label}, which has {has}"
        self._chunks[tier] -= nbytes

    def move(self, src: Tier, dst: Tier, nbytes: int) -> None:
        """Enters bytes that cross a link. Neither end changes what it holds: a copy leaves its source, and its target was added."""
        assert nbytes >= 0, f"{nbytes} bytes cross {src}>{dst}"
        self.moved[src + ">" + dst] += nbytes

    def nonmodel(self, tier: Tier, nbytes: int) -> None:
        """Enters that from now on everything on the tier that is no chunk comes to `nbytes`."""
        assert nbytes >= 0, f"{nbytes} bytes of activations and workspaces on the {tier.label}"
        self._nonmodel[tier] = nbytes
        self.peak[tier] = max(self.peak[tier], self._chunks[tier] + nbytes)
