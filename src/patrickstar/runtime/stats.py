"""What a session has done so far, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers of a session. Tiers are "device", "host" and "disk"; links "H>D", "D>H", "H>K" and "K>H" (K: disk)."""

    peak: Mapping[str, int]
    """The most bytes each tier has held, model data and activations together; 0 where a tier is not used."""

    moved: Mapping[str, int]
    """Bytes that have crossed each link."""

    model_data: Mapping[str, int]
    """Bytes of model data by plane, wherever they are, each counted once."""

    steps: int
    """Optimizer steps."""

    planned_steps: int
    """Those that went as their plan said."""

    reactive_steps: int
    """Those that did not, in part at least."""

    reason: str
    """Why the last of these did not."""

    seconds: Mapping[str, float]
    """Of the last step, by phase: forward, backward, step."""

    bytes_per_parameter: float
    """Bytes of model data by parameter."""
