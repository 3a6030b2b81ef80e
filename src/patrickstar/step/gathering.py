"""Gathering and reducing over ranks: whole weights for whoever uses them, and each rank's share of everybody's gradients.

A group of chunks, those of a block or of what no block owns, is gathered where one of its parameters is used, into a copy that lives as long
as anything holds it (Note [Copies] in `memory/leases.py`). All ranks do so in the order of their calls: what is resident decides nothing.

Gradients of all ranks are added in rank order in fp32, ((g0 + g1) + g2) + ..., and multiplied by f(1/p): bits that depend on no topology.
Source: sharding of model states is ZeRO's (Rajbhandari et al., 2020); by chunks it is PatrickStar's (Fang et al., 2021).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from patrickstar.comm.collectives import Collectives
from patrickstar.core.norm_tree import shares_by_rank
from patrickstar.core.planes import WEIGHT, PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import BudgetError, RankError
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.shared_norm import SharedNorm
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.gathered import Gathered
from patrickstar.plan.fit import of_machine
from patrickstar.step.executor import Executor


@dataclass(eq=False)
class Gathering:
    """Makes whole weights of shards, and shards of gradients. Made before the binding, which is given afterwards.

    Attributes:
        collectives: of all ranks, which do the same ones in the same order.
        postpones: how many contexts say that gradients are not to be reduced. kept: those that wait for that, in fp32, by name.
        steps: of the optimizer, so far.
    """

    layout: ShardLayout
    executor: Executor
    collectives: Collectives
    postpones: int = 0
    steps: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    binding: Binding = field(init=False)

    def __post_init__(self) -> None:
        self.gathered = Gathered(self.layout, self._whole)
        self.shares_of = cache(partial(shares_by_rank, self.layout))

    def refused(self, refusal: BudgetError) -> BudgetError:
        """The refusal of a forward, with the budget that is enough on all ranks. None goes on with it: each has refused it, too, or fails."""
        enough = refusal.smallest_bytes
        with suppress(RankError):
            of_all = self.collectives.agree(b"%d" % enough, "on no forward: it does not fit")
            enough = max(map(int, of_all))
        return of_machine(refusal, enough, self.collectives.ranks.local_size)

    # weights

    def make(self, group: str) -> Tensor:
        """The weights of a group that has been gathered for a use."""
        return self.gathered.there[group]

    def _whole(self, group: str) -> Tensor:
        """The weights of a group whose shards are resident: in what somebody still holds of it, if anybody does."""
        first, leases = self.binding.access.parameters_in(group)[0], self.binding.leases
        with self.executor.lock, self.executor.quiet():
            whole = leases.living_copy(group)
            if whole is None:
                numel, dtype = self.layout.group_numel(group), first.shape_only.dtype
                whole = torch.empty(numel, dtype=dtype, device=self.binding.device)
            self._gather(group, whole)
            return whole

    def renew(self, group: str, copy: Tensor) -> None:
        """Writes the weights of a group into a copy of them."""
        with self.executor.lock, self.executor.apart():
            self._bring(group, writes=False, phase=Phase.STEP)
            self._gather(group, copy)
            self.binding.leases.copy_written(group, copy)

    def changed(self, group: str) -> None:
        """A copy has been written in place, on all ranks alike: each keeps its share."""
        copy = self.binding.access.lease(group)
        with self.executor.lock, self.executor.apart():
            self._bring(group, writes=True, phase=self.executor.change_phase())
            for ref, piece in self._pieces(group, copy):
                self.executor.store.tensor(ref).copy_(piece.view(self.layout.size, -1)[self.layout.rank])

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

    def stepped(self, hypers: Mapping[str, Hyper]) -> None:
        """Notes a step, which all ranks must have taken alike by the next collective: with the same learning rates, say."""
        self.steps += 1
        kinds = hashlib.sha256(str([len(hypers), *dict.fromkeys(hypers.values())]).encode()).hexdigest()[:8]
        self.collectives.past = f"after step {self.steps} by hyper-parameters {kinds}"

    # the norm

    def norm(self, names: Collection[str]) -> SharedNorm:
        """A norm of these gradients, in layout order, to which each rank adds its own parts."""
        shares = [self.shares_of(name) for name in names]
        # All ranks have the same sums of the same gradients, or an error.
        what = f"{len(names)} sums of squares, {hashlib.sha256(' '.join(names).encode()).hexdigest()[:16]}"

        def gather(mine: Tensor) -> Tensor:
            with self.executor.room.making(self.layout.size * mine.nbytes):
                of_all = mine.new_empty(self.layout.size, mine.numel())
            self.collectives.gather(of_all.view(-1), mine, what).wait()
            return of_all

        return SharedNorm(self.layout.rank, shares, gather, self.binding.device)

    def _bring(self, group: str, *, writes: bool, phase: Phase) -> None:
        label = self.binding.access.parameters_in(group)[0].name
        self.executor.moment(phase, label, [Touch(ref, writes) for ref in self.layout.weight_units(label)])

    def _pieces(self, group: str, whole: Tensor) -> Iterator[tuple[PlaneRef, Tensor]]:
        """The units of a group's weights, each with its chunk of the whole."""
        numel = self.layout.whole.chunk_numel
        for number, chunk in enumerate(self.layout.chunks_of[group]):
            yield PlaneRef(chunk, WEIGHT), whole[number * numel : (number + 1) * numel]

    def _gather(self, group: str, whole: Tensor) -> None:
        tensor_of, gather = self.executor.store.tensor, self.collectives.gather
        where = self.gathered.where
        under_way = [gather(piece, tensor_of(ref), f"{ref}{where}") for ref, piece in self._pieces(group, whole)]
        for ticket in under_way:
            ticket.wait()

    # gradients

    def kept_bytes(self) -> int:
        """Bytes of gradients that wait to be reduced."""
        return sum(gradient.nbytes for gradient in self.kept.values())

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """A context in which gradients stay this rank's own, in fp32, until a backward outside of it, or the step."""
        self.postpones += 1
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
            bound = self.binding.by_name[pieces[0].name]
            mine = torch.zeros(self.layout.whole.chunk_numel, dtype=bound.shape_only.dtype, device=self.binding.device)
            for name, start, stop, at in pieces:
                if name in gradients:
                    flat = self.binding.by_name[name].flat(gradients[name])
                    mine[start:stop].copy_(flat[at : at + stop - start])
            share = torch.empty(self.layout.chunk_numel, device=self.binding.device)
            self.collectives.reduce(share, mine, torch.empty_like(mine), f"c{chunk}").wait()
            yield chunk, share
