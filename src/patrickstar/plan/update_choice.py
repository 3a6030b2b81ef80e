"""The choices that an update leaves: when it is done, and where. No bit depends on them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UpdateChoice"]


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """A choice of where and when chunks are updated.

    Attributes:
        apart: whether updates have a stretch of their own, and are not woven into the forward that follows.
    """

    apart: bool = False
