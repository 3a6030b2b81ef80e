"""A session's exchange with the other ranks, whose shards lie in its chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import groupby

import torch
from torch import Tensor

from patrickstar.comm.collectives import Collectives
from patrickstar.comm.transport import staging_bytes
from patrickstar.core.layout import Part
from patrickstar.core.norm_tree import shares_by_rank
from patrickstar.core.planes import REST, PlaneRef
from patrickstar.core.shard_layout import ShardLayout
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import BudgetError, RankError
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import SharedNorm
from patrickstar.parameters.exchange import Exchange, Travel
from patrickstar.plan.fit import of_machine
from patrickstar.plan.touches import master_touches
from patrickstar.step.executor import Executor
from patrickstar.step.weight_masters import Masters


class Gathering(Exchange):
    """Exchanges what lies in chunks. Made before the binding, which is given afterwards.

    Attributes:
        collectives: of all ranks, which do the same ones in the same order. masters: of weights.
        steps: of the optimizer, so far.
    """

    def __init__(
        self,
        layout: ShardLayout,
        names: Iterable[str],
        *,
        executor: Executor,
        collectives: Collectives,
        masters: Masters,
        travel: Travel,
    ) -> None:
        super().__init__(layout, names, collectives, travel, executor.moment)
        self.executor = executor
        self.collectives = collectives
        self.masters = masters
        self.steps = 0
        self.shares_of = cache(partial(shares_by_rank, layout))

    def refused(self, refusal: BudgetError) -> BudgetError:
        """The refusal of a forward, or a norm, with the budget that is enough on all ranks. None goes on: each has refused it, too, or fails."""
        enough = refusal.smallest_bytes
        with suppress(RankError):
            enough = max(self.collectives.agree(enough, "on nothing: it does not fit"))
        staging = staging_bytes(self.binding.device)
        return of_machine(refusal, enough, self.collectives.ranks.local_size, staging_bytes=staging)

    @contextmanager
    def ours(self, nbytes: int = 0) -> Iterator[None]:
        """A context for our own operations, and for so many bytes that they take for good."""
        with self.executor.lock, self.executor.quiet(), self.executor.room.making(nbytes):
            yield

    def renew(self, group: str, copy: Tensor) -> None:
        """Writes the weights of a group into a copy of them."""
        with self.executor.lock, self.executor.apart():
            self._bring(group, writes=False, phase=Phase.STEP)
            self.begin_to_gather(group, copy).wait()
            self.binding.leases.copy_written(group, copy)

    def changed(self, group: str) -> None:
        """A copy has been written in place, on all ranks alike: each keeps its share. Where it is of another type, it shows what is kept."""
        copy, first = self.binding.access.lease(group), self.binding.access.parameters_in(group)[0]
        with self.executor.lock, self.executor.apart():
            phase = self.executor.change_phase()
            if not first.is_copied:
                self._bring(group, writes=True, phase=phase)
                for unit, piece in self.pieces(group, copy):
                    self.binding.leases.take(unit).copy_(self.mine(piece))
                return
            for unit, piece in self.pieces(group, copy):
                part = Part(unit.chunk, 0, self.layout.chunk_numel, 0)
                is_split = PlaneRef(unit.chunk, REST) in self.executor.store.state.home
                touches = master_touches(part, self.layout, is_split=is_split, writes=True)
                self.executor.moment(phase, first.name, touches)
                self.masters.take_changes(self.mine(piece), part, is_split=is_split)
            self._bring(group, writes=False, phase=phase)
            self.begin_to_gather(group, copy).wait()

    def assemble(self, name: str, mine: Iterable[Tensor], flat: Tensor) -> None:
        """Writes what ranks have of a parameter, in a plane, into a 1-D fp32 tensor in slot order. `mine`: this rank's pieces, in order."""
        own = torch.cat([piece.clone() for piece in mine] or [torch.empty(0)])
        for chunk, cut in groupby(self.layout.cut(name), lambda one: one[1].chunk):
            places = {rank: slice(at, at + stop - start) for rank, (_, start, stop, at) in cut}
            share = torch.zeros(max(place.stop - place.start for place in places.values()))
            if (place := places.get(self.layout.rank)) is not None:
                share[: place.stop - place.start], own = own.tensor_split([place.stop - place.start])
            of_all = torch.empty(self.layout.size, len(share))
            self.collectives.gather(of_all.view(-1), share, f"c{chunk} of {name}").wait()
            for rank, place in places.items():
                flat[place] = of_all[rank, : place.stop - place.start]

    def stepped(self, hypers: Mapping[str, Hyper]) -> None:
        """Notes a step, which all ranks must have taken alike by the next collective: with the same learning rates, say."""
        self.steps += 1
        kinds = hashlib.sha256(str([len(hypers), *dict.fromkeys(hypers.values())]).encode()).hexdigest()[:8]
        self.collectives.past = f"after step {self.steps} by hyper-parameters {kinds}"

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

        return SharedNorm(self.layout.rank, shares, gather, self.binding.device, largest=self.layout.largest_numel)

    def _bring(self, group: str, *, writes: bool, phase: Phase) -> None:
        label = self.binding.access.parameters_in(group)[0].name
        self.executor.moment(phase, label, [Touch(unit, writes) for unit in self.layout.weight_units(label)])
