"""Traces of what a step does beside the forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from patrickstar.core.formats import SessionFormats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.trace import Trace
from patrickstar.optim.scratch import NONE, PassBytes
from patrickstar.plan.touches import norm_trace, on_tiers, step_trace

__all__ = ["StepTraces"]

_KEPT = 64
_Key = tuple[str, frozenset[str], frozenset[tuple[int, Tier]], frozenset[int]]


@dataclass(eq=False)
class StepTraces:
    """Traces of norm and update, the very same one for the same question: plans are kept by trace.

    Attributes:
        in_chunks: whether gradients lie in chunks. passes: what these take of the tier that computes.
    """

    layout: Layout
    formats: SessionFormats
    in_chunks: bool
    passes: PassBytes = NONE

    _known: dict[_Key, Trace] = field(default_factory=dict)

    def norm(self, names: Iterable[str]) -> Trace:
        """The trace of the norm of these parameters' gradients."""
        key = self._key("norm", names)
        if key not in self._known:
            self._known[key] = norm_trace(self.layout, names, formats=self.formats.now, scratch_bytes=self.passes.norm)
        return self._known[key]

    def step(self, names: Iterable[str], tiers: Mapping[int, Tier] = MappingProxyType({})) -> Trace:
        """The trace of the update of these parameters. `tiers`: of chunks that are not updated where the step computes."""
        key = self._key("step", names, frozenset(tiers.items()))
        if key not in self._known:
            trace = step_trace(
                self.layout,
                names,
                formats=self.formats.now,
                in_plane=self.in_chunks,
                scratch_bytes=self.passes.update,
            )
            self._known[key] = on_tiers(trace, tiers)
        return self._known[key]

    def _key(self, kind: str, names: Iterable[str], tiers: frozenset[tuple[int, Tier]] = frozenset()) -> _Key:
        if len(self._known) > _KEPT:
            self._known.clear()
        return kind, frozenset(names), tiers, self.formats.now.thawed
