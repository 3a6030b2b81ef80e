"""The ranks of a mesh that have blocks of one model: what they agree on in a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from torch import Tensor

from patrickstar.comm.collectives import Collectives
from patrickstar.errors import ConfigError
from patrickstar.optim.norm import norm_of

Place = tuple[int, int]
"""A row and a column."""


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """All ranks that have blocks of a model, of one batch or of several.

    Attributes:
        places: of all ranks, in their order. counted: the parameters whose gradients count here: what several places have alike counts at the first.
    """

    collectives: Collectives
    places: Sequence[Place]
    counted: Collection[str]

    @classmethod
    def meet(cls, collectives: Collectives, place: Place, q: int, counted: Collection[str]) -> MeshRanks:
        """The ranks, once all have said which place they have. ConfigError: it is not the mesh over which the model is cut."""
        places = collectives.agree(place, "places in the mesh")
        if sorted(places) != sorted((i, j) for i in range(q) for j in range(q) for _ in range(len(places) // q**2)):
            raise ConfigError(
                f"mesh=: its ranks have the blocks {places} of the model, and not each as often: give manage() the mesh of Tensor2D"
            )
        return cls(collectives, places, counted)

    def norm(self, mine: Iterable[float]) -> Tensor:
        """The norm of the gradients of all blocks, from sums of squares here. Those of each place are added first, then places in mesh order."""
        totals = self.collectives.agree(reduce(add, mine, 0.0), "the norm of gradients")
        return norm_of(dict(zip(self.places, totals, strict=True)).values())  # ranks of one place have the same
