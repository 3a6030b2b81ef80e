"""Residency of units on the compute tier, and the one rule by which that changes. No bytes are moved here.

            Create                    written
    FREE ────────────> DIRTY <─────────────────────── CLEAN
     ^                   │  Copy home, Wait             ^ │
     │ mark_free, Drop   └──────────────────────────────┘ │ Drop
     └─────────────── any                 Copy, Wait      v
                                    CLEAN <──────────── AWAY

| the unit is | compute tier | home below | changed by                                                            |
|-------------|--------------|------------|-----------------------------------------------------------------------|
| FREE        | no slots     | no bytes   | `Create`: zeros, DIRTY; at home, where rows are added there: AWAY     |
| AWAY        | no slots     | valid      | `Copy` to the compute tier takes slots; after its `Wait`: CLEAN       |
| CLEAN       | valid        | same bytes | `Drop`: AWAY; `mark_written`: DIRTY                                   |
| DIRTY       | valid        | stale      | `Copy` home and its `Wait`: CLEAN                                     |
| HERE        | valid        | (is here)  | only `mark_free`; a unit whose home is the compute tier is not evicted |
| VOID        | slots, no contents | no bytes | `mark_free` leaves this; `Drop`: FREE                             |

`make_room` of `plan/room.py` decides and changes nothing; `apply` is the only transition; `mark_written` and `mark_free`
tell the state what a moment did. A unit whose home is the disk, where a device computes, is staged on the host, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.plan.actions import Action, Copy, Create, Drop, Wait
from patrickstar.plan.plan import CopyState, Snapshot

HERE, CLEAN, DIRTY = CopyState.HERE, CopyState.CLEAN, CopyState.DIRTY


class InvariantError(AssertionError):
    """An action that would break a numbered invariant of `plan/check.py`: a mistake of ours, not of the user."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)  # both, so that it pickles
        self.number = number

    def __str__(self) -> str:
        return "({}) {}".format(*self.args)


@dataclass(slots=True)
class Residency:
    """The place of every unit now.

    Attributes:
        compute, slot_bytes: never change. home, slots: change only by `grow`, for all copies.
        resident: units whose copy on the compute tier takes slots and has arrived.
        free: units without contents; void: those of them whose slots are yet to be given back.
        in_flight: transfers issued and not waited for, at most one of a unit: where from, and where to.
        staged: host copies of units on their way between device and disk; True while newer than the disk's.
        slots_used: slots of the compute tier in use, those of copies still arriving included.
    """

    compute: Tier
    slot_bytes: int
    home: dict[PlaneRef, Tier]
    slots: dict[PlaneRef, int]

    resident: dict[PlaneRef, CopyState] = field(default_factory=dict)
    free: set[PlaneRef] = field(default_factory=set)
    void: set[PlaneRef] = field(default_factory=set)
    in_flight: dict[PlaneRef, tuple[Tier, Tier]] = field(default_factory=dict)
    staged: dict[PlaneRef, bool] = field(default_factory=dict)
    slots_used: int = 0

    @classmethod
    def at_rest(
        cls,
        layout: Layout,
        *,
        compute: Tier,
        home: Mapping[PlaneRef, Tier],
        formats: Formats,
        free: Collection[PlaneRef] = (),
    ) -> Residency:
        """The state in which every unit lies at home and nowhere else; units in `free` have no contents yet."""
        slot_bytes = bytes_of_slot(layout, formats)
        slots = {ref: slots_of(ref, layout, formats) for ref in home}
        state = cls(compute, slot_bytes, dict(home), slots, free=set(free))
        state.resident = {ref: HERE for ref, tier in home.items() if tier is compute and ref not in state.free}
        state.slots_used = sum(slots[ref] for ref in state.resident)
        return state

    @classmethod
    def of(cls, snapshot: Snapshot) -> Residency:
        """A working copy of a snapshot."""
        return cls(
            compute=snapshot.compute,
            slot_bytes=snapshot.slot_bytes,
            home=dict(snapshot.home),
            slots=dict(snapshot.slots),
            resident=dict(snapshot.resident),
            free=set(snapshot.free),
            void={ref for ref in snapshot.free if ref in snapshot.resident},
            slots_used=snapshot.slots_used,
        )

    def copy(self) -> Residency:
        """A state that changes apart from this one."""
        return replace(
            self,
            resident=dict(self.resident),
            free=set(self.free),
            void=set(self.void),
            in_flight=dict(self.in_flight),
            staged=dict(self.staged),
        )

    def snapshot(self) -> Snapshot:
        """A frozen copy of the state. Only between moments: nothing may be in flight or staged."""
        self.expect_settled()
        return Snapshot(self.compute, self.slot_bytes, self.home, self.slots, self.resident, frozenset(self.free))

    def grow(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Adds units, or gives them another size: without contents, and at home on the given tiers."""
        self.home.update(homes)
        self.slots.update((ref, slots[ref]) for ref in homes)
        self.free.update(homes)

    def expect_settled(self) -> None:
        """Raises InvariantError while a transfer is in flight or a unit is staged."""
        if self.in_flight:
            ref = min(self.in_flight)
            raise InvariantError(5, f"{ref} is still on its way to the {self.in_flight[ref][1].label}")
        if self.staged:
            raise InvariantError(9, f"{min(self.staged)} is still staged on the host")

    def stages(self, ref: PlaneRef) -> bool:
        """Tells whether the unit reaches the compute tier only through the host."""
        return self.compute is Tier.DEVICE and self.home[ref] is Tier.DISK

    def unit_bytes(self, ref: PlaneRef) -> int:
        """Bytes of a unit on any tier."""
        return self.slots[ref] * self.slot_bytes


def bytes_of_slot(layout: Layout, formats: Formats) -> int:
    """Bytes of one slot: a chunk of the narrowest plane."""
    return layout.chunk_numel * formats.narrowest


def slots_of(ref: PlaneRef, layout: Layout, formats: Formats) -> int:
    """Slots a unit takes: those of its chunks, times how much wider its plane is than the narrowest."""
    return layout.slots(ref) * (formats.of(ref, layout).itemsize // formats.narrowest)


def mark_written(state: Residency, ref: PlaneRef) -> None:
    """Marks a unit as written by a moment: from now on the unit's home is stale.

    Raises:
        InvariantError: it is not resident (1), or a transfer still reads it (5).
    """
    copy = state.resident.get(ref)
    if copy is None or ref in state.void:
        raise InvariantError(1, f"{ref} is written but is not resident")
    if ref in state.staged or ref in state.in_flight:
        raise InvariantError(5, f"{ref} is written while a transfer reads it")
    if copy is CLEAN:
        state.resident[ref] = DIRTY


def mark_free(state: Residency, ref: PlaneRef) -> None:
    """Marks a unit as without contents that anybody wants; slots that the unit has are void until they are dropped.

    Raises:
        InvariantError: a transfer of it is in flight (5).
    """
    if ref in state.staged or ref in state.in_flight:
        raise InvariantError(5, f"{ref} is freed while it is on its way")
    state.free.add(ref)
    if ref in state.resident:
        state.void.add(ref)
        if state.resident[ref] is CLEAN:
            state.resident[ref] = DIRTY


def release(state: Residency, ref: PlaneRef) -> list[Action]:
    """Marks a unit free, and gives the actions that give its slots back at once, to be applied."""
    mark_free(state, ref)
    return [Drop(ref, state.compute, state.slots[ref])] if ref in state.void else []


def apply(state: Residency, action: Action) -> None:
    """Carry one action out on the state: the only transition there is.

    Raises:
        InvariantError: the action is not legal now; it names the invariant of `plan/check.py` that would be broken,
            and the state is unchanged.
    """
    if action.ref not in state.home:
        _refuse(9, action, "there is no such unit")
    if isinstance(action, Wait):
        _wait(state, action)
        return
    if action.slots != state.slots[action.ref]:
        _refuse(7, action, f"the unit takes {state.slots[action.ref]} slots")
    if isinstance(action, Copy):
        _copy(state, action)
    elif isinstance(action, Drop):
        _drop(state, action)
    else:
        _create(state, action)


def _copy(state: Residency, action: Copy) -> None:
    ref, src, dst = action.ref, action.src, action.dst
    home, compute = state.home[ref], state.compute
    if ref in state.in_flight:
        _refuse(5, action, "an earlier transfer of it has not been waited for")
    if not _is_leg(src, dst, compute, home):
        _refuse(9, action, f"it rests on the {home.label}, and this is not its way there or back")
    if dst is compute and ref in state.resident:
        _refuse(5, action, "it has slots there already")
    if dst is not compute and dst is not home and ref in state.staged:
        _refuse(5, action, "it is staged there already")
    if not _valid_on(state, ref, src):
        _refuse(4, action, f"the {src.label} does not hold its last contents")
    state.in_flight[ref] = src, dst
    if dst is compute:
        state.slots_used += action.slots


def _is_leg(src: Tier, dst: Tier, compute: Tier, home: Tier) -> bool:
    """Tells whether a copy from `src` to `dst` is on the way between the compute tier and a home below it."""
    if compute is Tier.DEVICE and home is Tier.DISK:
        return (src is Tier.HOST) != (dst is Tier.HOST)  # these two meet only through the host
    return home is not compute and ((src is compute and dst is home) or (src is home and dst is compute))


def _valid_on(state: Residency, ref: PlaneRef, tier: Tier) -> bool:
    """Tells whether a tier holds the unit's last contents, arrived."""
    if ref in state.free:
        return False
    if tier is state.compute:
        return ref in state.resident
    newer_here = state.resident.get(ref) is DIRTY
    if tier is state.home[ref]:
        return not newer_here and not state.staged.get(ref, False)
    return ref in state.staged and (state.staged[ref] or not newer_here)


def _wait(state: Residency, action: Wait) -> None:
    ref, tier = action.ref, action.tier
    src, dst = state.in_flight.get(ref, (None, None))
    if dst is not tier:
        _refuse(5, action, "no such transfer has been issued")
    del state.in_flight[ref]
    if tier is state.compute:
        state.resident[ref] = CLEAN
    elif tier is not state.home[ref]:
        state.staged[ref] = src is state.compute and state.resident[ref] is DIRTY
    else:
        if ref in state.resident:
            state.resident[ref] = CLEAN
        if ref in state.staged:
            state.staged[ref] = False


def _drop(state: Residency, action: Drop) -> None:
    ref, tier = action.ref, action.tier
    if tier in state.in_flight.get(ref, ()):
        _refuse(5, action, "a transfer still uses these slots")
    if tier is state.compute:
        copy = state.resident.get(ref)
        if copy is None:
            _refuse(2, action, "it has no slots there")
        if ref not in state.void and (copy is HERE or (copy is DIRTY and not state.staged.get(ref, False))):
            _refuse(4, action, "it is the last valid copy")
        del state.resident[ref]
        state.void.discard(ref)
        state.slots_used -= action.slots
    elif tier is Tier.HOST and ref in state.staged:
        if state.staged[ref] and ref not in state.resident:
            _refuse(4, action, "it is the last valid copy")
        del state.staged[ref]
    else:
        _refuse(4 if tier is state.home[ref] else 2, action, "it has no copy there that may go")


def _create(state: Residency, action: Create) -> None:
    ref = action.ref
    if ref not in state.free:
        _refuse(4, action, "it has contents")
    if ref in state.resident:
        _refuse(5, action, "it has slots already")
    if action.tier is not state.compute and not (action.tier is Tier.HOST is state.home[ref]):
        _refuse(9, action, f"first contents are made on the {state.compute.label}, or at home")
    state.free.discard(ref)
    if action.tier is state.compute:
        state.resident[ref] = HERE if state.home[ref] is state.compute else DIRTY
        state.slots_used += action.slots


def _refuse(number: int, action: Action, why: str) -> NoReturn:
    raise InvariantError(number, f"{action}: {why}")
