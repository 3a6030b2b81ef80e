"""The chunk store: where every unit is, and its bytes. State and bytes change in one place, and only as actions say.

    Issue    slots are taken where something is copied to or created; a lane does the work, perhaps over several moments
    Wait     its ticket's wait: from now on the bytes are there, or will be when the device has got so far
    Drop     the slots are given back, poisoned where asked for, with a fence until that is over

What a work comes after is the matter of `works_under_way.py`, and where the bytes lie that of `unit_bytes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.profiler import record_function

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.errors import DeviceError, StateError
from patrickstar.memory.device_failure import DeviceFailureError
from patrickstar.memory.interruptions import InterruptionsPutOff
from patrickstar.memory.lanes import Task
from patrickstar.memory.leases import Leases
from patrickstar.memory.unit_bytes import UnitBytes
from patrickstar.memory.works_under_way import WorksUnderWay
from patrickstar.plan import residency
from patrickstar.plan.actions import Action, Drop, Issue, Wait, WorkKind
from patrickstar.plan.residency import InvariantError
from patrickstar.torch_private import Plain, is_profiled

UpdateWork = Callable[[int, Tier], Task]  # makes the work of a chunk's update on a tier


class ChunkStore:
    """The state of every unit and its bytes, and who holds them.

    Args:
        units: where their bytes lie. works: those under way.

    Attributes:
        state: where every unit is, to be read by everybody.
        ledger: is told of every slot taken and given back, and of every byte that crosses a link.
        passing: units that a stretch has taken in, and takes out when it is over.
        leases: on slots of the compute tier, and on what is held in the stead of one.
        hold_beside: notes how many bytes of non-model data are on the compute tier now.
    """

    def __init__(self, units: UnitBytes, works: WorksUnderWay) -> None:
        self.state = units.state
        self.units = units
        self.works = works
        self._compute = units.state.compute
        self._process = os.getpid()

        self.passing: set[PlaneRef] = set()
        self.leases = Leases(self.tensor, units.part)
        self.ledger = units.ledger
        self.hold_beside = partial(units.ledger.nonmodel, self._compute)
        self._wrap: dict[PlaneRef, Callable[[], Tensor]] = {}

    # what is there

    def tensor(self, ref: PlaneRef, tier: Tier | None = None) -> Tensor:
        """A 1-D tensor over a fresh storage of a unit's slots, on the compute tier or on one below. The slots may move unless a lease is taken.

        Raises:
            InvariantError: the bytes are not there, or still on their way. StateError: the store is closed, or of another process.
        """
        if ref in self.state.under_way and (updates := self.state.updates_of(ref)):
            raise InvariantError(10, f"{ref} is used while {updates[0]} is under way")
        if tier is not None and tier is not self._compute:
            return self._wrapping(ref, tier)()
        wrap = self._wrap.get(ref)
        if wrap is None or os.getpid() != self._process:
            wrap = self._wrap[ref] = self._wrapping(ref, self._compute)
        return wrap()

    def operand(self, ref: PlaneRef, tier: Tier) -> Tensor:
        """A tensor as `tensor` gives it, for the work of an update that is about to be issued: its bytes may still change until that begins."""
        self.works.wait_for_zeros(ref, tier)
        return self.units.wrapping(ref, tier)()

    def _wrapping(self, ref: PlaneRef, tier: Tier) -> Callable[[], Tensor]:
        if self.state.is_arriving(ref, tier):
            raise InvariantError(1, f"{ref} is used on the {tier.label}, still on its way")
        if tier is not self._compute:
            self.works.wait_on_host(ref, tier)
        self.works.wait_for_zeros(ref, tier)
        return self.units.wrapping(ref, tier)

    # what changes

    def carry_out(self, actions: Sequence[Action], *, during: str = "", update_work: UpdateWork | None = None) -> None:
        """Does what the actions say, in order: on the state and on the bytes alike, so that neither can be ahead of the other.

        A transfer that fails raises DeviceError, perhaps moments later, and changes nothing: what was to be written back is still where it was,
        and what was to be fetched is still at home. Other transfers under way are waited for first. A profile shows each action by its text.

        Args:
            during: the moment, for a message. update_work: makes the work of a chunk's update on a tier.
        Raises:
            StateError: the store is of another process, whose transfers nobody here can wait for.
        """
        if os.getpid() != self._process:
            self.units.arenas[self._compute].space.expect_open()
        # `isinstance`, without a function of Python's.
        for waits, group in groupby(actions, key=Wait.__instancecheck__):
            # Nobody waits in between: what is moved, and what is noted of it, belong together.
            with Plain() if waits else InterruptionsPutOff():
                for action in group:
                    self._do(action, during, update_work)

    def _do(self, action: Action, during: str, update_work: UpdateWork | None) -> None:
        try:
            with record_function(str(action)) if is_profiled() else Plain():
                match action:
                    case Issue():
                        self._issue(action, during, update_work)
                    case Wait():
                        for issue in (over := residency.ended_by(self.state, action)):
                            self._wait(issue)
                        self._note(over)
                    case Drop(ref, tier, slots):
                        residency.apply(self.state, action)
                        self._give(ref, tier, slots)
        except BaseException as error:
            self.land_all()  # also after an interruption by the user, of which the next may come while this one is settled
            if isinstance(error, torch.AcceleratorError | DeviceFailureError):
                raise DeviceFailureError(error, f"{action}, in op {during}" if during else str(action)) from error
            raise

    def _issue(self, issue: Issue, during: str, update_work: UpdateWork | None) -> None:
        """Has a work begin. What is copied or created takes slots first, where it has none: at home it may have rested before."""
        (kind, ref, tier), src, units = issue.work, issue.src, self.units
        is_update, committed_slots = kind is WorkKind.UPDATE, units.committed_slots
        takes = not is_update and tier is not Tier.DISK and not units.has_slots(ref, tier)
        if takes:
            units.take(ref, tier, issue.slots)
        if is_update:
            assert update_work is not None, "nobody knows of updates"
            task = update_work(ref.chunk, tier)
            residency.apply(self.state, issue)
        else:
            task = units.moving(issue)
        fresh_slots = units.committed_slots - committed_slots if src is not None and tier is self._compute else 0
        try:
            self.works.begin(issue, task, during=during, fresh_slots=fresh_slots, takes=takes)
        except BaseException:
            if takes:  # it has not been issued: the state knows nothing of it, and neither may the slots
                self._give(ref, tier, issue.slots)
            raise
        if src is not None:
            self.ledger.move(src, tier, issue.slots * self.state.slot_bytes)
        if not is_update:
            residency.apply(self.state, issue)

    def _note(self, over: Sequence[Issue]) -> None:
        with InterruptionsPutOff():
            residency.finish(self.state, over)
            for issue in over:
                self.works.over(issue)

    def _wait(self, issue: Issue) -> None:
        try:
            self.works.ticket(issue).wait_until_settled()
        except (StateError, torch.AcceleratorError):  # of the lane or the device, not of this work
            raise
        except Exception as error:
            if issue.src is None:
                raise
            (_, ref, tier), during = issue.work, self.works.during(issue)
            this = f"{ref} on its way from the {issue.src.label} to the {tier.label}, issued at {during}"
            if isinstance(error, DeviceFailureError):
                raise DeviceFailureError(error, this) from error
            raise DeviceError(f"{error}\n  this was {this}") from error

    def land(self, ref: PlaneRef) -> None:
        """Waits for the works under way that use a unit."""
        while users := self.state.used_by(ref):
            self.carry_out([Wait(users[0].work)])

    def land_all(self) -> None:
        """Waits for all works under way; those that fail are given up."""
        while self.state.under_way:
            wait = Wait(next(iter(self.state.under_way.values()))[0].work)
            for issue in residency.ended_by(self.state, wait):
                self._land(issue)

    def _land(self, issue: Issue) -> None:
        """Waits for a work. A transfer that has failed is undone; of an update that has, whoever has given the work knows."""
        try:
            self.works.ticket(issue).wait()
        except Exception:  # whatever a lane has raised: the work has not been done
            if issue.src is not None:
                _, ref, tier = issue.work
                with InterruptionsPutOff():
                    residency.give_up(self.state, ref)
                    if self.state.has_slots_to_take(ref, tier):
                        self._give(ref, tier, issue.slots)
                    self.works.over(issue)
                return
            residency.want_again(self.state, issue)
        self._note([issue])

    def wrote(self, ref: PlaneRef, tier: Tier | None = None) -> None:
        """Notes that a unit has been written, on the compute tier or on one below."""
        # Where no other copy of it becomes stale, nothing changes.
        with Plain() if len(self.state.newest.get(ref, ())) == 1 else InterruptionsPutOff():
            residency.mark_written(self.state, ref, tier)

    def forget(self, ref: PlaneRef) -> None:
        """Drops a unit's contents, which nobody wants any more but an update under way; its slots go when room is needed."""
        if not self.state.updates_of(ref):
            self.land(ref)
        with InterruptionsPutOff():
            residency.mark_free(self.state, ref)

    def release(self, ref: PlaneRef) -> None:
        """Drops a unit's contents, which nobody wants any more, and gives its slots back."""
        if self.state.is_free(ref) and not any(ref in refs for refs in self.state.taken.values()):
            return
        self.land(ref)
        with InterruptionsPutOff():
            self.carry_out(residency.release(self.state, ref))

    # units that come later

    def grow(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Takes in units that have been prepared (`UnitBytes.prepare`), or gives units another size: without contents, at home on these tiers."""
        state = self.state
        with InterruptionsPutOff():
            for ref, tier in homes.items():
                if ref in state.home:
                    self._leave_home(ref)
                self.units.rest(ref, tier, slots[ref])
            state.grow(homes, slots)

    def shrink(self, refs: Collection[PlaneRef]) -> None:
        """Takes units out that are at home in memory, and without contents."""
        for ref in refs:
            self.release(ref)
            self._leave_home(ref)
        self.state.shrink(refs)

    def _leave_home(self, ref: PlaneRef) -> None:
        """Gives the slots back in which a unit without contents rests on a memory tier."""
        home = self.state.home[ref]
        if home is not Tier.DISK and self.units.has_slots(ref, home):
            self._give(ref, home, self.state.slots[ref])
        if home is not self._compute:
            self.ledger.remove(home, self.state.unit_bytes(ref))

    def _give(self, ref: PlaneRef, tier: Tier, slots: int) -> None:
        if tier is self._compute:
            self._wrap.pop(ref, None)
        self.works.give_slots(ref, tier, slots)

    def close(self) -> None:
        """Gives everything back, when nothing is under way any more. Whatever still refers to a slot keeps the slot's memory."""
        self.works.close()
        self._wrap.clear()
        self.units.close(self.leases.storages())
