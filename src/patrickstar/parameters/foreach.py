"""Foreach functions tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["counted", "is_foreach", "one_by_one"]


def is_foreach(func: Callable[..., Any]) -> bool:
    """Whether a function does the same with each tensor of a list."""
    return func.__name__.startswith(("_foreach_", "_amp_foreach_"))


def counted(func: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with the versions of what `func` writes counted up where torch does not do that."""
    if not func.__name__.startswith("_amp_foreach_"):
        return run

    def run_and_count(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        result = run(tensors, *args, **kwargs)
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        return result

    return run_and_count


def one_by_one(
    handle: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`handle` for each tensor of the lists, so that they need not be resident all at once. Same arithmetic, same bits."""
    lengths = [len(value) for value in (*args, *kwargs.values()) if _is_list(value)]
    length = lengths[0]
    if set(lengths) != {length}:
        raise RuntimeError(f"{func.__name__}: lists must have the same number of elements, got {lengths}")

    def item(value: Any, index: int) -> Any:
        if _is_list(value):
            return [value[index]]
        # One scalar for each tensor, as a tensor of them.
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) == length:
            return value[index : index + 1]
        return value

    results: list[Any] = []
    for index in range(length):
        result = handle(
            func, [item(value, index) for value in args], {key: item(value, index) for key, value in kwargs.items()}
        )
        results.extend(result if result is not None else ())
    return results or None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
