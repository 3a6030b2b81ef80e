"""Tables that rest on the host: rows of such a table are gathered there, and gradients of rows are added there."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from patrickstar.core.machine import Tier
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.lookups import RowGradients
from patrickstar.plan.touches import Touches
from patrickstar.step.executor import Executor
from patrickstar.step.gradients import Gradients

__all__ = ["TableRows"]


class TableRows:
    """Reads rows of tables, and takes their gradients."""

    def __init__(self, binding: Binding, executor: Executor, gradients: Gradients, touches: Touches) -> None:
        self._binding = binding
        self._executor = executor
        self._gradients = gradients
        self._touches = touches

    def gather(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes rows that are usable on the host into `values` (ids x width); rows kept in another type, in the type that computes."""
        with self._executor.lock, self._executor.apart():
            for tile in self._binding.by_name[name].tiles:
                wanted, local = _inside(ids, tile)
                if not wanted.numel():
                    continue
                kept = self._executor.store.tensor(tile.ref, Tier.HOST)
                numel = tile.shape_only.numel()
                found = kept[tile.offset : tile.offset + numel].view(tile.rows, -1)[local]
                values.index_copy_(0, wanted, found.to(values.dtype))

    def add_gradient(self, gradients: RowGradients, *, deliver: Callable[[str, Tensor], None]) -> None:
        """Adds gradients of rows that one backward has brought where the table's gradient rests, or to the user's own; else delivers tiles."""
        bound = self._binding.by_name[gradients.name]
        own = self._binding.gradients.own_of(bound.name)
        touches = self._touches.row_gradients(bound.name)
        if own is not None:
            with self._executor.quiet():
                own.add_(gradients.sums(0, bound.rows))
        elif touches is not None:
            self._gradients.add_rows(bound, touches, gradients)
        else:
            for tile in bound.tiles:
                # One at a time: none is kept while the next is made.
                deliver(tile.name, self._sums(gradients, tile))

    def _sums(self, gradients: RowGradients, tile: BoundParameter) -> Tensor:
        with self._executor.quiet():
            return gradients.sums(tile.first_row, tile.rows)


def _inside(ids: Tensor, tile: BoundParameter) -> tuple[Tensor, Tensor]:
    """The positions of ids that are rows of a tile, and which rows of it these are."""
    local = ids.long() - tile.first_row
    wanted = ((local >= 0) & (local < tile.rows)).nonzero().flatten()
    return wanted, local[wanted]
