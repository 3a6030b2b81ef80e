"""Carries out actions on the state and on the bytes alike, so that neither can be ahead of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patrickstar.core.ledger import Ledger
from patrickstar.core.machine import Tier
from patrickstar.core.plane import PlaneRef
from patrickstar.errors import DeviceError
from patrickstar.memory.store import ChunkStore
from patrickstar.plan import residency
from patrickstar.plan.actions import Action, Copy, Drop, Wait
from patrickstar.plan.residency import Residency

__all__ = ["Mover"]


class Mover:
    """The one place where the plan's state and the store's bytes change.

    Attributes:
        log: the actions carried out since it was last cleared, where `keep_log` is set; otherwise empty.
    """

    def __init__(self, state: Residency, store: ChunkStore, ledger: Ledger) -> None:
        self.state = state
        self.store = store
        self.ledger = ledger
        self.keep_log = False
        self.log: list[Action] = []

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Does what the actions say, in order.

        A transfer that fails raises DeviceError and changes nothing: what was to be written back is still where it was, and what was to be
        fetched is still at home. Other transfers under way are waited for first.
        """
        for action in actions:
            try:
                self.store.carry_out(action)
            except DeviceError:
                if isinstance(action, Wait):
                    self._give_up(action)
                self._settle()
                raise
            residency.apply(self.state, action)
            if self.keep_log:
                self.log.append(action)

    def _give_up(self, action: Wait) -> None:
        """Undoes a transfer whose wait has failed."""
        ref, tier = action.ref, action.tier
        del self.state.in_flight[ref]
        if tier is self.state.compute:
            self.store.carry_out(Drop(ref, tier, self.state.slots[ref]))
            self.state.slots_used -= self.state.slots[ref]
        elif tier is not self.state.home[ref]:
            self.store.carry_out(Drop(ref, tier, self.state.slots[ref]))

    def _settle(self) -> None:
        for ref, (_, tier) in list(self.state.in_flight.items()):
            action = Wait(ref, tier)
            try:
                self.store.carry_out(action)
            except DeviceError:
                self._give_up(action)
            else:
                residency.apply(self.state, action)
        # Nothing stays staged: what is newer than the disk goes back to the compute tier, and is written when it next has to leave.
        for ref, newer in list(self.state.staged.items()):
            if newer and ref not in self.state.resident:
                self._carry_out(Copy(ref, Tier.HOST, self.state.compute, self.state.slots[ref]))
                self._carry_out(Wait(ref, self.state.compute))
            self._carry_out(Drop(ref, Tier.HOST, self.state.slots[ref]))
            if newer:
                residency.mark_written(self.state, ref)

    def _carry_out(self, action: Action) -> None:
        self.store.carry_out(action)
        residency.apply(self.state, action)

    def prepare(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Sets aside on the disk what `grow` will need. DeviceError, BudgetError: it has no room; nothing has changed then."""
        self.store.add_to_disk(
            {ref: slots[ref] * self.state.slot_bytes for ref, tier in homes.items() if tier is Tier.DISK}
        )

    def grow(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Units that have been prepared come in, or get another size: without contents, and at home there."""
        state = self.state
        for ref, tier in homes.items():
            if ref in state.home:
                self.store.leave_home(ref)
                if state.home[ref] is not state.compute:
                    self.ledger.remove(state.home[ref], state.unit_bytes(ref))
            if tier is not state.compute:
                self.ledger.add(tier, slots[ref] * state.slot_bytes)
            if tier is Tier.DISK:
                self.store.take_place(ref)
        state.grow(homes, slots)

    def wrote(self, ref: PlaneRef) -> None:
        """A resident unit has been written on the compute tier."""
        residency.mark_written(self.state, ref)

    def forget(self, ref: PlaneRef) -> None:
        """Nobody wants the unit's contents any more: its slots go when room is needed."""
        residency.mark_free(self.state, ref)

    def release(self, ref: PlaneRef) -> None:
        """Nobody wants the unit's contents any more: its slots are given back."""
        if ref in self.state.free and ref not in self.state.resident:
            return
        self.carry_out(residency.release(self.state, ref))
