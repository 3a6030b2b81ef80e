"""Ranks that do something each by itself, of which all know what has come on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from patrickstar.errors import Error, RankError

if TYPE_CHECKING:  # of torch, which takes seconds to import
    from patrickstar.comm.collectives import Collectives

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
        """The outcome of `act` on this rank, once all ranks have done theirs. Raises as `together` does."""
        with self.together(what):
            return act()

    def lead(self, what: str, act: Callable[[], _T]) -> _T:
        """The outcome of `act`, which rank 0 does for all. Raises as `together` does."""
        return self.tell(what, lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]  # rank 0 has acted

    def tell(self, what: str, act: Callable[[], _T]) -> list[_T]:
        """The outcomes of `act` on all ranks, in their order, each a value that can be pickled. Raises as `together` does."""
        with self.together(what) as outcomes:
            outcomes.append(act())
        return outcomes

    @contextmanager
    def together(self, what: str) -> Iterator[list[Any]]:
        """A context that all ranks leave at once. Gives a list, which has what all ranks have put there by then, in their order.

        Raises:
            what is raised inside. Where that is on other ranks only: an error of this library as it is there, a RankError for any other. The
            ranks go on together after it, except where it is one that ends all communication.
        """
        given: list[Any] = []
        if self.collectives is None:
            yield given
            return
        problem: Exception | None = None
        told: Error | None = None
        try:
            yield given
        except RankError:
            raise  # from communication itself: all ranks have it
        except Error as error:
            problem = told = error
        except Exception as error:
            reason = f"{what} has failed: {type(error).__name__}: {error}"
            ranks = self.collectives.ranks.numbers([self.rank])
            problem, told = error, RankError(reason, ranks=ranks, action=what, reason=reason)
        of_all = self.collectives.agree((given, told), what)
        if problem is not None:
            raise problem
        for rank, (_, theirs) in enumerate(of_all):
            if theirs is not None:
                theirs.args = (f"{self.collectives.ranks.names([rank])}: {theirs}",)
                raise theirs
        given[:] = [one for theirs, _ in of_all for one in theirs]


def share_out(nbytes: Sequence[int], size: int, *, first_has: int = 0) -> list[int]:
    """The rank that does each of some works, known by their bytes: the largest first, each to the rank that has least. `first_has`: rank 0's own."""
    has, owners = [first_has, *[0] * (size - 1)], [0] * len(nbytes)
    for number in sorted(range(len(nbytes)), key=lambda number: (-nbytes[number], number)):
        owners[number] = has.index(min(has))
        has[owners[number]] += nbytes[number]
    return owners
