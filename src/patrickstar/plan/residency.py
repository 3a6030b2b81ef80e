"""Residency of units: which tiers hold the last contents of each, where it takes slots, and how that changes. No bytes are moved here.

Every tier may have a copy of a unit. A copy *is newest* where it holds the last contents; a unit whose copies none of that are is *free*: it has
no contents. A unit's home is where it always has room. On the tier that computes, unless that is its home, and on the host where that lies
between, a copy takes slots as long as it is there.

| what                          | allowed where                                            | after it                                        |
|-------------------------------|----------------------------------------------------------|-------------------------------------------------|
| `Create` on a tier            | the unit is free and has no slots                        | newest there alone                              |
| `Copy` to a neighbour, `Wait` | newest at the source, no other transfer of it in flight  | newest at both, until the wait at the source    |
| `Drop` from a tier            | it has slots there, and is not newest there alone        | no copy there                                   |
| `mark_written` on a tier      | newest there, nothing in flight                          | newest there alone: other slots of it are stale |
| `mark_free`                   | nothing in flight, or in an update                       | free: its slots are stale; after the update     |
| `Update`, `UpdateWait`        | what it needs is newest on its tier, its gradient at     | until its wait: no slots that it uses go        |
|                               | least on its way there                                   |                                                 |

Slots that are stale hold nothing that anybody wants: they are given back as soon as room is made. `make_room` of `plan/room.py` decides and changes
nothing; `apply` is the only transition; `mark_written` and `mark_free` tell the state what a moment did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NoReturn

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT, PlaneRef
from patrickstar.core.trace import Moment
from patrickstar.plan.actions import Action, Copy, Create, Drop, Move, Update, UpdateWait, Wait
from patrickstar.plan.snapshot import Snapshot

_DEPTH: Final = MappingProxyType({Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2})
_ALONE: Final = MappingProxyType({tier: frozenset((tier,)) for tier in Tier})


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
        compute, slot_bytes: never change. home, slots: change only by `grow` and `shrink`, for all copies.
        newest: the tiers that hold a unit's last contents, arrived; a unit that is not there is free.
        taken: by tier, the units that have slots there, those of copies still arriving included: of the tier that computes, and of those
            between it and a unit's home.
        stale: by tier, those of `taken` that hold nothing that anybody wants.
        in_flight: transfers issued and not waited for, at most one of a unit: where from, and where to.
        slots_used: by tier, the slots of `taken`; slots_resting: by tier below the one that computes, those of the units whose home it is.
        updating: by chunk, the tier of its update that has begun and has not been waited for; in_update: by unit, the chunks of such updates,
            of which the weight of a run may have several on one tier; unwanted: those of them that are free once it is over.
    """

    compute: Tier
    slot_bytes: int
    home: dict[PlaneRef, Tier]
    slots: dict[PlaneRef, int]

    newest: dict[PlaneRef, frozenset[Tier]]
    taken: dict[Tier, set[PlaneRef]]
    stale: dict[Tier, set[PlaneRef]]
    in_flight: dict[PlaneRef, tuple[Tier, Tier]] = field(default_factory=dict)
    slots_used: dict[Tier, int] = field(default_factory=dict)
    slots_resting: dict[Tier, int] = field(default_factory=dict)
    updating: dict[int, Tier] = field(default_factory=dict)
    in_update: dict[PlaneRef, set[int]] = field(default_factory=dict)
    unwanted: set[PlaneRef] = field(default_factory=set)
    _heads: list[int] | None = field(default=None, compare=False, repr=False)

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
        slots = {ref: slots_of(ref, layout, formats) for ref in home}
        newest = {ref: _ALONE[tier] for ref, tier in home.items() if ref not in free}
        here = {ref for ref, tier in home.items() if tier is compute and ref in newest}
        return cls.of(Snapshot(compute, bytes_of_slot(layout, formats), home, slots, newest, {compute: here}))

    @classmethod
    def of(cls, snapshot: Snapshot) -> Residency:
        """A working copy of a snapshot."""
        slots, flights, newest = dict(snapshot.slots), dict(snapshot.in_flight), dict(snapshot.newest)
        taken = {tier: set(refs) for tier, refs in snapshot.taken.items()}
        resting = dict.fromkeys(Tier, 0)
        for ref, tier in snapshot.home.items():
            resting[tier] += slots[ref]
        return cls(
            compute=snapshot.compute,
            slot_bytes=snapshot.slot_bytes,
            home=dict(snapshot.home),
            slots=slots,
            newest=newest,
            taken=taken,
            stale={
                tier: {
                    ref
                    for ref in refs
                    if tier not in newest.get(ref, ()) and flights.get(ref, (tier, None))[1] is not tier
                }
                for tier, refs in taken.items()
            },
            in_flight=flights,
            slots_used={tier: sum(slots[ref] for ref in refs) for tier, refs in taken.items()},
            slots_resting=resting,
        )

    def copy(self) -> Residency:
        """A state that changes apart from this one."""
        return Residency(
            self.compute,
            self.slot_bytes,
            dict(self.home),
            dict(self.slots),
            dict(self.newest),
            {tier: set(refs) for tier, refs in self.taken.items()},
            {tier: set(refs) for tier, refs in self.stale.items()},
            dict(self.in_flight),
            dict(self.slots_used),
            dict(self.slots_resting),
            dict(self.updating),
            {ref: set(chunks) for ref, chunks in self.in_update.items()},
            set(self.unwanted),
        )

    def snapshot(self) -> Snapshot:
        """A frozen copy of the state, between two moments, at which no update is under way."""
        assert not self.updating, f"updates of chunks {sorted(self.updating)} are under way"
        return Snapshot(self.compute, self.slot_bytes, self.home, self.slots, self.newest, self.taken, self.in_flight)

    def grow(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Adds units, or gives them another size: without contents, and at home on the given tiers."""
        for ref in homes:
            if ref in self.home:
                self.slots_resting[self.home[ref]] -= self.slots[ref]
            self.slots_resting[homes[ref]] += slots[ref]
            self.newest.pop(ref, None)
        self._heads = None
        self.home.update(homes)
        self.slots.update((ref, slots[ref]) for ref in homes)

    def shrink(self, refs: Iterable[PlaneRef]) -> None:
        """Takes units out that are free and have no slots."""
        self._heads = None
        for ref in refs:
            self.slots_resting[self.home.pop(ref)] -= self.slots.pop(ref)

    def weight_of(self, chunk: int) -> PlaneRef | None:
        """The weight whose run a chunk is part of."""
        if self._heads is None:
            self._heads = sorted(ref.chunk for ref in self.home if ref.plane == WEIGHT)
        at = bisect_right(self._heads, chunk)
        return PlaneRef(self._heads[at - 1], WEIGHT) if at else None

    def is_free(self, ref: PlaneRef) -> bool:
        """Tells whether a unit has no contents."""
        return ref not in self.newest

    def is_newest(self, ref: PlaneRef, tier: Tier) -> bool:
        """Tells whether a tier holds a unit's last contents, arrived."""
        return tier in self.newest.get(ref, ())

    def tier_of(self, ref: PlaneRef) -> Tier | None:
        """The tier nearest to the one that computes, of those that hold a unit's last contents; None: it is free."""
        return min(self.newest.get(ref, ()), key=_DEPTH.__getitem__, default=None)

    def is_dirty(self, ref: PlaneRef, tier: Tier) -> bool:
        """Tells whether a tier alone holds a unit's last contents, so that its copy must be written back before it goes."""
        return self.newest.get(ref) == _ALONE[tier]

    def unit_bytes(self, ref: PlaneRef) -> int:
        """Bytes of a unit on any tier."""
        return self.slots[ref] * self.slot_bytes

    def has_slots_to_take(self, ref: PlaneRef, tier: Tier) -> bool:
        """Tells whether a copy takes slots on this tier, as it does wherever its home is not."""
        return tier is self.compute or tier is not self.home[ref]


def bytes_of_slot(layout: Layout, formats: Formats) -> int:
    """Bytes of one slot: a chunk of the narrowest plane."""
    return layout.chunk_numel * formats.narrowest


def slots_of(ref: PlaneRef, layout: Layout, formats: Formats) -> int:
    """Slots a unit takes: those of its chunks, times how much wider its plane is than the narrowest."""
    return layout.slots(ref) * (formats.of(ref, layout).itemsize // formats.narrowest)


def mark_written(state: Residency, ref: PlaneRef, tier: Tier | None = None) -> None:
    """Marks a unit as written by a moment, on the tier that computes or on another: whatever else holds it is stale from now on.

    Raises:
        InvariantError: its last contents are not there (1), or a transfer of it is in flight (5).
    """
    here = tier or state.compute
    newest = state.newest.get(ref, ())
    if here not in newest:
        raise InvariantError(1, f"{ref} is written on the {here.label}, which does not hold its last contents")
    if ref in state.in_flight:
        raise InvariantError(5, f"{ref} is written while it is on its way")
    if len(newest) > 1:
        state.newest[ref] = _ALONE[here]
        for other in newest:
            if other is not here and ref in state.taken.get(other, ()):
                state.stale[other].add(ref)


def mark_free(state: Residency, ref: PlaneRef) -> None:
    """Marks a unit as without contents that anybody wants; slots that it has are stale until they are dropped.

    An update under way may still read them, on their way or there: it is free once that is over.

    Raises:
        InvariantError: a transfer of it is in flight (5).
    """
    if ref in state.in_update:
        state.unwanted.add(ref)
        return
    state.unwanted.discard(ref)
    if ref in state.in_flight:
        raise InvariantError(5, f"{ref} is freed while it is on its way")
    state.newest.pop(ref, None)
    for tier, refs in state.taken.items():
        if ref in refs:
            state.stale[tier].add(ref)


def mark_moment(state: Residency, moment: Moment, freed: Iterable[PlaneRef] = ()) -> None:
    """Marks what a moment of a trace writes, and what nobody wants any more once it is over."""
    for touch in moment.touches:
        if touch.writes:
            mark_written(state, touch.ref, touch.tier)
    for ref in freed:
        mark_free(state, ref)


def release(state: Residency, ref: PlaneRef) -> list[Action]:
    """Marks a unit free, and gives the actions that give its slots back at once, to be applied."""
    mark_free(state, ref)
    return [Drop(ref, tier, state.slots[ref]) for tier, refs in state.stale.items() if ref in refs]


def apply(state: Residency, action: Action) -> None:
    """Carry one action out on the state: the only transition there is.

    Raises:
        InvariantError: the action is not legal now; it names the invariant of `plan/check.py` that would be broken,
            and the state is unchanged.
    """
    if isinstance(action, Update):
        _update(state, action)
    elif isinstance(action, UpdateWait):
        _end_update(state, action)
    else:
        _move(state, action)


def _move(state: Residency, action: Move) -> None:
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


def give_up(state: Residency, ref: PlaneRef) -> None:
    """Undoes a transfer that has failed: what it took is given back, and its source holds what it held."""
    _, dst = state.in_flight.pop(ref)
    if state.has_slots_to_take(ref, dst):
        _forget_slots(state, ref, dst)


def _copy(state: Residency, action: Copy) -> None:
    ref, src, dst = action.ref, action.src, action.dst
    home, newest = state.home[ref], state.newest.get(ref, ())
    if ref in state.in_flight:
        _refuse(5, action, "an earlier transfer of it has not been waited for")
    if not _is_leg(src, dst, state.compute, home):
        _refuse(9, action, f"it rests on the {home.label}, and this is not its way there or back")
    takes = state.has_slots_to_take(ref, dst)
    if takes and ref in state.taken[dst]:
        _refuse(5, action, "it has slots there already")
    if src not in newest:
        _refuse(4, action, f"the {src.label} does not hold its last contents")
    if _is_updated_on(state, ref, dst):
        _refuse(10, action, "an update still uses what is there")
    # From where it is updated a transfer may be issued: it begins when the update is over.
    state.in_flight[ref] = src, dst
    state.newest[ref] = frozenset(newest) - {dst}
    if takes:
        state.taken[dst].add(ref)
        state.slots_used[dst] += action.slots


def _is_leg(src: Tier, dst: Tier, compute: Tier, home: Tier) -> bool:
    """Tells whether a copy from `src` to `dst` is on the way between the compute tier and a home below it."""
    upper, lower = sorted((_DEPTH[src], _DEPTH[dst]))
    return lower == upper + 1 and _DEPTH[compute] <= upper and lower <= _DEPTH[home]


def _wait(state: Residency, action: Wait) -> None:
    ref, tier = action.ref, action.tier
    if not _is_arriving(state, ref, tier):
        _refuse(5, action, "no such transfer has been issued")
    if ref in state.in_update:
        _refuse(10, action, "its update has not been waited for")
    _arrive(state, ref)


def _arrive(state: Residency, ref: PlaneRef) -> None:
    _, tier = state.in_flight.pop(ref)
    state.newest[ref] |= _ALONE[tier]


def _is_arriving(state: Residency, ref: PlaneRef, tier: Tier) -> bool:
    return state.in_flight.get(ref, (None, None))[1] is tier


def _drop(state: Residency, action: Drop) -> None:
    ref, tier = action.ref, action.tier
    newest = state.newest.get(ref, ())
    if tier in state.in_flight.get(ref, ()):
        _refuse(5, action, "a transfer still uses these slots")
    if _is_updated_on(state, ref, tier):
        _refuse(10, action, "an update still uses these slots")
    if ref not in state.taken.get(tier, ()):
        _refuse(4 if tier is state.home[ref] else 2, action, "it has no slots there that may go")
    if newest == _ALONE[tier]:
        _refuse(4, action, "it is the last valid copy")
    if tier in newest:
        state.newest[ref] = frozenset(newest) - {tier}
    _forget_slots(state, ref, tier)


def _forget_slots(state: Residency, ref: PlaneRef, tier: Tier) -> None:
    state.taken[tier].discard(ref)
    state.stale[tier].discard(ref)
    state.slots_used[tier] -= state.slots[ref]


def _create(state: Residency, action: Create) -> None:
    ref, tier = action.ref, action.tier
    if ref in state.newest:
        _refuse(4, action, "it has contents")
    if any(ref in refs for refs in state.taken.values()):
        _refuse(5, action, "it has slots already")
    if not (tier is state.compute or _is_leg(state.compute, tier, state.compute, state.home[ref])) or tier is Tier.DISK:
        _refuse(9, action, "first contents are made in memory on its way home")
    state.newest[ref] = _ALONE[tier]
    if state.has_slots_to_take(ref, tier):
        state.taken[tier].add(ref)
        state.slots_used[tier] += action.slots


def _update(state: Residency, action: Update) -> None:
    chunk, tier = action.chunk, action.tier
    units = units_of_update(state, chunk)
    for ref in units:
        earlier = state.in_update.get(ref, ())
        if any(ref.plane != WEIGHT or other == chunk or state.updating[other] is not tier for other in earlier):
            _refuse(10, action, f"an earlier update of {ref} has not been waited for")
    for ref in units:
        is_read = ref.plane == GRAD
        # A gradient need not have arrived: the update comes after its transfer.
        is_there = tier in state.newest.get(ref, ()) or (
            is_read and (state.is_free(ref) or _is_arriving(state, ref, tier))
        )
        if not is_there:
            _refuse(1, action, f"the {tier.label} does not hold the last contents of {ref}")
        if ref in state.in_flight and not is_read:
            _refuse(5, action, f"{ref} is on its way")
    state.updating[chunk] = tier
    for ref in units:
        state.in_update.setdefault(ref, set()).add(chunk)
        if ref.plane != GRAD:
            mark_written(state, ref, tier)


def _end_update(state: Residency, action: UpdateWait) -> None:
    if state.updating.get(action.chunk) is not action.tier:
        _refuse(10, action, "no such update has begun")
    arriving = arriving_for(state, action.chunk)
    del state.updating[action.chunk]
    for ref in units_of_update(state, action.chunk):
        chunks = state.in_update.get(ref, set())
        chunks.discard(action.chunk)
        if not chunks:
            state.in_update.pop(ref, None)
    for ref in arriving:
        _arrive(state, ref)
    for ref in state.unwanted - state.in_update.keys():
        mark_free(state, ref)


def units_of_update(state: Residency, chunk: int) -> list[PlaneRef]:
    """The units that a chunk's update uses: its own, and the weight whose run it is part of."""
    weight = state.weight_of(chunk)
    if weight is None:
        raise InvariantError(9, f"there is no weight of chunk {chunk}")
    planes = (PlaneRef(chunk, plane) for plane in (REST, EXP_AVG, EXP_AVG_SQ, GRAD))
    return [weight, *(ref for ref in planes if ref in state.home)]


def arriving_for(state: Residency, chunk: int) -> list[PlaneRef]:
    """The units, a gradient or none, whose transfer comes before a chunk's update that is under way: its wait is theirs too."""
    tier = state.updating[chunk]
    return [ref for ref in units_of_update(state, chunk) if ref.plane == GRAD and _is_arriving(state, ref, tier)]


def _is_updated_on(state: Residency, ref: PlaneRef, tier: Tier) -> bool:
    return any(state.updating[chunk] is tier for chunk in state.in_update.get(ref, ()))


def _refuse(number: int, action: Action, why: str) -> NoReturn:
    raise InvariantError(number, f"{action}: {why}")
