"""Whole tensors of a model whose parameters are blocks on the ranks of a mesh, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from patrickstar.core.planes import WEIGHT
from patrickstar.errors import ConfigError
from patrickstar.parallel.grid import Cut, Grid
from patrickstar.step.mesh_ranks import MeshRanks
from patrickstar.step.values import Weights, put_together

_STRIP_NUMEL = 1 << 18


@dataclass(frozen=True, slots=True)
class MeshTensors:
    """Puts parameters together from blocks, and takes blocks of them: fp32 on the host, as the model has them without a mesh.

    Attributes:
        ranks: all that have blocks. grid, cuts: which blocks this rank has, by the parameter's name. weights: values in its chunks.
    """

    ranks: MeshRanks
    grid: Grid
    cuts: Mapping[str, Cut]
    weights: Weights

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole parameter."""
        return self.cuts[name].shape

    def read(self, name: str) -> Tensor:
        """A copy of a whole parameter. All ranks read it."""
        with self.weights.executor.lock, self.weights.executor.apart():
            block = self.kept(name, WEIGHT)
        return self.whole(name, block)

    def whole(self, name: str, block: Tensor) -> Tensor:
        """The whole of which all ranks have blocks, or ranks of one place have each a part of their block and zeros elsewhere."""
        executor = self.weights.executor
        with executor.lock, executor.apart():
            whole = torch.empty(self.shape(name), device="cpu")
            with executor.room.making(whole.nbytes + block.nbytes):
                put_together(whole.view(-1), self.strips(name, block))
            return whole

    def kept(self, name: str, plane: str) -> Tensor:
        """A block as far as this rank has it in its chunks, zeros elsewhere."""
        weights = self.weights
        block = torch.zeros(weights.binding.by_name[name].shape_only.shape, device="cpu")
        if plane == WEIGHT:
            weights.binding.changes.look(weights.binding.by_name[name])
        for part in weights.layout.parts(name):
            at = part.tensor_start
            put_together(block.view(-1)[at : at + part.stop - part.start], weights.pieces_of(name, part, plane))
        return block

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The block of a whole parameter that is this rank's. ConfigError: no such parameter, or another shape."""
        if name not in self.cuts or tuple(whole.shape) != self.shape(name):
            expected = self.shape(name) if name in self.cuts else "not there"
            raise ConfigError(
                f"{name} is {expected}, the value {tuple(whole.shape)}: values are whole tensors, of which each rank takes its block"
            )
        return self.cuts[name].block(whole, self.grid)

    def strips(self, name: str, block: Tensor) -> Iterator[Tensor]:
        """The elements of a whole in order, in 1-D pieces. All ranks ask for all of them, each with its block, or its part of one (`whole`)."""
        ranks, size = self.ranks, len(self.ranks.places)
        for number, tiles in enumerate(self.cuts[name].strips(self.grid.q, _STRIP_NUMEL)):
            places = dict.fromkeys(tile.place for tile in tiles)
            numel = {place: sum(tile.numel for tile in tiles if tile.place == place) for place in places}
            mine = torch.zeros(max(numel.values()), device="cpu")
            with self.weights.executor.room.making((size + 1) * mine.nbytes):
                put_together(mine, (tile.of(block).reshape(-1) for tile in tiles if tile.place == self.grid.place))
                of_all = torch.empty(size, len(mine), device="cpu")
                ranks.collectives.gather(of_all.view(-1), mine, f"strip {number} of {name}").wait()
                left = {}
                for place in places:
                    # As integers, with zeros elsewhere: no bit is lost, the sign of a zero neither.
                    parts = [
                        bits for bits, at in zip(of_all.view(torch.int32), ranks.places, strict=True) if at == place
                    ]
                    left[place] = reduce(torch.bitwise_or, parts).view(torch.float32)
                taken = []
                for tile in tiles:
                    values, left[tile.place] = left[tile.place].tensor_split([tile.numel])
                    taken.append(values.view(tile.shape))
                yield torch.cat(taken, 1).view(-1)

    def block(self, name: str, read: Callable[[Tensor, int], object]) -> Tensor:
        """The block that is this rank's, from what `read` writes: elements of the whole from one on, into a 1-D tensor."""
        cut, at = self.cuts[name], 0
        block = torch.empty(self.weights.binding.by_name[name].shape_only.shape, device="cpu")
        for tiles in cut.strips(self.grid.q, _STRIP_NUMEL):
            strip = torch.empty(sum(tile.numel for tile in tiles), device="cpu")
            if any(tile.place == cut.first(self.grid.place) for tile in tiles):
                read(strip, at)
            at += len(strip)
            widths = [tile.shape[1] for tile in tiles]
            for tile, values in zip(tiles, strip.view(-1, sum(widths)).split(widths, 1), strict=True):
                if tile.place == cut.first(self.grid.place):
                    tile.of(block).copy_(values)
        return block
