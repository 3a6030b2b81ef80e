"""Changes of the ranks that share a session's chunks, in the processes that are there: parts for the new ranks, then all states piece by piece.

Note [Resizing]
    Between two steps no gradient is wanted, and nothing of a forward is alive. Each process builds parts for its place in the next generation beside
    those that it has: homes, plans, slots, none of which takes memory before something is written there. Where that does not fit on one of them, all
    let go of it, and the job stays as it was. Then each unit goes, plane by plane: what a rank has of it is one stretch of memory, and so is what it
    is to have, so one exchange with uneven pieces moves it from slot to slot. What a process had stays until all is there: until then the job can go
    on as before. Where both have no room beside each other on one of the processes, each unit is let go of when it has been moved, on all of them:
    what fails then has lost the step, and the job goes on from a checkpoint.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patrickstar.comm.all_ranks import AllRanks
from patrickstar.comm.collectives import Collectives, redistribute
from patrickstar.comm.job import ElasticJob, Generation
from patrickstar.core.machine import Tier
from patrickstar.core.planes import GRAD, WEIGHT, PlaneRef
from patrickstar.core.resharding import Member, Resharding
from patrickstar.core.trace import Phase, Touch
from patrickstar.errors import Error, StateError
from patrickstar.memory.allocator import release_free_memory
from patrickstar.session.buffers import Kind
from patrickstar.session.build import Ground, watch
from patrickstar.session.close import Closing
from patrickstar.session.parts import Parts

_log = logging.getLogger("patrickstar")


class Contents(NamedTuple):
    """Facts that the first rank tells all. `units`: that have contents. steps: counts of updates. told: what the owner of the parts has to tell."""

    members: tuple[Member, ...]
    units: tuple[PlaneRef, ...]
    steps: dict[str, int]
    told: Any


_NOTHING = Contents((), (), {}, None)


class Resized(NamedTuple):
    """A change that has been made.

    `moved_bytes`: that have gone from one process to another. least_bytes: that have to. told: by the first of the ranks that were there.
    """

    moved_bytes: int
    least_bytes: int
    told: Any


@dataclass(eq=False, kw_only=True)
class Resizing:
    """The parts that a session has now, of this generation of its job, and what makes others of them.

    Attributes:
        parts: None where this process is no rank. installed: is told of parts that have taken the place of others, with what closes them.
        buffers: those that were cast or moved. hooks: of the parts, which are removed with it.
    """

    ground: Ground
    job: ElasticJob
    parts: Parts | None
    installed: Callable[[Parts | None, Callable[..., Closing] | None], None]
    buffers: Mapping[str, Kind]
    hooks: ExitStack = field(default_factory=ExitStack)

    def change(self, generation: Generation, tell: Callable[[], Any]) -> Resized | None:
        """Has the ranks be those of the next generation. None where that cannot be: the job stays as it was, and one line of the log says why.

        No step is under way. `tell`: gives what the first rank has to tell those that join.
        """
        old, now, is_member = self.parts, self.job.now, self.job.member in generation.members
        grows = old is None or generation.size > now.size
        if grows and not self.job.meets(generation):
            self._stay(generation, StateError("a process has ended that was to join"), keeps=True)
            return None
        collectives = self._meet(generation) if is_member else None
        # Of those that are there before and after, all are in the larger of both.
        shared = old.collectives if old is not None and not grows else collectives
        assert shared is not None, "there is one rank, and it stays"
        new: Parts | None = None
        keeps = True

        def build() -> tuple[Contents | None, bool, str]:  # the last: what must be alike
            nonlocal new
            new = self.ground.parts(collectives) if is_member else None
            alike = f"torch {torch.__version__}, {self.ground.facts}"
            if old is None:
                return None, True, alike
            if new is not None:
                _expect_fit(old, new)
            told = Contents(tuple(now.members), _units(old), dict(old.steps), tell()) if self.job.rank == 0 else None
            return told, new is None or _fit_together(old, new), alike

        try:
            of_all = AllRanks(shared).tell(f"a resize to {generation.size} ranks", build)
            if len(facts := {alike for _, _, alike in of_all}) > 1:
                raise StateError(f"a process that joins has another program: {' and '.join(sorted(facts))}")
            contents, keeps = of_all[0][0], all(has_room for _, has_room, _ in of_all)
            assert contents is not None, "the first rank was there"
            moves = Resharding(contents.members, tuple(generation.members))
            moved_bytes, all_bytes = self._move(new, contents.units, moves, shared, keeps=keeps)
            moved_bytes = sum(shared.agree(moved_bytes, f"{generation.size} ranks are there"))
        except Error as error:
            if new is not None:
                new.executor.store.close()
            if collectives is not None:
                collectives.close(f"{collectives.me} stays as it was: {error}")
            self._stay(generation, error, keeps=keeps)
            return None
        self._install(new, contents)
        self.job.begins(generation)
        return Resized(moved_bytes, round(all_bytes * moves.least), contents.told)

    def _stay(self, generation: Generation, error: Error, *, keeps: bool) -> None:
        """Stays what it was, as all ranks do. Raises an error where that cannot be: of those that were there some are lost, or what they had."""
        old = self.parts
        if old is not None and not keeps:
            raise self.job.loss(
                f"{error}\nin the middle of a resize without room to go back", reason=str(error)
            ) from error
        if old is not None and old.collectives is not None and old.collectives.failure is not None:
            raise error
        if old is not None:
            self.job.stays(generation.number)
            _log.warning("the job stays at %d ranks: %s", self.job.now.size, str(error).partition("\n")[0])

    def recover(self, generation: Generation) -> None:
        """Has the ranks be those that are left, with parts without contents: whatever there was is of a step that is broken."""
        if self.parts is not None:
            self.parts.executor.pending = None
            self.parts.executor.store.land_all()
        collectives = self._meet(generation)
        self._install(None, _NOTHING)
        try:
            new = self.ground.parts(collectives)
        except BaseException as error:
            if collectives is not None:
                collectives.close(f"{collectives.me} has no room among {generation.size} ranks: {error}")
            raise
        self._install(new, _NOTHING)
        self.job.begins(generation)

    def _meet(self, generation: Generation) -> Collectives | None:
        """The collectives of a generation that this process is a rank of; None where it is the only one."""
        timeout_s = self.ground.setup.memory.options.collective_timeout
        return (
            Collectives(self.job.ranks(generation), timeout_s=timeout_s, kind=self.job.loss)
            if generation.size > 1
            else None
        )

    def _move(
        self,
        new: Parts | None,
        units: tuple[PlaneRef, ...],
        moves: Resharding,
        shared: Collectives,
        *,
        keeps: bool,
    ) -> tuple[int, int]:
        """Moves these units to the new parts; gives the bytes that this process has sent, and those of all units of all ranks.

        `keeps`: whether the old parts keep theirs.
        """
        old, me, whole = self.parts, self.job.member, self.ground.setup.layout.chunk_numel
        sent, received, moved_bytes, all_bytes = moves.sent(me, whole), moves.received(me, whole), 0, 0
        if old is not None and not keeps and old.binding.is_whole:
            old.binding.let_go()
        reserved = _reserve(old, new)
        for ref in units:
            given, out = _unit(old, ref, writes=False), _unit(new, ref, writes=True)
            given = given if given is not None else torch.empty(0, dtype=out.dtype)  # type: ignore[union-attr]  # it has one of both
            out = out if out is not None else torch.empty(0, dtype=given.dtype)
            redistribute(shared, out, given, received=received, sent=sent, what=f"{ref}").wait()
            moved_bytes += (sum(sent) - sent[shared.ranks.rank]) * given.element_size()
            all_bytes += whole * given.element_size()
            del given, out
            if old is not None and not keeps and (freed := _let_go(old, ref)) and new is not None:
                new.executor.pilot.stretch.reserve(-freed)
                reserved -= freed
        if new is not None:
            new.executor.pilot.stretch.reserve(-reserved)
        return moved_bytes, all_bytes

    def _install(self, new: Parts | None, contents: Contents) -> None:
        """Has the model be that of the new parts, and lets go of the old ones."""
        old, self.parts = self.parts, new
        self.hooks.close()
        if old is not None:
            old.binding.access.close()
            old.stretches.end()
            old.binding.release(lambda _: None)
        self.ground.lay_bare()
        if old is not None:
            old.executor.store.close()
            if old.collectives is not None:
                old.collectives.close()
        if new is None:
            self.installed(None, None)
            return
        self.hooks = watch(new)
        new.steps.update(contents.steps)
        if new.training.gathering is not None:
            new.training.gathering.steps = max(contents.steps.values(), default=0)
        new.binding.hold() if new.binding.is_whole else new.binding.let_go()
        self.installed(new, partial(Closing, new, self.hooks, self.ground.dtypes, self.buffers))


def collect() -> None:
    """Gives back the memory of parts that nobody has any more. They refer to their hooks, and these to them: Python would find that out later."""
    gc.collect()
    release_free_memory()


def _units(parts: Parts) -> tuple[PlaneRef, ...]:
    """The units that have contents, chunk by chunk: one process has the weight of a tensor of several chunks as one."""
    state, slots = parts.executor.store.state, parts.layout.slots
    full = [ref for ref in state.home if ref.plane != GRAD and not state.is_free(ref)]
    return tuple(sorted(ref._replace(chunk=ref.chunk + n) for ref in full for n in range(slots(ref))))


def _unit(parts: Parts | None, ref: PlaneRef, *, writes: bool) -> Tensor | None:
    """A chunk of a unit, until the next is asked for; None where this process has none."""
    if parts is None:
        return None
    with parts.executor.apart():
        run, numel = parts.layout.run_of(ref.chunk), parts.layout.chunk_numel
        head = run.head if ref.plane == WEIGHT else ref.chunk
        (unit,) = parts.executor.use(Phase.STEP, run.tensors[0], (Touch(ref._replace(chunk=head), writes),))
        return unit[(ref.chunk - head) * numel :][:numel]


def _let_go(parts: Parts, ref: PlaneRef) -> int:
    """Lets go of a unit, all chunks of which have been moved with this one; gives the bytes that it has rested in where the step computes."""
    run, state = parts.layout.run_of(ref.chunk), parts.executor.store.state
    if ref.plane == WEIGHT:
        if ref.chunk != run.head + run.length - 1:
            return 0
        ref = ref._replace(chunk=run.head)
    parts.executor.release(ref)
    return state.unit_bytes(ref) if state.home[ref] is state.compute else 0


def _at_home(parts: Parts, tier: Tier) -> int:
    """Bytes of all states that rest on a tier, and of one unit more, which is in use."""
    state = parts.executor.store.state
    bytes_of = {ref: state.unit_bytes(ref) for ref in state.home if ref.plane != GRAD}
    return sum(nbytes for ref, nbytes in bytes_of.items() if state.home[ref] is tier) + max(bytes_of.values())


def _fit_together(old: Parts, new: Parts) -> bool:
    """Tells whether the states of both have room beside each other."""
    budget, compute = new.stretches.budgets.machine.budget, new.executor.store.state.compute
    return all(_at_home(old, tier) + _at_home(new, tier) <= budget[tier] for tier in {compute, Tier.HOST})


def _reserve(old: Parts | None, new: Parts | None) -> int:
    """Has old parts use no more than what rests with them, and new ones leave them that; gives how much."""
    if old is None or new is None:
        return 0
    state = old.executor.store.state
    held = _at_home(old, state.compute)
    old.executor.pilot.stretch.reserve(max(0, old.stretches.budgets.machine.budget[state.compute] - held))
    new.executor.pilot.stretch.reserve(held)
    return held


def _expect_fit(old: Parts, new: Parts) -> None:
    """Raises BudgetError where the last forward of the old parts has no room in the new ones, which have a forecast of it otherwise."""
    inputs = old.stretches.known.inputs
    if inputs is not None:
        with torch.enable_grad():
            new.stretches.known.expect(new.events.registered, *inputs)
