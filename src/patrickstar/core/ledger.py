"""Bytes by tier and by link, as actions and moments bring them: one book for the simulator and the executor.

Nobody counts memory by hand around a copy. Whoever carries out an action tells the ledger once, and what the ledger
says must agree with what the pools hold; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patrickstar.core.machine import LINKS, Tier, link


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """A ledger at one time. Every tier and every link has an entry, 0 where it was not used.

    Attributes:
        chunk_bytes, nonmodel_bytes: what a tier holds now, by tier.
        peak_bytes: the most a tier has held at once, chunks and non-model data together.
        moved_bytes: by link, such as "H>D".
        moments: of each moment begun so far, the most each tier held in it.
    """

    chunk_bytes: Mapping[Tier, int]
    nonmodel_bytes: Mapping[Tier, int]
    peak_bytes: Mapping[Tier, int]
    moved_bytes: Mapping[str, int]
    moments: tuple[Mapping[Tier, int], ...]


class Ledger:
    """Counts what each tier holds, the most it has held, and what has crossed each link."""

    def __init__(self) -> None:
        self._chunks = dict.fromkeys(Tier, 0)
        self._nonmodel = dict.fromkeys(Tier, 0)
        self._peak = dict.fromkeys(Tier, 0)
        self._moved = dict.fromkeys(LINKS, 0)
        self._moments: list[dict[Tier, int]] = []

    def in_use(self, tier: Tier) -> int:
        """Bytes the tier holds now: chunks and non-model data."""
        return self._chunks[tier] + self._nonmodel[tier]

    def chunks(self, tier: Tier) -> int:
        """Bytes of chunks the tier holds now."""
        return self._chunks[tier]

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
        self._note(tier)

    def remove(self, tier: Tier, nbytes: int) -> None:
        """A slot of the tier is given back."""
        assert 0 <= nbytes <= self._chunks[tier], (
            f"{nbytes} bytes leave the {tier.label}, which has {self._chunks[tier]}"
        )
        self._chunks[tier] -= nbytes

    def move(self, src: Tier, dst: Tier, nbytes: int) -> None:
        """Enters bytes that cross a link. Neither end changes what it holds: a copy leaves its source, and its target was added."""
        assert nbytes >= 0, f"{nbytes} bytes cross {link(src, dst)}"
        self._moved[link(src, dst)] += nbytes

    def nonmodel(self, tier: Tier, nbytes: int) -> None:
        """Enters that from now on everything on the tier that is no chunk comes to `nbytes`."""
        assert nbytes >= 0, f"{nbytes} bytes of activations and workspaces on the {tier.label}"
        self._nonmodel[tier] = nbytes
        self._note(tier)

    def begin_moment(self, nonmodel_bytes: Mapping[Tier, int] | None = None) -> None:
        """Begins the next moment, whose peak starts from what is held now.

        Args:
            nonmodel_bytes: what `nonmodel` would be told, where it changes as the moment begins: what was there only
                until now is no part of this moment. Tiers that are left out keep theirs.
        """
        self._moments.append(dict.fromkeys(Tier, 0))
        for tier, nbytes in (nonmodel_bytes or {}).items():
            self.nonmodel(tier, nbytes)
        for tier in Tier:
            self._note(tier)

    def snapshot(self) -> LedgerSnapshot:
        """A copy of the ledger as it is now, which later entries do not change."""
        return LedgerSnapshot(
            chunk_bytes=dict(self._chunks),
            nonmodel_bytes=dict(self._nonmodel),
            peak_bytes=dict(self._peak),
            moved_bytes=dict(self._moved),
            moments=tuple(dict(moment) for moment in self._moments),
        )

    def _note(self, tier: Tier) -> None:
        held = self.in_use(tier)
        self._peak[tier] = max(self._peak[tier], held)
        if self._moments:
            moment = self._moments[-1]
            moment[tier] = max(moment[tier], held)
