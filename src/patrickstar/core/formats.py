"""The element types of planes, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from patrickstar.core.layout import Layout
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """The element type of a plane, by the field's name for it, and its bytes per element."""

    dtype: str
    itemsize: int


_FP32: Final = PlaneFormat("float32", 4)
# Weights, and what completes them to their masters.
_NARROW: Final = MappingProxyType(
    {
        "bf16": (PlaneFormat("bfloat16", 2), PlaneFormat("int16", 2)),
        "fp16": (PlaneFormat("float16", 2), PlaneFormat("int32", 4)),
    }
)
_FP32_PLANES: Final = MappingProxyType(dict.fromkeys((WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ), _FP32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The planes that chunks have, and the type of each.

    Attributes:
        planes: of chunks in general; those whose tensors stay fp32 whole (`Layout.is_whole`) have the planes of fp32.
        frozen: of the weights of chunks that are not trained (`Layout.is_frozen`), which have no other plane, unless they stay whole.
        thawed: frozen chunks that are trained all the same, and have all planes. widened: chunks whose gradients are fp32 by now.
    """

    planes: Mapping[str, PlaneFormat]
    frozen: PlaneFormat = _FP32
    thawed: frozenset[int] = frozenset()
    widened: frozenset[int] = frozenset()

    def thaw(self, chunks: Iterable[int]) -> Formats:
        """The formats with the given chunks trained."""
        return replace(self, thawed=self.thawed.union(chunks))

    def widen(self, chunk: int) -> Formats:
        """The formats with one chunk's gradients in fp32."""
        return replace(self, widened=self.widened.union([chunk]))

    @property
    def narrowest(self) -> int:
        """Bytes of an element of the narrowest plane there may be: slots have room for a chunk of it."""
        return min(form.itemsize for form in (*self.planes.values(), self.frozen))

    def at(self, chunk: int, layout: Layout) -> Mapping[str, PlaneFormat]:
        """The planes of one chunk."""
        whole = layout.is_whole(chunk)
        if layout.has_frozen and layout.is_frozen(chunk) and chunk not in self.thawed:
            return {WEIGHT: _FP32 if whole else self.frozen}
        if whole:
            return _FP32_PLANES
        return {**self.planes, GRAD: _FP32} if chunk in self.widened else self.planes

    def of(self, ref: PlaneRef, layout: Layout) -> PlaneFormat:
        """The format of a unit."""
        return self.at(ref.chunk, layout)[ref.plane]

    def is_split(self, chunk: int, layout: Layout) -> bool:
        """Tells whether a chunk's masters are split in two."""
        return REST in self.at(chunk, layout)

    def is_trained(self, chunk: int, layout: Layout) -> bool:
        """Tells whether a chunk has the planes that training needs."""
        return EXP_AVG in self.at(chunk, layout)

    def units(self, layout: Layout, planes: Iterable[str]) -> Iterator[PlaneRef]:
        """The units of some planes, as far as the units' chunks have these planes."""
        for ref in layout.units(planes):
            if ref.plane in self.at(ref.chunk, layout):
                yield ref


@dataclass(slots=True, eq=False)
class SessionFormats:
    """The formats of one session, which has others once it turns out to need more. `now`: those that hold now."""

    now: Formats


FP32: Final = Formats(planes=_FP32_PLANES)
"""All of it in fp32."""


def formats_of_16_bits(kept: str, *, is_split: bool = True, adds_up: bool = False) -> Formats:
    """Weights of 16 bits, of which the masters are fp32.

    Args:
        kept: "bf16" or "fp16". is_split: whether the weight is kept, and what completes it to the master, 2 or 4 bytes; else the master alone, from
            which the weight is rounded at each use. adds_up: whether gradients are sums of several, which are fp32.
    """
    narrow, rest = _NARROW[kept]
    weight = {WEIGHT: narrow, REST: rest} if is_split else {WEIGHT: _FP32}
    planes = {**_FP32_PLANES, **weight, GRAD: _FP32 if adds_up else narrow}
    return Formats(planes=MappingProxyType(planes), frozen=narrow)
