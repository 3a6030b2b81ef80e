"""Gathering and reducing over ranks: whole weights for whoever uses them, and each rank's share of everybody's gradients.

A group of chunks, those of a block or of what no block owns, is gathered where one of its parameters is used, into a copy that lives as long
as anything holds it (Note [Copies] in `memory/leases.py`). All ranks do so in the order of their calls: what is resident decides nothing.
Weights travel in the type that they are kept in, and each rank widens them where another one computes.

Gradients of all ranks are added in rank order in fp32, ((g0 + g1) + g2) + ..., and multiplied by f(1/p): bits that depend on no topology.
Those of a backward travel in the type in which one rank would keep them, sums of several in fp32.
Source: sharding of model states is ZeRO's (Rajbhandari et al., 2020); by chunks it is PatrickStar's (Fang et al., 2021).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from patrickstar.comm.collectives import Collectives
from patrickstar.core.layout import Part
from patrickstar.core.planes import REST, WEIGHT, PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Phase, Touch
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.gathered import Gathered
from patrickstar.plan.touches import master_touches
from patrickstar.step.executor import Executor
from patrickstar.step.precision import Precision
from patrickstar.step.weight_masters import Masters

_WIDENED_APART: Final = 1024  # elements


@dataclass(eq=False)
class Gathering:
    """Makes whole weights of shards, and shards of gradients. Made before the binding, which is given afterwards.

    Attributes:
        collectives: of all ranks, which do the same ones in the same order.
        masters: of weights. precision: the types of the session.
        postpones: how many contexts say that gradients are not to be reduced. kept: those that wait for that, in fp32, by name.
        has_waited: whether there has been such a context since gradients were last reduced.
    """

    layout: ShardLayout
    executor: Executor
    collectives: Collectives
    masters: Masters
    precision: Precision
    postpones: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    has_waited: bool = False
    binding: Binding = field(init=False)

    def __post_init__(self) -> None:
        self.gathered = Gathered(self.layout, self._whole)

    # weights

    def make(self, group: str) -> Tensor:
        """The weights of a group that has been gathered for a use."""
        return self.gathered.there[group]

    def _whole(self, group: str) -> Tensor:
        """The weights of a group whose shards are resident: in what somebody still holds of it, if anybody does."""
        first, leases = self.binding.access.parameters_in(group)[0], self.binding.leases
        with self.executor.lock, self.executor.quiet():
            units = [leases.take(PlaneRef(chunk, WEIGHT)) for chunk in self.layout.chunks_in[group]]
            whole = leases.living_copy(group)
            if whole is None:
                numel, dtype = self.layout.group_numel(group), first.shape_only.dtype
                whole = torch.empty(numel, dtype=dtype, device=self.binding.device)
            self._gather(group, whole)
            del units  # none of which may leave while the copy is made
            return whole

    def renew(self, group: str, copy: Tensor) -> None:
        """Writes the weights of a group into a copy of them."""
        with self.executor.lock, self.executor.apart():
            self._bring(group, writes=False, phase=Phase.STEP)
            self._gather(group, copy)
            self.binding.leases.copy_written(group, copy)

    def changed(self, group: str) -> None:
        """A copy has been written in place, on all ranks alike: each keeps its share. Where it is of another type, it shows what is kept."""
        copy, first = self.binding.access.lease(group), self.binding.access.parameters_in(group)[0]
        with self.executor.lock, self.executor.apart():
            phase = self.executor.change_phase()
            if not first.is_copied:
                self._bring(group, writes=True, phase=phase)
                for ref, piece in self._pieces(group, copy):
                    self.executor.store.tensor(ref).copy_(self._mine(piece))
                return
            for ref, piece in self._pieces(group, copy):
                part = Part(ref.chunk, 0, self.layout.chunk_numel, 0)
                is_split = PlaneRef(ref.chunk, REST) in self.executor.store.state.home
                touches = master_touches(part, self.layout, is_split=is_split, writes=True)
                self.executor.moment(phase, first.name, touches)
                self.masters.take_changes(self._mine(piece), part, is_split=is_split)
            self._bring(group, writes=False, phase=phase)
            self._gather(group, copy)

    def assemble(self, name: str, mine: Iterable[Tensor], flat: Tensor) -> None:
        """Writes what ranks have of a parameter, in a plane, into a 1-D fp32 tensor in slot order. `mine`: this rank's pieces, in order."""
        parts = {part.chunk: part for part in self.layout.parts(name)}
        own, at = torch.cat([piece.clone() for piece in mine] or [torch.empty(0)]), 0
        for chunk, start, stop, begin in self.layout.whole.parts(name):
            share = torch.zeros(self.layout.chunk_numel)
            if (part := parts.get(chunk)) is not None:
                share[part.start : part.stop].copy_(own[at : at + part.stop - part.start])
                at += part.stop - part.start
            whole = torch.empty(self.layout.whole.chunk_numel)
            self.collectives.gather(whole, share, f"c{chunk} of {name}").wait()
            flat[begin : begin + stop - start].copy_(whole[start:stop])

    def _bring(self, group: str, *, writes: bool, phase: Phase) -> None:
        label = self.binding.access.parameters_in(group)[0].name
        self.executor.moment(phase, label, [Touch(ref, writes) for ref in self.layout.weight_units(label)])

    def _pieces(self, group: str, whole: Tensor) -> Iterator[tuple[PlaneRef, Tensor]]:
        """The units of a group's weights, each with its chunk of the whole."""
        numel = self.layout.whole.chunk_numel
        for number, chunk in enumerate(self.layout.chunks_in[group]):
            yield PlaneRef(chunk, WEIGHT), whole[number * numel : (number + 1) * numel]

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.view(self.layout.size, -1)[self.layout.rank]

    def _gather(self, group: str, whole: Tensor) -> None:
        kept = torch.float32 if self.layout.is_whole(self.layout.chunks_in[group][0]) else self.precision.kept
        arrives = whole if whole.dtype is kept else whole.view(kept)[whole.numel() :]  # widened where they arrive
        under_way = []
        for ref, piece in self._pieces(group, arrives):
            mine = self.executor.store.tensor(ref)
            mine = mine if mine.dtype is kept else self._mine(piece).copy_(mine)
            under_way.append(self.collectives.gather(piece, mine, str(ref)))
        for ticket in under_way:
            ticket.wait()
        if arrives is not whole:
            _widen(whole, arrives)

    # gradients

    def kept_bytes(self) -> int:
        """Bytes of gradients that wait to be reduced."""
        return sum(gradient.nbytes for gradient in self.kept.values())

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """A context in which gradients stay this rank's own, in fp32, until a backward outside of it, or the step."""
        self.postpones, self.has_waited = self.postpones + 1, True
        try:
            yield
        finally:
            self.postpones -= 1

    def share(
        self, gradients: Mapping[str, Tensor], add: Callable[[list[str], Iterable[tuple[int, Tensor]]], None]
    ) -> None:
        """Has all ranks add their gradients of a backward, and those that have waited, of which each `add`s its part; unless they are to wait."""
        whole = self._with_kept(gradients)
        if not self.postpones:
            names = self._agree(whole)
            add(names, self._reduced(names, whole))
            self.has_waited = False

    def _with_kept(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The gradients of a backward, added to those that have waited; they wait too, where they are to, and none are given then."""
        with self.executor.quiet():
            if not self.postpones and not self.kept:
                return gradients
            new = sum(4 * gradient.numel() for name, gradient in gradients.items() if name not in self.kept)
            with self.executor.room.making(new):
                for name, gradient in gradients.items():
                    if name in self.kept:
                        self.kept[name].add_(gradient)
                    else:
                        self.kept[name] = gradient.to(torch.float32, copy=True)
        if self.postpones:
            return {}
        whole, self.kept = self.kept, {}
        return whole

    def drop(self, names: Collection[str]) -> None:
        """Forgets gradients that have waited."""
        for name in self.kept.keys() & set(names):
            del self.kept[name]

    def of_any(self, names: Collection[str]) -> list[str]:
        """The parameters that any rank names, those of the first rank first: alike on all."""
        of_all = self.collectives.agree(json.dumps(list(names)).encode(), "overflowed gradients")
        return list(dict.fromkeys(name for named in of_all for name in json.loads(named)))

    def _agree(self, names: Mapping[str, Tensor]) -> list[str]:
        """The parameters that have a gradient on any rank, in layout order."""
        known = list(self.layout.slices)
        of_all = self.collectives.agree(bytes(name in names for name in known), "gradients")
        return [name for name, *there in zip(known, *of_all, strict=True) if any(there)]

    def _reduced(self, names: list[str], gradients: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Chunk by chunk, this rank's share of the mean of all ranks' gradients, in fp32; zeros where one has none."""
        wanted = set(names)
        for chunk in range(self.layout.n_chunks):
            pieces = [piece for piece in self.layout.whole.tensors_in(chunk) if piece.name in wanted]
            if not pieces:
                continue
            is_wide = self.has_waited or self.layout.is_whole(chunk)
            dtype = torch.float32 if is_wide else self.precision.sent
            mine = torch.zeros(self.layout.whole.chunk_numel, dtype=dtype, device=self.binding.device)
            for name, start, stop, at in pieces:
                if name in gradients:
                    flat = self.binding.by_name[name].flat(gradients[name])
                    mine[start:stop].copy_(flat[at : at + stop - start])
            share = torch.empty(self.layout.chunk_numel, device=self.binding.device)
            self.collectives.reduce(share, mine, torch.empty_like(mine), f"c{chunk}").wait()
            yield chunk, share


def _widen(whole: Tensor, narrow: Tensor) -> None:
    """Writes 1-D elements of 2 bytes, which are the second half of the bytes of `whole`, as its elements of 4."""
    start, numel = 0, whole.numel()
    while start < numel:
        # The first half of what is left lies before what it is made of.
        stop = start + (numel - start) // 2 if numel - start > _WIDENED_APART else numel
        piece = narrow[start:stop]
        whole[start:stop].copy_(piece if stop < numel else piece.clone())
        start = stop
