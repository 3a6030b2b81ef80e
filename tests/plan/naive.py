"""Second derivations that share nothing with `patrickstar.plan` but the text of a plan."""

from __future__ import annotations

from functools import cache

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import PlaneRef
from patrickstar.core.trace import Trace
from patrickstar.plan.plan import Plan
from tests.plan.builders import SLOT_BYTES, Instance


def replay(plan: Plan, machine: Machine, trace: Trace) -> tuple[list[int], list[dict[str, int]], dict[str, int]]:
    """Compute-tier bytes and bytes moved by link at each moment, peak bytes of the other tiers: from the text alone."""
    lines = str(plan).splitlines()
    compute = plan.start.compute.value
    home = {str(ref): tier.value for ref, tier in plan.start.home.items()}
    size = {str(ref): slots * SLOT_BYTES for ref, slots in plan.start.slots.items()}
    here = {str(ref) for ref in plan.start.taken[plan.start.compute]}
    staged = {str(ref) for ref in plan.start.taken.get(Tier.HOST, ()) if compute != "H"}
    rest = {letter: sum(size[ref] for ref in home if home[ref] == letter != compute) for letter in "DHK"}
    on_the_way = sum(size[ref] for ref in staged)
    peak, moves, curve = {**rest, "H": rest["H"] + on_the_way}, [], []
    for index, moment in enumerate(trace.moments):
        moved = {"H>D": 0, "D>H": 0, "H>K": 0, "K>H": 0}
        line = next((line for line in lines if line.startswith(f"{index}: ")), ": ")
        for words in filter(None, line.split(": ", 1)[1].split(", ")):
            ref, what = words.split(" ")[:2]
            if ">" in what:
                src, dst = what.split(">")
                if src != "0":
                    moved[what] += size[ref]
                if dst == compute:
                    here.add(ref)
                elif dst != home[ref]:
                    staged.add(ref)
            elif what.endswith("!"):
                (here if what[0] == compute else staged).remove(ref)
            for letter in "HK":
                on_the_way = sum(size[ref] for ref in staged) if letter == "H" else 0
                peak[letter] = max(peak[letter], rest[letter] + on_the_way)
        moves.append(moved)
        curve.append(sum(size[ref] for ref in here) + moment.nonmodel_bytes)
    del peak[compute]
    return curve, moves, peak


def needed_bytes(instance: Instance) -> list[int]:
    """What each moment must hold at once, from the definition."""
    start, needed = instance.start, []
    here = {ref for ref, home in start.home.items() if home is start.compute and ref in start.newest}
    for index, moment in enumerate(instance.trace.moments):
        pinned = {touch.ref for touch in moment.touches} | set(moment.held)
        here |= {ref for ref in pinned if start.home[ref] is start.compute}
        needed.append(sum(start.slots[ref] for ref in pinned | here) * SLOT_BYTES + moment.nonmodel_bytes)
        here -= {ref for at, ref in instance.frees if at == index}
    return needed


def fewest_fetches(instance: Instance) -> int:
    """The least number of fetches of equal clean units over the trace, by trying every set that may stay."""
    needs = [
        (
            frozenset({touch.ref for touch in moment.touches} | set(moment.held)),
            (instance.budget - moment.nonmodel_bytes) // SLOT_BYTES,
        )
        for moment in instance.trace.moments
    ]

    @cache
    def cost(index: int, resident: frozenset[PlaneRef]) -> int:
        if index == len(needs):
            return 0
        pinned, room = needs[index]
        others = sorted(resident - pinned)
        keepable = [
            frozenset(ref for bit, ref in enumerate(others) if chosen >> bit & 1) for chosen in range(1 << len(others))
        ]
        return len(pinned - resident) + min(
            cost(index + 1, pinned | keep) for keep in keepable if len(pinned | keep) <= room
        )

    return cost(0, frozenset())
