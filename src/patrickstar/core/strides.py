"""Strides in which the elements of a tensor fill its memory."""

from __future__ import annotations

from collections.abc import Sequence


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The given strides where elements lie without gaps or overlaps, else those of a contiguous tensor.

    So what is channels last is walked in its own order: an update is element by element, and the order changes no bits.
    """
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return contiguous_strides(shape)
            expected *= size
    return tuple(strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last dim is the innermost."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
