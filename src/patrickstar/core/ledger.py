"""Bytes by tier and by link, as actions and moments bring them: one book for the simulator and the executor."""

from __future__ import annotations

from patrickstar.core.machine import LINKS, Tier


class Ledger:
    """Counts what each tier holds, the most it has held, and what has crossed each link."""

    def __init__(self) -> None:
        self._chunks = dict.fromkeys(Tier, 0)
        self._nonmodel = dict.fromkeys(Tier, 0)
        self._peak = dict.fromkeys(Tier, 0)
        self._moved = dict.fromkeys(LINKS, 0)

    def in_use(self, tier: Tier) -> int:
        """Bytes the tier holds now: chunks and non-model data."""
        return self._chunks[tier] + self._nonmodel[tier]

    def peak(self, tier: Tier) -> int:
        """The most bytes the tier has held at once."""
        return self._peak[tier]

    def moved(self, over: str) -> int:
        """Bytes that have crossed a link, by its name, such as "H>D"."""
        return self._moved[over]

    def add(self, tier: Tier, nbytes: int) -> None:
        """A slot of the tier is taken: a copy's target, a first creation, a home."""
        assert nbytes >= 0, f"{nbytes} bytes are added to the {tier.label}"
        self._chunks[tier] += nbytes
        self._peak[tier] = max(self._peak[tier], self._chunks[tier] + self._nonmodel[tier])

    def remove(self, tier: Tier, nbytes: int) -> None:
        """A slot of the tier is given back."""
        has = self._chunks[tier]
        assert 0 <= nbytes <= has, f"{nbytes} bytes leave the {tier.label}, which has {has}"
        self._chunks[tier] -= nbytes

    def move(self, src: Tier, dst: Tier, nbytes: int) -> None:
        """Enters bytes that cross a link. Neither end changes what it holds: a copy leaves its source, and its target was added."""
        assert nbytes >= 0, f"{nbytes} bytes cross {src}>{dst}"
        self._moved[src + ">" + dst] += nbytes

    def nonmodel(self, tier: Tier, nbytes: int) -> None:
        """Enters that from now on everything on the tier that is no chunk comes to `nbytes`."""
        assert nbytes >= 0, f"{nbytes} bytes of activations and workspaces on the {tier.label}"
        self._nonmodel[tier] = nbytes
        self._peak[tier] = max(self._peak[tier], self._chunks[tier] + nbytes)
