"""Layers whose parameters, inputs and outputs are blocks, and the loss of such outputs (Optimus, arXiv 2104.05343, sections 3.1 and 3.2).

Activations are cut by batch over rows and by their last dimension over columns; tokens of a sequence stay together, so attention is each rank's own.
B: batch of a row, S: tokens, K, N: features of a column, V: vocabulary of a row or a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from patrickstar.parallel.cut_batches import IGNORED
from patrickstar.parallel.grid import Cut, Grid, chunk_sizes, own_sums, panels
from patrickstar.parallel.group import MeshGroup
from patrickstar.parallel.kernels import autocast
from patrickstar.parallel.summa import BlockProduct, Steps, SummedProduct
from patrickstar.parallel.token_losses import mean_over

TakeBlock = Callable[[nn.Parameter, Cut], nn.Parameter]
"""Gives this rank's block of a parameter, the same for one that several modules have."""


class BlockLayer(nn.Module):
    """A layer of blocks. Its parameters have the names of those that they are blocks of, and are None where the module has none.

    `grid`: the ranks. `cuts`: how each parameter is cut, by its name here.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, grid: Grid, module: Any, take: TakeBlock, **cuts: Cut) -> None:
        super().__init__()
        self.grid = grid
        self.train(module.training)
        for name, cut in cuts.items():
            parameter = getattr(module, name, None)
            self.register_parameter(name, None if parameter is None else take(parameter, cut))
        self.cuts = {name: cut for name, cut in cuts.items() if getattr(self, name) is not None}


class LinearBlock(BlockLayer):
    """`nn.Linear`, or GPT-2's `Conv1D`, whose weight lies the other way round: [B, S, K] to [B, S, N].

    `parts`: the outputs are so many matrices side by side (queries, keys and values), and a block has a piece of each.
    """

    def __init__(self, grid: Grid, module: Any, take: TakeBlock, *, parts: int = 1) -> None:
        shape, turned = tuple(module.weight.shape), isinstance(module, nn.Linear)
        n_in, n_out = shape[::-1] if turned else shape
        weight = Cut(shape, int(turned), int(not turned), parts)
        super().__init__(grid, module, take, weight=weight, bias=Cut((n_out,), None, 0, parts))
        self.shares: SharedInput | None = None
        self.steps = Steps.over(grid, n_in, turned=turned)

    def forward(self, x: Tensor) -> Tensor:
        y = linear([self], x)[0] if self.shares is None else self.shares.output(self, x)
        return y if self.bias is None else y + Replicated.apply(self.grid.rows, self.bias)


class SharedInput:
    """Linear layers that are called with one tensor after each other: its blocks are sent once for all of them.

    The first that is called computes for all; each takes its output when it is called.
    """

    def __init__(self, layers: Sequence[LinearBlock]) -> None:
        self.layers = tuple(layers)
        for layer in layers:
            layer.shares = self

        self._input: Tensor | None = None
        self._outputs: dict[LinearBlock, Tensor] = {}

    def output(self, layer: LinearBlock, x: Tensor) -> Tensor:
        """The output of one of them."""
        if x is not self._input or layer not in self._outputs:
            self._input, self._outputs = x, dict(zip(self.layers, linear(self.layers, x), strict=True))
        y = self._outputs.pop(layer)
        if not self._outputs:
            self._input = None
        return y


def linear(layers: Sequence[LinearBlock], x: Tensor) -> list[Tensor]:
    """Products of x with the weights of some layers, without biases."""
    # A view of each: autograd saves what a session knows, also of layers that are not the one that is called.
    x, *weights = autocast(x, *(layer.weight.view_as(layer.weight) for layer in layers))
    outputs = BlockProduct.apply(layers[0].steps, False, x.flatten(0, -2), *weights)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in outputs]


class NormBlock(BlockLayer):
    """`nn.LayerNorm`, `nn.RMSNorm`, or a norm of `transformers` that computes as this does: over a dimension cut by columns.

    Sums are at least in fp32. Two numbers a token, or one without a mean, are summed along the row in a call, and so in backward.
    """

    def __init__(self, grid: Grid, module: Any, take: TakeBlock) -> None:
        cut = Cut((norm_size(module),), None, 0)
        super().__init__(grid, module, take, weight=cut, bias=cut)
        self.size, self.eps = norm_size(module), norm_eps(module)
        self.centred = isinstance(module, nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _Norm.apply(self.grid, (self.size, eps, self.centred), x, self.weight, self.bias)


def norm_size(module: Any) -> int:
    """Number of features that a norm is over."""
    return int(module.normalized_shape[-1] if hasattr(module, "normalized_shape") else module.weight.shape[-1])


def norm_eps(module: Any) -> float | None:
    """The number that a norm adds to the variance, under any of its names."""
    found = getattr(module, "variance_epsilon", None)
    return getattr(module, "eps", None) if found is None else found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, options: tuple[int, float, bool], *tensors: Any) -> Tensor:
        (size, eps, centred), (x, weight, bias) = options, tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if centred:
            # The mean of squares less the square of the mean: in fp64, or digits of a small variance beside a large mean are lost.
            own = wide.mean(-1, keepdim=True).double()
            squares = (wide - own.to(wide.dtype)).square().sum(-1, keepdim=True) + wide.shape[-1] * own.square()
            total, squares = grid.cols.sum(wide.shape[-1] * own, squares)
            variance = (squares / size - (total / size).square()).to(wide.dtype)
            mean = (total / size).to(wide.dtype)
        else:
            (squares,) = grid.cols.sum(wide.square().sum(-1, keepdim=True))
            mean, variance = None, squares / size
        scale = torch.rsqrt(variance + eps)
        ctx.grid, ctx.size = grid, size
        ctx.save_for_backward(x, weight, bias, mean, scale)
        y = (wide if mean is None else wide - mean) * scale
        return (y if weight is None else y * weight if bias is None else y * weight + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        grid, size = ctx.grid, ctx.size
        y, dy = (x.to(scale.dtype) - (0 if mean is None else mean)) * scale, dy.to(scale.dtype)
        g = dy if weight is None else dy * weight
        sums = [(g * y).sum(-1, keepdim=True)] + ([] if mean is None else [g.sum(-1, keepdim=True)])
        of_y, *of_mean = grid.cols.sum(*sums)
        dx = (scale * (g - y * (of_y / size) - sum(of_mean) / size)).to(x.dtype)
        of_vectors = [(dy * y).flatten(0, -2).sum(0)] if weight is not None else []
        if bias is not None:
            of_vectors.append(dy.flatten(0, -2).sum(0))
        vectors = grid.rows.sum(*(v.to(weight.dtype) for v in of_vectors)) if of_vectors else ()
        return None, None, dx, *vectors, *(None,) * (2 - len(vectors))


class EmbeddingBlock(BlockLayer):
    """`nn.Embedding` with a table cut by ids over rows and by features over columns: ids [B, S] to [B, S, K]."""

    def __init__(self, grid: Grid, module: nn.Embedding, take: TakeBlock) -> None:
        super().__init__(grid, module, take, weight=Cut(tuple(module.weight.shape), 0, 1))
        self.sizes = tuple(chunk_sizes(module.num_embeddings, grid.q))
        self.padding_idx = module.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return _Lookup.apply(self, ids, self.weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: EmbeddingBlock, ids: Tensor, table: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(ids)
        line, sizes, place = layer.grid.rows, layer.sizes, place_of(ids, layer.sizes)
        out = table.new_empty(*ids.shape, table.shape[1])
        for number, (panel,) in enumerate(panels(sizes, (table, 0, line))):
            here = place == number
            found = F.embedding(torch.where(here, ids - number * sizes[0], 0), panel)
            out = torch.where(here[..., None], found, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        (ids,), sizes, padding = ctx.saved_tensors, ctx.layer.sizes, ctx.layer.padding_idx
        place = place_of(ids, sizes)
        place = place if padding is None else torch.where(ids == padding, -1, place)

        def partials() -> Iterator[list[Tensor]]:
            for number, size in enumerate(sizes):
                # One row more, for ids of others, which is left out as that of a padding id is.
                rows = torch.where(place == number, ids - number * sizes[0], size)
                yield [torch.ops.aten.embedding_dense_backward(dout, rows, size + 1, size, False)[:size]]

        return None, None, own_sums(ctx.layer.grid.rows, partials())[0]


def place_of(ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """The block that has each id. One that is out of range is in the first or the last, where torch refuses it."""
    return (ids // sizes[0]).clamp(0, len(sizes) - 1)


class PositionsBlock(BlockLayer):
    """`nn.Embedding` of positions: a table cut by features over columns, which the ranks of a column have alike; [B or 1, S] to [B or 1, S, K]."""

    def __init__(self, grid: Grid, module: nn.Embedding, take: TakeBlock) -> None:
        super().__init__(grid, module, take, weight=Cut(tuple(module.weight.shape), None, 1))
        self.padding_idx = module.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, Replicated.apply(self.grid.rows, self.weight), self.padding_idx)


class TiedHeadBlock(BlockLayer):
    """A head whose weight is the table of the embedding: [B, S, K] to logits [B, S, V], the vocabulary cut over columns."""

    def __init__(self, grid: Grid, module: nn.Linear, take: TakeBlock) -> None:
        shape = tuple(module.weight.shape)
        super().__init__(grid, module, take, weight=Cut(shape, 0, 1), bias=Cut(shape[:1], None, 0))
        self.steps = Steps.over(grid, module.out_features)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = autocast(x, self.weight)
        y = SummedProduct.apply(self.steps, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + Replicated.apply(self.grid.rows, self.bias)


class Replicated(torch.autograd.Function):
    """A parameter that all ranks of a line have alike: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, line: MeshGroup, vector: Tensor) -> Tensor:
        ctx.line = line
        return vector.view_as(vector)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.line.sum(gradient)


def cross_entropy_of_blocks(
    grid: Grid, size: int, logits: Tensor, labels: Tensor, ignore_index: int = IGNORED, count: Any = None
) -> Tensor:
    """The mean over the valid labels of all rows, the same on all ranks; its gradient is this rank's share.

    Args:
        size: of the vocabulary. logits: [..., V] of this column. labels: [...] of this row, alike in its columns.
        count: what to divide by in place of the number of valid labels.
    """
    valid = labels != ignore_index
    return mean_over(_CrossEntropy.apply(grid, size, logits, labels, valid), valid, grid.rows, of=count)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropies [...], at least in fp32; those of labels that are not valid mean nothing."""

    @staticmethod
    def forward(ctx: Any, grid: Grid, size: int, logits: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        sizes, j = chunk_sizes(size, grid.q), grid.cols.rank
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        here = valid & (place_of(labels, sizes) == j)
        index = torch.where(here, labels - j * sizes[0], 0).unsqueeze(-1)
        largest = grid.cols.largest(wide.amax(-1))
        target = torch.where(here, wide.gather(-1, index).squeeze(-1), 0)
        target, total = grid.cols.sum(target, (wide - largest.unsqueeze(-1)).exp().sum(-1))
        lse = largest + total.log()
        ctx.save_for_backward(logits, lse, index, here)
        return lse - target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, lse, index, here = ctx.saved_tensors
        p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp_()
        p.scatter_add_(-1, index, -here.unsqueeze(-1).to(p.dtype))
        return None, None, p.mul_(gradient.unsqueeze(-1)).to(logits.dtype), None, None
