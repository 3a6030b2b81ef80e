"""Units, moments, actions and snapshots from their texts: what the planner prints, read back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patrickstar.core.machine import Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Moment, Phase, Touch
from patrickstar.plan.actions import Action, Drop, Issue, Wait, Work
from patrickstar.plan.plan import Condition, Snapshot

_ACTION = re.compile(r"(\S+) (?:([0DHK])>([DHK])|([DHK])([?!]))(?: x(\d+))?")
_UPDATE = re.compile(r"c(\d+) step@([DHK])(\??)")
_WORD = re.compile(r"([a-z]+)(?:,([a-z]+))?(?::([DHK])>([DHK]))?")


def unit(text: str) -> PlaneRef:
    """Of `c12.weight`."""
    chunk, plane = text.removeprefix("c").split(".")
    return PlaneRef(int(chunk), plane)


def units(text: str) -> list[PlaneRef]:
    return [unit(word) for word in text.split()]


def touch(text: str) -> Touch:
    """Of `c3.grad@H*`."""
    ref, _, tier = text.removesuffix("*").partition("@")
    return Touch(unit(ref), text.endswith("*"), Tier(tier) if tier else None)


def moment(text: str, label: str, nonmodel_bytes: int) -> Moment:
    """Of a forward: `c0.weight c1.grad* updates c1 held c2.weight`."""
    rest, _, held = text.partition("held")
    touches, _, chunk = rest.partition("updates c")
    updates = int(chunk) if chunk else None
    return Moment(
        Phase.FORWARD, label, tuple(map(touch, touches.split())), tuple(units(held)), nonmodel_bytes, updates=updates
    )


def action(text: str) -> Action:
    """Of `c12.weight H>D x4`, and whatever else an action prints as."""
    if update := _UPDATE.fullmatch(text):
        work = Work.update(int(update[1]), Tier(update[2]))
        return Wait(work) if update[3] else Issue(work)
    found = _ACTION.fullmatch(text)
    assert found is not None, text
    ref, slots = unit(found[1]), int(found[6] or 1)
    if found[5] == "?":
        return Wait.copy(ref, Tier(found[4]))
    if found[5] == "!":
        return Drop(ref, Tier(found[4]), slots)
    if found[2] == "0":
        return Issue.create(ref, Tier(found[3]), slots)
    return Issue.copy(ref, Tier(found[2]), Tier(found[3]), slots)


def snapshot(text: str) -> Snapshot:
    """Of a whole snapshot, as `plan/plan.py` shows one."""
    head, *lines = text.splitlines()
    compute = Tier(head[3])
    home, slots, newest, flights = dict[PlaneRef, Tier](), dict[PlaneRef, int](), dict[PlaneRef, frozenset[Tier]](), {}
    taken: dict[Tier, set[PlaneRef]] = {tier: set() for tier in (compute, Tier.HOST)}
    for line in lines:
        plane, letter, word, *spans = line.split()
        tier = Tier(letter)
        tiers, copies, flight = _places(word, compute, tier)
        for chunk, times in _chunks(spans):
            ref = PlaneRef(chunk, plane)
            home[ref], slots[ref] = tier, times
            if tiers:
                newest[ref] = frozenset(tiers)
            if flight:
                flights[ref] = flight
            for copy in copies:
                taken[copy].add(ref)
    return Snapshot(compute, int(head.split()[4]), home, slots, newest, taken, flights)


def _places(word: str, compute: Tier, home: Tier) -> tuple[set[Tier], set[Tier], tuple[Tier, Tier] | None]:
    """The tiers that hold the last contents of a unit in such a condition, those where it has slots, and its transfer under way."""
    found = _WORD.fullmatch(word)
    assert found is not None, word
    here, cached = Condition(found[1]), Condition(found[2]) if found[2] else None
    flight = (Tier(found[3]), Tier(found[4])) if found[3] else None
    copies = set() if here in (Condition.FREE, Condition.AWAY) else {compute}
    if cached is not None:
        copies.add(Tier.HOST)
    if flight and (flight[1] is compute or flight[1] is not home):
        copies.add(flight[1])
    if here in (Condition.FREE, Condition.VOID):
        return set(), copies, flight
    newest = set[Tier]() if here in (Condition.AWAY, Condition.STALE) else {compute}
    if cached in (Condition.CLEAN, Condition.DIRTY):
        newest.add(Tier.HOST)
    if cached is not Condition.DIRTY and here is not Condition.DIRTY:
        newest.add(home)
    return newest, copies, flight


def _chunks(spans: list[str]) -> Iterator[tuple[int, int]]:
    for span in spans:
        numbers, _, slots = span.partition("x")
        first, _, last = numbers.partition("-")
        for chunk in range(int(first), int(last or first) + 1):
            yield chunk, int(slots or 1)
