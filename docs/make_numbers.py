"""Computes the figures of the decision records, and writes them where the records have a place for them.

    python docs/make_numbers.py [--check]

A place is what stands between `<!-- numbers: NAME -->` and `<!-- end of numbers -->`. All of it is planning: no tensor, no
time, the same on every machine. With `--check` nothing is written; the exit status is 1 where a record is not up to date.

The example is a decoder of 24 blocks with tied embeddings and a batch whose activations rise to a quarter of the model data.
Its chunks are those that `manage` would choose; the host computes, and everything is at home on the disk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from places import fill

from patrickstar.core.chunk_size import search_chunk_numel
from patrickstar.core.formats import FP32
from patrickstar.core.layout import Layout, TensorSpec, build_layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, WEIGHT, PlaneRef
from patrickstar.core.slots import SlotMap
from patrickstar.core.trace import Moment, Phase, Touch, Trace
from patrickstar.plan import residency
from patrickstar.plan.actions import Drop, is_copy, slots_taken
from patrickstar.plan.make import make_plan
from patrickstar.plan.plan import Plan, frees_by_moment
from patrickstar.plan.residency import Residency

RECORDS = Path(__file__).parent / "decisions"
PLANES = (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ)
BLOCKS, HIDDEN, VOCABULARY = 24, 512, 16384
BUDGETS = (0.3, 0.5, 0.75)
STEPS = 8  # to settle; the last is counted

Frees = tuple[tuple[int, PlaneRef], ...]


def main() -> int:
    return fill(RECORDS.glob("*.md"), "numbers", TABLES, script=Path(__file__).name)


# the example


@cache
def example() -> tuple[Layout, Trace, Trace]:
    """The layout, and the two stretches of a step: forward with backward, and the update."""
    blocks = [
        spec
        for index in range(BLOCKS)
        for spec in (
            TensorSpec(f"h.{index}.attention", (4 * HIDDEN, HIDDEN)),
            TensorSpec(f"h.{index}.mlp", (8 * HIDDEN, HIDDEN)),
        )
    ]
    specs = [TensorSpec("embedding", (VOCABULARY, HIDDEN)), *blocks]
    layout = build_layout(specs, chunk_numel=search_chunk_numel(specs))
    most = layout.model_numel * 16 // 4
    forward = ["embedding", *(spec.name for spec in blocks), "embedding"]
    moments = [
        Moment(
            Phase.FORWARD,
            name,
            tuple(map(Touch, layout.weight_units(name))),
            nonmodel_bytes=most * index // len(forward),
        )
        for index, name in enumerate(forward)
    ]
    for index, name in reversed(list(enumerate(forward))):
        alive = most * index // len(forward)
        moments.append(Moment(Phase.BACKWARD, name, tuple(map(Touch, layout.weight_units(name))), nonmodel_bytes=alive))
        if name != "embedding" or index == 0:  # of a tied weight, the gradient arrives once
            moments += [
                Moment(Phase.BACKWARD, name, (Touch(PlaneRef(part.chunk, GRAD), True),), nonmodel_bytes=alive)
                for part in layout.parts(name)
            ]
    update = [
        Moment(
            Phase.STEP,
            layout.tensors_in(chunk)[0].name,
            (
                Touch(PlaneRef(layout.run_of(chunk).head, WEIGHT), True),
                Touch(PlaneRef(chunk, GRAD)),
                Touch(PlaneRef(chunk, EXP_AVG), True),
                Touch(PlaneRef(chunk, EXP_AVG_SQ), True),
            ),
        )
        for chunk in range(layout.n_chunks)
    ]
    return layout, Trace(tuple(moments)), Trace(tuple(update))


def model_bytes(layout: Layout) -> int:
    """Bytes of all planes."""
    return layout.model_numel * 16


def machine_of(layout: Layout, share: float) -> Machine:
    """A host that may hold this share of the model data, activations included, and a disk that holds it all."""
    total = model_bytes(layout)
    return Machine(Tier.HOST, {Tier.HOST: int(total * share), Tier.DISK: 2 * total})


@cache
def run(
    share: float, *, policy: str = "next-use", frees_gradients: bool = True, steps: int = STEPS
) -> tuple[Layout, list[tuple[Plan, ...]]]:
    """The plans of some steps, each made from where the one before has left every unit."""
    layout, step, update = example()
    machine = machine_of(layout, share)
    home = dict.fromkeys(layout.units(PLANES), Tier.DISK)
    free = [ref for ref in home if ref.plane != WEIGHT]
    state = Residency.at_rest(layout, compute=Tier.HOST, home=home, formats=FP32, free=free)
    frees: Frees = tuple((index, PlaneRef(index, GRAD)) for index in range(layout.n_chunks))
    done: list[tuple[Plan, ...]] = []
    for _ in range(steps):
        first = make_plan(step, layout=layout, machine=machine, start=state, policy=policy, following=update)
        second = make_plan(
            update,
            layout=layout,
            machine=machine,
            start=Residency.of(first.end),
            policy=policy,
            following=step,
            frees=frees if frees_gradients else (),
        )
        state = Residency.of(second.end)
        for _, ref in frees:
            if not state.is_free(ref) or ref in state.stale[state.compute]:
                for action in residency.release(state, ref):
                    residency.apply(state, action)
        done.append((first, second))
    return layout, done


def moved(plans: Sequence[Plan]) -> int:
    """Bytes that cross the link to the disk, both ways."""
    return sum(action.slots * plan.start.slot_bytes for plan in plans for action in plan.actions() if is_copy(action))


def dropped_clean(plans: Sequence[Plan]) -> int:
    """Bytes of copies that were given back without a transfer because the disk has the same bytes."""
    total = 0
    for plan, trace in zip(plans, example()[1:], strict=True):
        state = Residency.of(plan.start)
        freed_after = frees_by_moment(plan.frees)
        for index, actions in enumerate(plan.moments):
            written_back = {action.of for action in actions if is_copy(action) and action.work.tier is Tier.DISK}
            for action in actions:
                is_stale = action.of in state.stale[state.compute]
                if isinstance(action, Drop) and action.of not in written_back and not is_stale:
                    total += action.slots * state.slot_bytes
                residency.apply(state, action)
            residency.mark_moment(state, trace.moments[index], freed_after.get(index, ()))
    return total


# the tables


def clean_copies() -> str:
    rows = []
    for share in BUDGETS:
        layout, plans = run(share)
        _, lru = run(share, policy="lru")
        total, last = model_bytes(layout), plans[-1]
        rows.append(
            (
                f"{share:.0%}",
                f"{moved(last) / total:.2f}",
                f"{(moved(last) + dropped_clean(last)) / total:.2f}",
                f"{moved(lru[-1]) / total:.2f}",
            )
        )
    heads = (
        "budget",
        "moved a step",
        "if clean copies were written back too",
        "least recently used instead of next use",
    )
    return _table(heads, rows)


def adjacent_slots() -> str:
    rows = []
    for share in BUDGETS:
        layout, plans = run(share)
        machine = machine_of(layout, share)
        capacity = machine.budget[Tier.HOST] // plans[0][0].start.slot_bytes
        longest = max(run.length for run in layout.runs)
        asked = missed = 0
        # As many addresses as slots. Where no run is found, everything is moved together, as a compaction would.
        slots, at = SlotMap(capacity), dict[PlaneRef, tuple[int, int]]()
        for plan in (plan for pair in plans for plan in pair):
            for action in plan.actions():
                if isinstance(action, Drop):
                    slots.give(*at.pop(action.of))
                elif slots_taken(action, Tier.HOST):
                    asked += action.slots > 1
                    if not slots.can_take(action.slots):
                        missed += 1
                        slots = SlotMap(capacity)
                        at = {
                            ref: (slots.take(n), n) for ref, (_, n) in sorted(at.items(), key=lambda item: -item[1][1])
                        }
                    at[action.of] = slots.take(action.slots), action.slots
        rows.append((f"{share:.0%}", str(capacity), str(longest), str(asked), str(missed)))
    heads = ("budget", "slots", "longest run", "runs asked for", "no adjacent slots, though enough were free")
    return _table(heads, rows)


def plans_made() -> str:
    rows = []
    for share in BUDGETS:
        _, plans = run(share, steps=STEPS)
        known: set[str] = set()
        new = []
        for pair in plans:
            digests = {plan.digest() for plan in pair}
            new.append(str(len(digests - known)))
            known |= digests
        first, second = plans[-1]
        kept = sum(second.end.slots[ref] for ref in second.end.taken[second.end.compute]) * second.end.slot_bytes
        total = model_bytes(run(share, steps=1)[0])
        rows.append((f"{share:.0%}", " ".join(new), f"{kept / total:.2f}", f"{moved((first, second)) / total:.2f}"))
    heads = ("budget", f"plans made in steps 1 to {STEPS}", "kept from step to step", "moved a step")
    return _table(heads, rows)


def pending_step() -> str:
    rows = []
    for share in BUDGETS:
        layout, freed = run(share)
        _, kept = run(share, frees_gradients=False)
        total = model_bytes(layout)
        rows.append((f"{share:.0%}", f"{moved(freed[-1]) / total:.2f}", f"{moved(kept[-1]) / total:.2f}"))
    return _table(("budget", "moved a step", "if gradients were kept to the end of the update"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "adjacent-slots": adjacent_slots,
    "clean-copies": clean_copies,
    "pending-step": pending_step,
    "plans-made": plans_made,
}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
