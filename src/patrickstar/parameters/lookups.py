"""Lookups of which only the rows that are asked for come from where the table rests. The table itself stays on the host.

Autograd sees one operation with the table's parameter as its input, and no gradient of the table: gradients of rows go straight to whoever keeps
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from patrickstar.parameters.bound import BoundParameter
from patrickstar.torch_private import backward_id

__all__ = ["RowGradients", "RowOwner", "WaitingRows", "expect_inside", "look_up"]


class RowOwner(Protocol):
    """The one who keeps tables."""

    def gather(self, name: str, ids: Tensor, values: Tensor, *, in_graph: bool) -> None:
        """Writes the rows of a table (ids: 1-D) into `values` (ids x width). `in_graph`: autograd records the lookup."""

    def row_gradients(self, name: str, ids: Tensor, gradient: Tensor, padding: int | None) -> None:
        """Takes the gradient of rows (ids x width) that a backward has brought; those of the padding's row count as zero."""


def look_up(owner: RowOwner, table: BoundParameter, ids: Tensor, padding: int | None) -> Tensor:
    """The result of `F.embedding` in a table whose rows are gathered.

    Args:
        ids: of any shape. padding: the row that gets no gradient, not negative; None: every row gets one.

    Raises:
        IndexError: an id is not a row of the table.
    """
    expect_inside(ids, table.rows)
    found: Tensor = _Lookup.apply(table.parameter, ids, _Asked(owner, table, padding, torch.is_grad_enabled()))
    return found


def expect_inside(ids: Tensor, rows: int) -> None:
    """Raises IndexError where an id is not a row of a table of so many. Fake ids, whose values nobody knows, cost the same."""
    is_outside = ((ids < 0) | (ids >= rows)).any()
    if not isinstance(ids, FakeTensor) and bool(is_outside):
        raise IndexError(f"index out of range in self: a table of {rows} rows")


@dataclass(slots=True, eq=False)
class RowGradients:
    """Gradients of rows of one table that one backward has brought, lookup by lookup in the order of their arrival.

    `parts`: ids (1-D), and gradients (ids x width). `padding`: the row whose gradient counts as zero, if any.
    """

    name: str
    padding: int | None
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.nbytes for _, gradient in self.parts)

    def sums(self, first: int, rows: int) -> Tensor:
        """The dense gradient of the table's rows from `first` on, rows x width, as autograd adds up what `F.embedding` gives."""
        # Ids outside of these rows are passed over by torch's kernel, and -1 is none of them.
        padding = self.padding - first if self.padding is not None and first <= self.padding < first + rows else -1
        total: Tensor | None = None
        for ids, gradient in self.parts:
            dense = torch.ops.aten.embedding_dense_backward.default(gradient, ids - first, rows, padding, False)
            total = dense if total is None else total.add_(dense)
        assert total is not None, "a gradient of no lookup"
        return total


class WaitingRows:
    """Gradients of rows that wait for the end of the backward that brings them: only then autograd would give their sum."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, RowGradients]] = {}

    def add(self, name: str, ids: Tensor, gradient: Tensor, padding: int | None) -> None:
        """Keeps gradients of rows that the innermost backward has brought."""
        tables = self._waiting.setdefault(backward_id(), {})
        tables.setdefault(name, RowGradients(name, padding)).parts.append((ids, gradient))

    def take(self) -> list[RowGradients]:
        """All gradients of rows that the innermost backward has brought, by table, in the order of arrival; none waits after that."""
        return list(self._waiting.pop(backward_id(), {}).values())

    def clear(self) -> None:
        """Drops gradients of rows from backwards that an exception has left."""
        self._waiting.clear()


class _Asked(NamedTuple):
    """A lookup's table, and the one who is asked for its rows."""

    owner: RowOwner
    table: BoundParameter
    padding: int | None
    in_graph: bool


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, ids: Tensor, asked: _Asked) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.asked = asked
        shape_only = asked.table.shape_only
        with torch.inference_mode(False):  # it is filled outside of that mode
            values = torch.empty((ids.numel(), shape_only.shape[1]), dtype=shape_only.dtype, device=ids.device)
        asked.owner.gather(asked.table.name, ids.reshape(-1), values, in_graph=asked.in_graph)
        return values.view(*ids.shape, shape_only.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.asked.owner.row_gradients(ctx.asked.table.name, ids.reshape(-1), rows, ctx.asked.padding)
        return None, None, None
