"""Foreach functions tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["one_by_one"]


def one_by_one(
    handle: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`handle` for each tensor of the lists, so that they need not be resident all at once. Same arithmetic, same bits."""
    length = len(args[0])

    def item(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, list | tuple) and len(value) == length else value

    results: list[Any] = []
    for index in range(length):
        result = handle(
            func, [item(value, index) for value in args], {key: item(value, index) for key, value in kwargs.items()}
        )
        results.extend(result if result is not None else ())
    return results or None
