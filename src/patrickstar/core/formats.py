"""The element types of planes, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from patrickstar.core.layout import Layout
from patrickstar.core.plane import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef

__all__ = ["FP32", "Formats", "PlaneFormat", "bf16_formats", "fp16_formats", "fp32_formats"]


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """The element type of a plane, by the field's name for it, and its bytes per element."""

    dtype: str
    itemsize: int


_FP32: Final = PlaneFormat("float32", 4)


class Formats:
    """Which planes chunks have, and of which type each is. One session's own: a session that needs more changes it.

    Args:
        planes: of chunks in general. whole: of those whose tensors stay fp32 whole (`Layout.is_whole`).
        frozen: of the weights of chunks that are not trained (`Layout.is_frozen`), which have no other plane, unless they stay whole.

    Attributes:
        thawed: frozen chunks that are trained all the same, and have all planes. widened: chunks whose gradients are fp32 by now.
    """

    def __init__(
        self, *, planes: Mapping[str, PlaneFormat], whole: Mapping[str, PlaneFormat], frozen: PlaneFormat = _FP32
    ) -> None:
        self.planes = MappingProxyType(dict(planes))
        self._widened = MappingProxyType({**planes, GRAD: _FP32})
        self._whole = MappingProxyType(dict(whole))
        self._frozen = MappingProxyType({WEIGHT: frozen})
        self._frozen_whole = MappingProxyType({WEIGHT: whole[WEIGHT]})

        self.thawed: set[int] = set()
        self.widened: set[int] = set()

    @property
    def narrowest(self) -> int:
        """Bytes of an element of the narrowest plane there may be: slots have room for a chunk of it."""
        return min(form.itemsize for form in (*self.planes.values(), *self._whole.values(), *self._frozen.values()))

    def at(self, chunk: int, layout: Layout) -> Mapping[str, PlaneFormat]:
        """The planes of one chunk."""
        whole = layout.is_whole(chunk)
        if layout.is_frozen(chunk) and chunk not in self.thawed:
            return self._frozen_whole if whole else self._frozen
        if whole:
            return self._whole
        return self._widened if chunk in self.widened else self.planes

    def of(self, ref: PlaneRef, layout: Layout) -> PlaneFormat:
        """The format of a unit."""
        return self.at(ref.chunk, layout)[ref.plane]

    def is_split(self, chunk: int, layout: Layout) -> bool:
        """Whether a chunk's masters are split in two halves."""
        return REST in self.at(chunk, layout)

    def is_trained(self, chunk: int, layout: Layout) -> bool:
        """Whether a chunk has the planes that training needs."""
        return EXP_AVG in self.at(chunk, layout)

    def units(self, layout: Layout, planes: Iterable[str]) -> Iterator[PlaneRef]:
        """The units of these planes, as far as their chunks have them."""
        for ref in layout.units(planes):
            if ref.plane in self.at(ref.chunk, layout):
                yield ref


def _fp32_planes() -> dict[str, PlaneFormat]:
    return dict.fromkeys((WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ), _FP32)


def fp32_formats() -> Formats:
    """All of it in fp32."""
    return Formats(planes=_fp32_planes(), whole=_fp32_planes())


FP32: Final = fp32_formats()
"""For plans and layouts on paper; a session has its own."""


def bf16_formats(*, gradient: str = "bfloat16") -> Formats:
    """The split master: 16-bit weights, and what completes them to fp32. `gradient`: "bfloat16", or "float32" where several add up."""
    split = {
        WEIGHT: PlaneFormat("bfloat16", 2),
        REST: PlaneFormat("int16", 2),
        GRAD: PlaneFormat(gradient, 2 if gradient == "bfloat16" else 4),
        EXP_AVG: _FP32,
        EXP_AVG_SQ: _FP32,
    }
    return Formats(planes=split, whole=_fp32_planes(), frozen=split[WEIGHT])


def fp16_formats(*, gradient: str = "float16") -> Formats:
    """The fp32 master alone: the 16-bit weight is rounded from it at each use. `gradient`: "float16", or "float32" where several add up."""
    return Formats(
        planes={**_fp32_planes(), GRAD: PlaneFormat(gradient, 2 if gradient == "float16" else 4)},
        whole=_fp32_planes(),
        frozen=PlaneFormat("float16", 2),
    )
