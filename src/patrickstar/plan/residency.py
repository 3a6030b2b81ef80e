"""Residency of units: which tiers hold the last contents of each, where it takes slots, and how that changes. No bytes are moved here.

Every tier may have a copy of a unit. A copy *is newest* where it holds the last contents; a unit whose copies none of that are is *free*: it has
no contents. A unit's home is where it always has room. On the tier that computes, unless that is its home, and on the host where that lies
between, a copy takes slots as long as it is there.

| what                          | allowed where                                            | after it                                        |
|-------------------------------|----------------------------------------------------------|-------------------------------------------------|
| `CREATE` on a tier            | the unit is free and has no slots                        | newest there alone                              |
| `COPY` to a neighbour         | newest at the source, no other transfer of it in flight  | newest at both, until the wait at the source    |
| `UPDATE` on a tier            | what it writes is newest there, and what it reads is, or | what it writes is newest there alone            |
|                               | is on its way there                                      |                                                 |
| `Drop` from a tier            | it has slots there, and is not newest there alone        | no copy there                                   |
| `mark_written` on a tier      | newest there, nothing in flight                          | newest there alone: other slots of it are stale |
| `mark_free`                   | nothing in flight, or read by an update                  | free: its slots are stale; after the update     |

From a work's issue to its wait no slots that it uses go, and nothing else is written there. `plan/actions.py` says what it uses.

Slots that are stale hold nothing that anybody wants: they are given back as soon as room is made. `make_room` (`plan/make_room.py`) decides and
changes nothing; `apply` is the only transition; `mark_written` and `mark_free` tell the state what a moment did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NoReturn

from patrickstar.core.formats import Formats
from patrickstar.core.layout import Layout
from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment
from patrickstar.plan.actions import Action, Drop, Issue, Place, Wait, Work, WorkKind, reads, units_of, writes
from patrickstar.plan.plan import Snapshot

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
        slots_used: by tier, the slots of `taken`; slots_resting: by tier below the one that computes, those of the units whose home it is.
        under_way: by unit, and by what updates are of, the works that use it, issued and not waited for, in order: at most one transfer, and
            several updates where they write different parts. unwanted: units that are free once these are over.
    """

    compute: Tier
    slot_bytes: int
    home: dict[PlaneRef, Tier]
    slots: dict[PlaneRef, int]

    newest: dict[PlaneRef, frozenset[Tier]]
    taken: dict[Tier, set[PlaneRef]]
    stale: dict[Tier, set[PlaneRef]]
    under_way: dict[PlaneRef, tuple[Issue, ...]] = field(default_factory=dict)
    unwanted: set[PlaneRef] = field(default_factory=set)
    slots_used: dict[Tier, int] = field(default_factory=dict)
    slots_resting: dict[Tier, int] = field(default_factory=dict)

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
        slots, flights, newest = dict(snapshot.slots), snapshot.in_flight, dict(snapshot.newest)
        taken = {tier: set(refs) for tier, refs in snapshot.taken.items()}
        resting = dict.fromkeys(Tier, 0)
        for ref, tier in snapshot.home.items():
            resting[tier] += slots[ref]

        def is_stale(ref: PlaneRef, tier: Tier) -> bool:
            return tier not in newest.get(ref, ()) and flights.get(ref, (tier, None))[1] is not tier

        return cls(
            compute=snapshot.compute,
            slot_bytes=snapshot.slot_bytes,
            home=dict(snapshot.home),
            slots=slots,
            newest=newest,
            taken=taken,
            stale={tier: {ref for ref in refs if is_stale(ref, tier)} for tier, refs in taken.items()},
            under_way={ref: (Issue.copy(ref, src, dst, slots[ref]),) for ref, (src, dst) in flights.items()},
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
            dict(self.under_way),
            set(self.unwanted),
            dict(self.slots_used),
            dict(self.slots_resting),
        )

    def snapshot(self) -> Snapshot:
        """A frozen copy of the state, between two moments, at which no update is under way."""
        assert not self.updates, f"{', '.join(map(str, self.updates))} are under way"
        return Snapshot(self.compute, self.slot_bytes, self.home, self.slots, self.newest, self.taken, self.in_flight)

    def grow(self, homes: Mapping[PlaneRef, Tier], slots: Mapping[PlaneRef, int]) -> None:
        """Adds units, or gives them another size: without contents, and at home on the given tiers."""
        for ref in homes:
            if ref in self.home:
                self.slots_resting[self.home[ref]] -= self.slots[ref]
            self.slots_resting[homes[ref]] += slots[ref]
            self.newest.pop(ref, None)
        self.home.update(homes)
        self.slots.update((ref, slots[ref]) for ref in homes)

    def shrink(self, refs: Iterable[PlaneRef]) -> None:
        """Takes units out that are free and have no slots."""
        for ref in refs:
            self.slots_resting[self.home.pop(ref)] -= self.slots.pop(ref)

    def at_home(self) -> set[PlaneRef]:
        """The units whose home is the tier that computes."""
        return {ref for ref, tier in self.home.items() if tier is self.compute}

    def used_by(self, ref: PlaneRef) -> tuple[Issue, ...]:
        """The works under way that use a unit."""
        return self.under_way.get(ref, ())

    def flight(self, ref: PlaneRef) -> tuple[Tier, Tier] | None:
        """The transfer of a unit that is under way: where from, and where to."""
        for issue in self.under_way.get(ref, ()):
            if issue.src is not None:
                return issue.src, issue.work.tier
        return None

    def is_arriving(self, ref: PlaneRef, tier: Tier) -> bool:
        """Tells whether a unit is on its way to a tier."""
        return (self.flight(ref) or (None, None))[1] is tier

    @property
    def in_flight(self) -> dict[PlaneRef, tuple[Tier, Tier]]:
        """The transfers under way, by unit: where from, and where to."""
        return {ref: flight for ref in self.under_way if (flight := self.flight(ref))}

    def updates_of(self, ref: PlaneRef) -> list[Work]:
        """The updates under way that use a unit."""
        return [issue.work for issue in self.used_by(ref) if issue.work.kind is WorkKind.UPDATE]

    @property
    def updates(self) -> list[Work]:
        """The updates under way, in the order of their issue."""
        return [work for ref in self.under_way for work in self.updates_of(ref) if work.of == ref]

    def is_free(self, ref: PlaneRef) -> bool:
        """Tells whether a unit has no contents."""
        return ref not in self.newest

    def is_newest(self, ref: PlaneRef, tier: Tier) -> bool:
        """Tells whether a tier holds a unit's last contents, arrived."""
        return tier in self.newest.get(ref, ())

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
    if ref in state.under_way and state.flight(ref):
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
    if state.updates_of(ref):
        state.unwanted.add(ref)
        return
    if state.used_by(ref):
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
    if isinstance(action, Wait):
        finish(state, ended_by(state, action))
        return
    ref = action.of if isinstance(action, Drop) else action.work.of  # for which no property is called
    if not isinstance(action, Drop) and action.work.kind is WorkKind.UPDATE:
        _update(state, action)
    elif action.slots != state.slots.get(ref):
        if ref not in state.home:
            _refuse(9, action, "there is no such unit")
        _refuse(7, action, f"the unit takes {state.slots[ref]} slots")
    elif isinstance(action, Drop):
        _drop(state, action)
    elif action.src is None:
        _create(state, action)
    else:
        _copy(state, action, action.src)


def give_up(state: Residency, ref: PlaneRef) -> None:
    """Undoes a transfer that has failed: what it took is given back, and its source holds what it held."""
    issue = next(issue for issue in state.used_by(ref) if issue.work.kind is WorkKind.COPY)
    _end(state, issue)
    if state.has_slots_to_take(ref, issue.work.tier):
        _forget_slots(state, ref, issue.work.tier)


def _copy(state: Residency, action: Issue, src: Tier) -> None:
    _, ref, dst = action.work
    home, newest = state.home[ref], state.newest.get(ref, ())
    if ref in state.under_way and state.flight(ref):
        _refuse(5, action, "an earlier transfer of it has not been waited for")
    if (src, dst) not in _legs(state.compute, home):
        _refuse(9, action, f"it rests on the {home.label}, and this is not its way there or back")
    takes = dst is state.compute or dst is not home
    if takes and ref in state.taken[dst]:
        _refuse(5, action, "it has slots there already")
    if src not in newest:
        _refuse(4, action, f"the {src.label} does not hold its last contents")
    if ref in state.under_way:
        _expect_unused(state, action, ref, dst)
    # From where it is written a transfer may be issued: it begins when that is over.
    _begin(state, action)
    if dst in newest:
        state.newest[ref] -= {dst}
    if takes:
        state.taken[dst].add(ref)
        state.slots_used[dst] += action.slots


@cache
def _legs(compute: Tier, home: Tier) -> Collection[tuple[Tier, Tier]]:
    """The ways from a tier to its neighbour between the tier that computes and a home below it, down and up."""
    tiers = list(Tier)
    way = tiers[tiers.index(compute) : tiers.index(home) + 1]
    return frozenset((*pairwise(way), *pairwise(reversed(way))))


def ended_by(state: Residency, wait: Wait) -> list[Issue]:
    """The works that are over with a wait: the copies under way that its work comes after, and that.

    Raises:
        InvariantError: it has not been issued, or comes after another work that has not been waited for.
    """
    users = state.under_way.get(wait.work.of, ())
    for issue in users:
        if issue.work == wait.work:
            break
    else:
        _refuse(_number(wait.work), wait, "no such work has been issued")
    before = before_it(state, issue) if issue.src is None or len(users) > 1 else []
    for earlier in before:
        if earlier.src is None:
            _refuse(10, wait, f"{earlier} comes before it, and has not been waited for")
    return [*before, issue]


def finish(state: Residency, works: Iterable[Issue]) -> None:
    """Notes that works are over: what a wait does."""
    for issue in works:
        if issue.src is not None:
            state.newest[issue.work.of] |= _ALONE[issue.work.tier]
        _end(state, issue)


def before_it(state: Residency, issue: Issue) -> list[Issue]:
    """The works under way that write what this one reads."""
    found = list[Issue]()
    for unit, tier, _ in reads(issue, state.home):
        users = state.under_way.get(unit, ())
        if users and users != (issue,):
            found += [one for one in users if (unit, tier) in [own[:2] for own in writes(one, state.home)]]
    return found


def _drop(state: Residency, action: Drop) -> None:
    ref, tier = action.of, action.tier
    newest = state.newest.get(ref, ())
    if ref in state.under_way:
        _expect_unused(state, action, ref, tier)
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


def _create(state: Residency, action: Issue) -> None:
    _, ref, tier = action.work
    if ref in state.newest:
        _refuse(4, action, "it has contents")
    if any(ref in refs for refs in state.taken.values()):
        _refuse(5, action, "it has slots already")
    is_on_the_way = tier is state.compute or (state.compute, tier) in _legs(state.compute, state.home[ref])
    if not is_on_the_way or tier is Tier.DISK:
        _refuse(9, action, "first contents are made in memory on its way home")
    state.newest[ref] = _ALONE[tier]  # there is no wait: whoever fills the slots has it over before their first use
    if state.has_slots_to_take(ref, tier):
        state.taken[tier].add(ref)
        state.slots_used[tier] += action.slots


def _update(state: Residency, action: Issue) -> None:
    try:
        written, read = writes(action, state.home), reads(action, state.home)
    except LookupError as error:
        _refuse(9, action, str(error))
    for place in written:
        for other in state.used_by(place[0]):
            if not _is_apart(state, place, other):
                _refuse(_number(other.work), action, f"{other} uses {place[0]}, and has not been waited for")
    for ref, tier, _ in written:
        if not state.is_newest(ref, tier):
            _refuse(1, action, f"the {tier.label} does not hold the last contents of {ref}")
    for ref, tier, _ in read:
        if not (state.is_newest(ref, tier) or state.is_free(ref) or state.is_arriving(ref, tier)):
            _refuse(1, action, f"the {tier.label} does not hold the last contents of {ref}")
    for ref, tier, _ in written:
        mark_written(state, ref, tier)
    _begin(state, action)


def _is_apart(state: Residency, place: Place, other: Issue) -> bool:
    """Tells whether another work under way writes another part of a unit in the same place, and so has nothing to do with this one."""
    unit, tier, part = place
    theirs = (own[2] for own in writes(other, state.home) if own[:2] == (unit, tier))
    return part is not None and next(theirs, None) not in (None, part)


def want_again(state: Residency, issue: Issue) -> None:
    """Notes that a work under way has failed: what it uses is not free once it is over."""
    state.unwanted.difference_update(units_of(issue, state.home))


def _begin(state: Residency, issue: Issue) -> None:
    for ref in units_of(issue, state.home) if issue.src is None else (issue.work.of,):
        state.under_way[ref] = (*state.under_way.get(ref, ()), issue)


def _end(state: Residency, issue: Issue) -> None:
    """Notes that a work is over, or given up; what nobody else wants is free then."""
    for ref in units_of(issue, state.home) if issue.src is None else (issue.work.of,):
        users = state.under_way[ref]
        left = tuple([other for other in users if other is not issue]) if len(users) > 1 else ()
        if left:
            state.under_way[ref] = left
        else:
            del state.under_way[ref]
            if ref in state.unwanted:
                state.unwanted.discard(ref)
                mark_free(state, ref)


def _expect_unused(state: Residency, action: Action, ref: PlaneRef, tier: Tier) -> None:
    """Refuses an action that takes or writes slots which a work under way uses."""
    for user in state.used_by(ref):
        if tier in (user.src, user.work.tier):
            _refuse(_number(user.work), action, f"{user} still uses what is there")


def _number(work: Work) -> int:
    """The invariant that says how long a work has what it uses."""
    return 10 if work.kind is WorkKind.UPDATE else 5


def _refuse(number: int, action: Action, why: str) -> NoReturn:
    raise InvariantError(number, f"{action}: {why}")
