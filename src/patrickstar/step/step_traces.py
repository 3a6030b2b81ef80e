"""Traces of what a step does beside the forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from patrickstar.core.formats import SessionFormats
from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.optim.scratch import NONE, PassBytes
from patrickstar.plan.planner import Planner
from patrickstar.plan.touches import norm_trace, on_tiers, step_trace

__all__ = ["StepTraces"]


@dataclass(frozen=True, slots=True)
class StepTraces:
    """Traces of norm and update, the very same one for the same question: the planner keeps them, as it keeps plans by trace.

    Attributes:
        in_chunks: whether gradients lie in chunks. passes: what these take of the tier that computes.
    """

    planner: Planner
    formats: SessionFormats
    in_chunks: bool
    passes: PassBytes = NONE

    def norm(self, names: Collection[str]) -> Trace:
        """The trace of the norm of these parameters' gradients."""
        layout, formats, scratch_bytes = self.planner.layout, self.formats.now, self.passes.norm
        key = ("norm", frozenset(names), formats.thawed)
        return self.planner.once(key, lambda: norm_trace(layout, names, formats=formats, scratch_bytes=scratch_bytes))

    def step(self, names: Collection[str], tiers: Mapping[int, Tier] = MappingProxyType({})) -> Trace:
        """The trace of the update of these parameters. `tiers`: of chunks that are not updated where the step computes."""
        layout, formats, scratch_bytes = self.planner.layout, self.formats.now, self.passes.update

        def make() -> Trace:
            trace = step_trace(layout, names, formats=formats, in_plane=self.in_chunks, scratch_bytes=scratch_bytes)
            return on_tiers(trace, tiers)

        return self.planner.once(("step", frozenset(names), frozenset(tiers.items()), formats.thawed), make)
