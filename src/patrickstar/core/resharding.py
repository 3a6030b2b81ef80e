"""Shards on their way from one number of ranks to another: who comes where in the new order, and what goes from whom to whom.

Chunks are cut evenly over any number of ranks, so a resize moves pieces between neighbours. Ranks keep the order in which they are, and the new order
is the one with which most elements stay where they are. From W to W' at least (W' - W) / W' of all elements move where ranks come, and what those
had that go where ranks go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Member = int
"""A process of a job. It keeps its number whatever its rank is."""


def _overlap(place: int, size: int, new_place: int, new_size: int) -> int:
    """The number of those of size * new_size equal parts of a chunk that one of `size` ranks has now and one of `new_size` has afterwards."""
    first, last = max(place * new_size, new_place * size), min((place + 1) * new_size, (new_place + 1) * size)
    return max(0, last - first)


def order_of_least_movement(present: Sequence[Member], size: int, joining: Sequence[Member] = ()) -> tuple[Member, ...]:
    """The order of `size` members: those of `present` keep theirs, and the first of `joining` come in between; where there are too many, some leave.

    The first rank keeps its process: that moves least, too.
    """
    old_size, stay = len(present), min(len(present), size)
    most_first = old_size - stay, size - stay  # of the present ones, and of places, how many may be left out

    @cache
    def best(old: int, new: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The largest overlap of pairs from these places on, and the pairs."""
        if old == old_size or new == size:
            return 0, ()
        rest, pairs = best(old + 1, new + 1)
        found = [(rest + _overlap(old, old_size, new, size), ((old, new), *pairs))]
        if most_first[0] and old_size - old > size - new:
            found.append(best(old + 1, new))
        if most_first[1] and size - new > old_size - old:
            found.append(best(old, new + 1))
        return max(found, key=lambda one: one[0])

    places = {new: present[old] for old, new in best(0, 0)[1]}
    coming = iter(joining)
    return tuple(places[new] if new in places else next(coming) for new in range(size))


@dataclass(frozen=True, slots=True)
class Resharding:
    """A change of the ranks that share each chunk. `old`, `new`: their members, in rank order; those in both are in the same order."""

    old: tuple[Member, ...]
    new: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """All members of both, in an order that is that of each."""
        merged = list(self.new)
        for rank, member in enumerate(self.old):
            if member not in self.new:  # its place is behind the one before it
                merged.insert(merged.index(self.old[rank - 1]) + 1 if rank else 0, member)
        return tuple(merged)

    def sent(self, member: Member, numel: int) -> list[int]:
        """Elements of one's share of a chunk of `numel` elements that each of `members` has afterwards, oneself included."""
        return [self._common(member, other, numel) for other in self.members]

    def received(self, member: Member, numel: int) -> list[int]:
        """Elements of one's share afterwards that each of `members` has now, oneself included."""
        return [self._common(other, member, numel) for other in self.members]

    def _common(self, sender: Member, receiver: Member, numel: int) -> int:
        if sender not in self.old or receiver not in self.new:
            return 0
        old, new = len(self.old), len(self.new)
        return numel * _overlap(self.old.index(sender), old, self.new.index(receiver), new) // (old * new)

    @property
    def least(self) -> float:
        """The share of all elements that has to move: what those get that come, or what those had that go."""
        old, new = len(self.old), len(self.new)
        return abs(new - old) / max(old, new)
