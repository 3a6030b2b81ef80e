"""Tables that rest on the host: rows of them are gathered there, and gradients of rows are added there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from patrickstar.core.trace import Phase, Rows
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.lookups import RowGradients
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor
from patrickstar.step.gradients import Gradients

__all__ = ["TableRows"]


class TableRows:
    """Reads rows of tables, and takes their gradients.

    Args:
        rounding: the type that a kept value is rounded to before it computes, if any.
    """

    def __init__(
        self,
        binding: Binding,
        executor: Executor,
        gradients: Gradients,
        touches: Touches,
        *,
        rounding: torch.dtype | None,
    ) -> None:
        self._binding = binding
        self._executor = executor
        self._gradients = gradients
        self._touches = touches
        self._rounding = rounding

    def gather(self, phase: Phase, name: str, rows: Rows, ids: Tensor, values: Tensor) -> None:
        """Writes rows into `values` (ids x width); of values kept in another type, what computes."""
        self._executor.moment(phase, name, (), rows)
        with self._executor.lock, self._executor.apart():
            for tile in self._binding.by_name[name].tiles:
                wanted, local = _inside(ids, tile)
                if not wanted.numel():
                    continue
                kept = self._executor.store.tensor_at_home(tile.ref)
                numel = tile.shape_only.numel()
                found = kept[tile.offset : tile.offset + numel].view(tile.rows, -1)[local]
                if self._rounding is not None:
                    found = found.to(self._rounding)
                values.index_copy_(0, wanted, found.to(values.dtype))

    def add_gradient(self, gradients: RowGradients, *, deliver: Callable[[str, Tensor], None]) -> None:
        """Takes what one backward has brought for rows. Where that is not added to where it rests, it is delivered tile by tile, or is the user's."""
        bound = self._binding.by_name[gradients.name]
        own = self._binding.gradients.own_of(bound.name)
        rows = self._touches.row_gradients(bound.name, gradients.nbytes)
        if own is not None:
            with self._executor.quiet():
                own.add_(gradients.sums(0, bound.rows))
        elif rows is not None:
            self._gradients.add_rows(bound, rows, gradients)
        else:
            for tile in bound.tiles:
                # One at a time: none is kept while the next is made.
                deliver(tile.name, self._sums(gradients, tile))

    def _sums(self, gradients: RowGradients, tile: BoundParameter) -> Tensor:
        with self._executor.quiet():
            return gradients.sums(tile.first_row, tile.rows)


def _inside(ids: Tensor, tile: BoundParameter) -> tuple[Tensor, Tensor]:
    """Which of the ids are rows of a tile, and which of its rows."""
    local = ids.long() - tile.first_row
    wanted = ((local >= 0) & (local < tile.rows)).nonzero().flatten()
    return wanted, local[wanted]
