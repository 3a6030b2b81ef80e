"""Tables that rest on the host: rows of them are gathered there, and gradients of rows are added there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from patrickstar.core.layout import Layout
from patrickstar.core.trace import Phase
from patrickstar.nn.binding import Binding
from patrickstar.nn.rows import RowGradients
from patrickstar.runtime.conductor import Conductor
from patrickstar.runtime.gradients import Gradients
from patrickstar.tracing.choreography import Choreography

__all__ = ["TableRows"]


class TableRows:
    """Reads rows of tables, and takes their gradients.

    Args:
        rounding: the type that a kept value is rounded to before it computes, if any.
    """

    def __init__(
        self,
        binding: Binding,
        layout: Layout,
        conductor: Conductor,
        gradients: Gradients,
        choreography: Choreography,
        *,
        rounding: torch.dtype | None,
    ) -> None:
        self._binding = binding
        self._layout = layout
        self._conductor = conductor
        self._gradients = gradients
        self._choreography = choreography
        self._rounding = rounding

    def gather(self, phase: Phase, name: str, ids: Tensor, values: Tensor) -> None:
        """Writes rows into `values` (ids x width); of values kept in another type, what computes."""
        self._conductor.moment(phase, name, (), self._choreography.gathered(name, values.numel()))
        with self._conductor.lock, self._conductor.apart():
            for label, first, rows in self.tiles(name):
                wanted, local = _inside(ids, first, rows)
                if not wanted.numel():
                    continue
                (tile,) = self._layout.tiles(label)
                kept = self._conductor.tensor_at_home(self._binding.records[label].ref)
                found = kept[tile.offset : tile.offset + tile.numel].view(rows, -1)[local]
                if self._rounding is not None:
                    found = found.to(self._rounding)
                values.index_copy_(0, wanted, found.to(values.dtype))

    def add_gradient(self, gradients: RowGradients, *, deliver: Callable[[str, Tensor], None]) -> None:
        """Takes what one backward has brought for rows. Where that is not added to where it rests, it is delivered tile by tile, or is the user's."""
        name = gradients.name
        own = self._binding.gradients.own_of(name)
        rows = self._choreography.added(name, gradients.nbytes)
        if own is not None:
            with self._conductor.quiet():
                own.add_(gradients.sums(0, int(own.shape[0])))
        elif rows is not None:
            spans = {label: (first, count) for label, first, count in self.tiles(name)}
            self._gradients.add_rows(self._binding.by_name[name], rows, lambda label: gradients.sums(*spans[label]))
        else:
            for label, first, count in self.tiles(name):
                # One at a time: none is kept while the next is made.
                deliver(label, self._sums(gradients, first, count))

    def _sums(self, gradients: RowGradients, first: int, count: int) -> Tensor:
        with self._conductor.quiet():
            return gradients.sums(first, count)

    def tiles(self, name: str) -> Iterator[tuple[str, int, int]]:
        """The label of each tile, its first row, and how many it has."""
        first = 0
        for tile in self._binding.by_name[name].tiles:
            rows = int(tile.shape_only.shape[0])
            yield tile.name, first, rows
            first += rows


def _inside(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which of the ids are rows of a tile, and which of its rows."""
    local = ids.long() - first
    wanted = ((local >= 0) & (local < rows)).nonzero().flatten()
    return wanted, local[wanted]
