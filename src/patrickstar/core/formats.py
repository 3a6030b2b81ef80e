"""The element types of planes, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from patrickstar.core.layout import Layout
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef

__all__ = ["FP32", "Formats", "PlaneFormat", "bf16_formats", "fp16_formats"]


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """The element type of a plane, by the field's name for it, and its bytes per element."""

    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class Formats:
    """Which planes chunks have, and of which type each is.

    Attributes:
        planes: of chunks in general. whole: of those whose tensors stay fp32 whole (`Layout.is_whole`).
    """

    planes: Mapping[str, PlaneFormat]
    whole: Mapping[str, PlaneFormat]

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", MappingProxyType(dict(self.planes)))
        object.__setattr__(self, "whole", MappingProxyType(dict(self.whole)))

    @property
    def narrowest(self) -> int:
        """Bytes of an element of the narrowest plane: slots have room for a chunk of it."""
        return min(form.itemsize for form in (*self.planes.values(), *self.whole.values()))

    def of(self, ref: PlaneRef, layout: Layout) -> PlaneFormat:
        """The format of a unit."""
        return (self.whole if layout.is_whole(ref.chunk) else self.planes)[ref.plane]

    def is_split(self, chunk: int, layout: Layout) -> bool:
        """Whether a chunk's masters are split in two halves."""
        return REST in (self.whole if layout.is_whole(chunk) else self.planes)

    def units(self, layout: Layout, planes: Iterable[str]) -> Iterator[PlaneRef]:
        """The units of these planes, as far as their chunks have them."""
        for ref in layout.units(planes):
            if ref.plane in (self.whole if layout.is_whole(ref.chunk) else self.planes):
                yield ref


def _fp32_planes() -> dict[str, PlaneFormat]:
    return {plane: PlaneFormat("float32", 4) for plane in (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ)}


FP32: Final = Formats(planes=_fp32_planes(), whole=_fp32_planes())


def bf16_formats(*, gradient: str = "bfloat16") -> Formats:
    """The split master: 16-bit weights, and what completes them to fp32. `gradient`: "bfloat16", or "float32" where several add up."""
    split = {
        WEIGHT: PlaneFormat("bfloat16", 2),
        REST: PlaneFormat("int16", 2),
        GRAD: PlaneFormat(gradient, 2 if gradient == "bfloat16" else 4),
        EXP_AVG: PlaneFormat("float32", 4),
        EXP_AVG_SQ: PlaneFormat("float32", 4),
    }
    return Formats(planes=split, whole=_fp32_planes())


def fp16_formats(*, gradient: str = "float16") -> Formats:
    """The fp32 master alone: the 16-bit weight is rounded from it at each use. `gradient`: "float16", or "float32" where several add up."""
    return Formats(
        planes={**_fp32_planes(), GRAD: PlaneFormat(gradient, 2 if gradient == "float16" else 4)},
        whole=_fp32_planes(),
    )
