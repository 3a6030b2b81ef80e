"""Products of matrices in q x q blocks (SUMMA; Optimus, arXiv 2104.05343, section 3): each is the derivative of the others.

Rank (i, j) has a block of each matrix, and in q steps l:

    C = A B      A_il comes along the row, B_lj along the column;  C_ij += A_il B_lj
    C = A B^T    B_lj comes along the column;  A_ij B_lj^T is summed along the row for column l
    C = A^T B    A_il comes along the row;  A_il^T B_ij is summed along the column for row l

One dimension is cut over columns in one matrix and over rows in another: that of the steps. Panels of the next step are under way while one is
multiplied, sums of one while the next is; no rank ever has more than two of either. A rank sends (q-1)/q of what comes along a line, or is summed.

Several matrices B take one A: A B_1, A B_2, ... need each panel of A once, and so do derivatives of these. Shapes in comments: m = rows of A,
k = the dimension of the steps, n = what is left; all of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from patrickstar.errors import ConfigError
from patrickstar.parallel.grid import Grid, chunk_sizes, own_sums, panels

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a product. `sizes`: of the panels. `turned`: B of A B lies as [n, k], as the weight of `nn.Linear` does."""

    grid: Grid
    sizes: tuple[int, ...]
    turned: bool = False

    @classmethod
    def over(cls, grid: Grid, size: int, *, turned: bool = False) -> Steps:
        """The steps over a dimension of so many elements in all."""
        return cls(grid, tuple(chunk_sizes(size, grid.q)), turned)


def summa_ab(a: Tensor, b: Tensor, mesh: DeviceMesh, size: int | None = None) -> Tensor:
    """The block of A B on this rank.

    Args:
        a, b: blocks [m, k] and [k, n] of A, cut by rows and columns of the mesh, and of B, cut alike.
        mesh: of two dimensions of equal size q. size: of the dimension that is summed over, where q does not divide it (cut as `torch.chunk` does).
    Raises:
        ConfigError: another mesh, or blocks that do not belong together, with the numbers.
    """
    steps = _checked(mesh, size, a, b, (a.shape[1], b.shape[0]))
    return BlockProduct.apply(steps, False, a, b)[0]


def summa_abt(a: Tensor, b: Tensor, mesh: DeviceMesh, size: int | None = None) -> Tensor:
    """The block [m, k] of A B^T on this rank, from blocks a [m, n] and b [k, n]: as `summa_ab`; `size`: of the rows of B."""
    steps = _checked(mesh, size, a, b, (None, b.shape[0]))
    return SummedProduct.apply(steps, a, b)


def summa_atb(a: Tensor, b: Tensor, mesh: DeviceMesh, size: int | None = None) -> Tensor:
    """The block [k, n] of A^T B on this rank, from blocks a [m, k] and b [m, n]: as `summa_ab`; `size`: of the columns of A."""
    steps = _checked(mesh, size, a, b, (a.shape[1], None))
    return BlockProduct.apply(steps, True, a, b)[0]


class BlockProduct(torch.autograd.Function):
    """A B for some B, or A^T B where `transposed`: of a [m, k] and each b [k, n] (or turned), [m, n]; or of each b [m, n], [k, n] (or turned)."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, transposed: bool, a: Tensor, *bs: Tensor) -> Tensors:
        ctx.steps, ctx.transposed = steps, transposed
        ctx.save_for_backward(a, *bs)
        return (_atb if transposed else _ab)(steps, a, bs)

    @staticmethod
    def backward(ctx: Any, *dcs: Tensor) -> Any:
        (a, *bs), (_, _, of_a, *of_bs) = ctx.saved_tensors, ctx.needs_input_grad
        both = (*bs, *dcs) if ctx.transposed else (*dcs, *bs)
        da = SummedProduct.apply(ctx.steps, *both) if of_a else None
        return (
            None,
            None,
            da,
            *_for(of_bs, dcs, lambda some: BlockProduct.apply(ctx.steps, not ctx.transposed, a, *some)),
        )


class SummedProduct(torch.autograd.Function):
    """The sum of A B^T over as many a [m, n] as b [k, n] (or turned): [m, k]. Several are what one A of several A B needs."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *both: Tensor) -> Tensor:
        ctx.steps = steps
        ctx.save_for_backward(*both)
        return _abt(steps, *_halves(both))

    @staticmethod
    def backward(ctx: Any, *dcs: Tensor) -> Any:
        (as_, bs), (of_as, of_bs) = _halves(ctx.saved_tensors), _halves(ctx.needs_input_grad[1:])
        das = _for(of_as, bs, lambda some: BlockProduct.apply(ctx.steps, False, *dcs, *some))
        return None, *das, *_for(of_bs, as_, lambda some: BlockProduct.apply(ctx.steps, True, *dcs, *some))


def _ab(steps: Steps, a: Tensor, bs: Sequence[Tensor]) -> Tensors:
    n = 0 if steps.turned else 1
    cs = tuple(a.new_empty(a.shape[0], b.shape[n]) for b in bs)
    from_others = ((b, 1 - n, steps.grid.rows) for b in bs)
    for step, (panel, *of_bs) in enumerate(panels(steps.sizes, (a, 1, steps.grid.cols), *from_others)):
        for c, b in zip(cs, of_bs, strict=True):
            c.addmm_(panel, b.t() if steps.turned else b, beta=min(step, 1))
    return cs


def _abt(steps: Steps, as_: Sequence[Tensor], bs: Sequence[Tensor]) -> Tensor:
    k = 1 if steps.turned else 0

    def partials() -> Iterator[list[Tensor]]:
        for of_bs in panels(steps.sizes, *((b, k, steps.grid.rows) for b in bs)):
            c = as_[0].new_empty(as_[0].shape[0], of_bs[0].shape[k])
            for number, (a, b) in enumerate(zip(as_, of_bs, strict=True)):
                c.addmm_(a, b if steps.turned else b.t(), beta=min(number, 1))
            yield [c]

    return own_sums(steps.grid.cols, partials())[0]


def _atb(steps: Steps, a: Tensor, bs: Sequence[Tensor]) -> Tensors:
    def partials() -> Iterator[list[Tensor]]:
        for (panel,) in panels(steps.sizes, (a, 1, steps.grid.cols)):
            yield [b.t() @ panel if steps.turned else panel.t() @ b for b in bs]

    return tuple(own_sums(steps.grid.rows, partials()))


def _for(wanted: Sequence[bool], given: Sequence[Tensor], act: Callable[[Tensors], Tensors]) -> list[Any]:
    """The results of `act` for those that are wanted, and None for others."""
    chosen = tuple(each for each, is_wanted in zip(given, wanted, strict=True) if is_wanted)
    results = iter(act(chosen) if chosen else ())
    return [next(results) if is_wanted else None for is_wanted in wanted]


def _halves(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return items[: len(items) // 2], items[len(items) // 2 :]


def _checked(mesh: DeviceMesh, size: int | None, a: Tensor, b: Tensor, found: tuple[int | None, int | None]) -> Steps:
    """The steps over a dimension, once blocks are seen to be of it. `found`: their sizes in it, of what is cut by columns and by rows."""
    grid = Grid.of(mesh)
    if size is None:
        size = grid.q * next(own for own in found if own is not None)
    steps = Steps.over(grid, size)
    expected = (steps.sizes[grid.cols.rank], steps.sizes[grid.rows.rank])
    if a.dim() != 2 or b.dim() != 2 or any(f not in {None, e} for f, e in zip(found, expected, strict=True)):
        raise ConfigError(
            f"blocks {list(a.shape)} and {list(b.shape)} at row {grid.rows.rank}, column {grid.cols.rank} of {grid.q} x {grid.q}: "
            f"a dimension of {size} has {expected[0]} in that column and {expected[1]} in that row; give its size with size= where "
            f"{grid.q} does not divide it"
        )
    return steps
