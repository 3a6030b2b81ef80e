"""Rows of units that are read or added to where the units rest, so that they alone cross the link."""

from __future__ import annotations

from dataclasses import dataclass

from patrickstar.core.plane import PlaneRef


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of these units, `nbytes` of them. Prints as `rows 4096 c0.weight c1.weight`, `rows* 4096 c0.grad` where they are added to.

    The units rest on the host while a device computes: it must have their last contents, and where rows are added nobody else may.
    """

    refs: tuple[PlaneRef, ...]
    nbytes: int
    writes: bool = False

    def __str__(self) -> str:
        return " ".join(["rows*" if self.writes else "rows", str(self.nbytes), *map(str, self.refs)])

    @classmethod
    def parse(cls, words: list[str]) -> Rows:
        """The rows that print as these words."""
        kind, nbytes, *refs = words
        return cls(tuple(map(PlaneRef.parse, refs)), int(nbytes), writes=kind == "rows*")
