"""Ranks that do something each by itself, of which all know what has come on each."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from patrickstar.comm.collectives import Collectives
from patrickstar.errors import Error, RankError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AllRanks:
    """The ranks that share a model. `collectives`: None where there is one process, which is all of them."""

    collectives: Collectives | None = None

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return 0 if self.collectives is None else self.collectives.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.collectives is None else self.collectives.ranks.size

    def do(self, what: str, act: Callable[[], _T]) -> _T:
        """The outcome of `act` on this rank, once all ranks have done theirs. Raises as `tell` does."""
        own: list[_T] = []
        self.tell(what, lambda: own.append(act()))
        return own[0]

    def lead(self, what: str, act: Callable[[], _T]) -> _T:
        """The outcome of `act`, which rank 0 does for all. Raises as `tell` does."""
        return self.tell(what, lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]  # rank 0 has acted

    def tell(self, what: str, act: Callable[[], _T]) -> list[_T]:
        """The outcomes of `act` on all ranks, in their order, each a value that can be pickled.

        Raises:
            what `act` raises here. Where it has failed on other ranks only: an error of this library as it is there, a RankError for any other. The
            ranks go on together after it, except where it is one that ends all communication.
        """
        if self.collectives is None:
            return [act()]
        outcome: _T | None = None
        problem: Exception | None = None
        told: Error | None = None
        try:
            outcome = act()
        except RankError:
            raise  # from communication itself: all ranks have it
        except Exception as error:
            problem = error
            if isinstance(error, Error):
                told = error
            else:
                reason = f"{what} has failed: {type(error).__name__}: {error}"
                ranks = self.collectives.ranks.numbers([self.rank])
                told = RankError(reason, ranks=ranks, action=what, reason=reason)
        mine = pickle.dumps((outcome, told))
        of_all = [pickle.loads(theirs) for theirs in self.collectives.agree(mine, what)]  # noqa: S301  (of ranks of this program)
        if problem is not None:
            raise problem
        for rank, (_, theirs) in enumerate(of_all):
            if theirs is not None:
                theirs.args = (f"{self.collectives.ranks.names([rank])}: {theirs}",)
                raise theirs
        return [outcome for outcome, _ in of_all]


def share_out(nbytes: Sequence[int], size: int, *, first_has: int = 0) -> list[int]:
    """The rank that does each of some works, known by their bytes: the largest first, each to the rank that has least. `first_has`: rank 0's own."""
    has, owners = [first_has, *[0] * (size - 1)], [0] * len(nbytes)
    for number in sorted(range(len(nbytes)), key=lambda number: (-nbytes[number], number)):
        owners[number] = has.index(min(has))
        has[owners[number]] += nbytes[number]
    return owners
