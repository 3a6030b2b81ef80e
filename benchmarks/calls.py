"""What the binding by use costs in function calls: a use of a parameter, the unpacking of a saved weight, the arrival of a gradient.

    python benchmarks/calls.py [--json] [--write]

The model is a stack of linears without biases, each weight a chunk: every use is of one parameter, and under a tight budget nearly every use
brings a chunk and lets another leave. A figure is the median over one planned step, the third, with the least and the most; what torch calls in
a use of a plain parameter is taken off. "step" is everything of ours that runs in a forward and its backward, metered operations included.

The route of a use, where nothing moves: the classes with state of which a method runs, and the files of which a function does. The route of a
weight goes from its use to the end of its update, from the disk and back to it: uses, unpackings, arrivals, and the optimizer's step.

Counts are exact for given code, Python and torch. How the work of moving is divided between unpacking and gradients hangs on ties in the
plan; how much it is in all does not.

And what a step of a decoder costs beyond plain PyTorch, a parameter: forward, backward, step and zero_grad of GPT-2 blocks that are bound whole, by
block and by use, once plans repeat. Where chunks move, every block is fetched in the forward and again in the backward.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import textwrap
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from machine import describe_machine
from spans import Span, Spans
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import patrickstar
from patrickstar.memory.lanes import InlineLane
from patrickstar.plan.update_choice import UpdateChoice
from patrickstar.session.manage import assemble
from patrickstar.session.start import set_up

LAYERS, WIDTH = 24, 64
CHUNK = WIDTH * WIDTH
BATCH = 1  # activations take next to no room, so that each use under a tight budget is like the next
STEPS = 3  # of which the last is counted
EVENTS = ("use", "unpack", "gradient")
BINDINGS = (("whole", False), ("blocks", False), ("blocks", True), ("use", False), ("use", True))
DECODER_STEPS = 8  # of which the last is counted


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session computes. Under the `roomy` budget nothing moves, under the `tight` one nearly every use moves something."""

    name: str
    arguments: Mapping[str, str]
    roomy: Mapping[str, str]
    tight: Mapping[str, str] | None = None
    compute: str | None = None
    has_disk: bool = False

    def budget(self, *, moves: bool) -> Mapping[str, str]:
        """The budget under which chunks move, or under which none does."""
        return (self.tight if moves else self.roomy) or {}


CPU, DEVICE = {"device": "cpu", "precision": "fp32"}, {"device": "emulated", "precision": "fp32"}
ROOMY, TIGHT = {"device_memory": "256MiB"}, {"device_memory": "64KiB"}
PLACES = (
    Place("unbounded", CPU, roomy={}),
    Place("cpu and disk", CPU, {"host_memory": "256MiB"}, {"host_memory": "72KiB"}, has_disk=True),
    Place("device fp32", DEVICE, ROOMY, TIGHT),
    Place("device bf16", {**DEVICE, "precision": "bf16"}, ROOMY, TIGHT, compute="bf16"),
)


class NotMeasuredError(Exception):
    """The step that was counted is not one that the figures are about."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did: the spans of its forward and backward in the order of time, and the bytes that the whole of it moved."""

    spans: Sequence[Span]
    moved_bytes: int

    def of(self, event: str) -> list[Span]:
        """The spans of one event. What is saved beside weights has another shape, and is none."""
        found = [span for span in self.spans if span.kind == event]
        return [span for span in found if event != "unpack" or span.shape == (WIDTH, WIDTH)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result in place of tables")
    parser.add_argument("--write", action="store_true", help="keep the result beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    set_up.__kwdefaults__["binding"] = "use"  # uses are counted: everything fits where nothing moves
    # What becomes of weights that do not fit as ordinary tensors is of no interest here.
    logging.getLogger("patrickstar").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as disk:
        rows = [
            measure(place, moves=moves, disk=disk)
            for place in PLACES
            for moves in ((False, True) if place.tight else (False,))
        ]
        weight = route_of_a_weight(disk)
        decoder = [measure_decoder(binding, moves=moves, disk=disk) for binding, moves in BINDINGS]
    result = {
        "what": "calls of functions in Python and in C: for a use of a parameter, the unpacking of a saved weight, the arrival of a gradient",
        "model": {"layers": LAYERS, "width": WIDTH, "batch": BATCH, "chunk_size": CHUNK},
        "rows": rows,
        "weight": weight,
        "decoder": decoder,
        "command": " ".join(["python", "benchmarks/calls.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    text = json.dumps(result, indent=2)
    print(text if arguments.json else report(rows, weight, decoder))
    if arguments.write:
        (Path(__file__).parent / "results" / "calls.json").write_text(text + "\n")
    return 0


def measure(place: Place, *, moves: bool, disk: str | Path) -> dict[str, Any]:
    """The figures of a place, where chunks move or where none does.

    Raises:
        NotMeasuredError: the step was not planned, it moved what it should not or too little, or some events were not seen.
    """
    warm_up()
    budget = place.budget(moves=moves)
    below = {"disk": disk} if place.has_disk else {}
    step = count({**place.arguments, **budget, **below}, compute=place.compute, moves=moves)
    plain = plain_use()
    uses, unpacks, gradients = map(step.of, EVENTS)
    row: dict[str, Any] = {
        "place": place.name,
        **place.arguments,
        **budget,
        "moves": moves,
        "moved_bytes": step.moved_bytes,
        "use": figures(uses, less=plain),
        "unpack": figures(unpacks),
        "gradient": figures(gradients),
        "step": {
            "python": sum(span.python for span in step.spans) - len(uses) * plain.python,
            "c": sum(span.c for span in step.spans) - len(uses) * plain.c,
        },
    }
    if not moves:
        row["route"] = route(uses)
    return row


def route(spans: Sequence[Span]) -> dict[str, list[str]]:
    """The classes with state, and the files, that these spans go through."""
    return {
        "classes": sorted(set().union(*(span.classes for span in spans))),
        "files": sorted(set().union(*(span.files for span in spans))),
    }


def figures(spans: Sequence[Span], *, less: Span | None = None) -> dict[str, dict[str, int]]:
    """Of calls in Python and in C, less those of one span each: the median, which is one of the counts, the least and the most."""
    found = {}
    for name in ("python", "c"):
        counts = [getattr(span, name) - (getattr(less, name) if less else 0) for span in spans]
        found[name] = {"median": statistics.median_low(counts), "least": min(counts), "most": max(counts)}
    return found


@cache
def warm_up() -> None:
    """A session's first steps import what they need. A bound on the process would count that, and what a bound does would depend on it."""
    count(CPU, moves=False)


@cache
def plain_use() -> Span:
    """What the same use calls with a parameter that nobody manages."""
    model, inputs, _ = build()
    spans = Spans(F.linear)
    with spans.counting():
        model(inputs)
    counts = {(span.kind, span.python, span.c) for span in spans.found}
    if len(counts) != 1:
        raise NotMeasuredError(f"plain parameters are used in several ways: {sorted(counts)}")
    return spans.found[0]


def build() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
    """The model, a batch of inputs, and an optimizer, as yet unmanaged."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model, torch.randn(BATCH, WIDTH), torch.optim.AdamW(model.parameters(), lr=1e-3)


def begin(arguments: Mapping[str, Any], *, compute: str | None = None) -> tuple[patrickstar.Session, nn.Module, Tensor]:
    """A session with these arguments, its model, and a batch of inputs."""
    model, inputs, optimizer = build()
    options = patrickstar.Options(chunk_size=CHUNK, compute=compute)
    # Transfers are done at issue: what is called in a wait depends on whether they have ended.
    inline = {"make_lane": lambda _src, _dst: InlineLane()}
    # Updates come in a stretch of their own: between uses they would be counted for the uses that come after them.
    choice = UpdateChoice(apart=True)
    return assemble(model, optimizer, **inline, choice=choice, options=options, **arguments), model, inputs


def route_of_a_weight(disk: str | Path) -> dict[str, list[str]]:
    """The route from the use of a weight to the end of its update, where it comes from the disk and goes back to it."""
    warm_up()
    place = next(place for place in PLACES if place.has_disk)
    session, model, inputs = begin({**place.arguments, **place.budget(moves=True), "disk": disk})
    uses, update = Spans(F.linear), Spans(F.linear)
    with session:
        for _ in range(STEPS):
            uses.found, update.found = [], []
            with uses.counting():
                model(inputs).square().mean().backward()
            with update.counting():
                session.optimizer.step()
                session.optimizer.zero_grad()
                session._parts.executor.settle()
        if session.stats().reason:
            raise NotMeasuredError(f"a step was not planned: {session.stats().reason}")
    return route([*(span for span in uses.found if span.kind in EVENTS), *update.found])


def count(arguments: Mapping[str, Any], *, compute: str | None = None, moves: bool) -> Step:
    """The last of a few steps of a session with these arguments. NotMeasuredError as `measure` says."""
    spans = Spans(F.linear)
    session, model, inputs = begin(arguments, compute=compute)
    with session:
        for _ in range(STEPS - 1):
            take_step(session, model, inputs, watched=nullcontext)
        stats = take_step(session, model, inputs, watched=spans.counting)
    expect_planned(stats, moves=moves)
    step = Step(spans.found, moved_bytes(stats[0], stats[-1]))
    # Nobody asks for the gradient of the inputs, for which the first weight would be saved.
    for event, expected in zip(EVENTS, (LAYERS, LAYERS - 1, LAYERS), strict=True):
        if len(step.of(event)) != expected:
            raise NotMeasuredError(f"{len(step.of(event))} times {event} in a step that has {expected}")
    return step


def expect_planned(stats: Sequence[Any], *, moves: bool) -> None:
    """NotMeasuredError where the step with these numbers was not a planned one that moves, or does not, as it should."""
    first, last = stats[0], stats[-1]
    if (last.planned_steps, last.reactive_steps) != (first.planned_steps + 1, first.reactive_steps):
        raise NotMeasuredError(f"the step was not planned: {last.reason}")
    moved = [moved_bytes(before, after) for before, after in pairwise(stats)]
    # More than half of the uses bring their weight, in forward and in backward: the median must not be of those that move nothing.
    enough = last.model_data["weight"] // 2
    if moves and min(moved[:2]) <= enough:
        raise NotMeasuredError(f"forward and backward moved {moved[:2]} bytes, and should move more than {enough} each")
    if not moves and any(moved):
        raise NotMeasuredError(f"forward, backward and update moved {moved} bytes, and should move none")


def moved_bytes(before: Any, after: Any) -> int:
    """What has crossed any link between two readings of a session's numbers."""
    return sum(after.moved.values()) - sum(before.moved.values())


def take_step(
    session: patrickstar.Session,
    model: nn.Module,
    inputs: Tensor,
    *,
    watched: Callable[[], AbstractContextManager[object]],
) -> list[Any]:
    """The session's numbers before a step, between its forward, its backward and its update, and after it."""
    stats = [session.stats()]
    with watched():
        loss = model(inputs).square().mean()
    stats.append(session.stats())
    with watched():
        loss.backward()
    stats.append(session.stats())
    session.optimizer.step()
    session.optimizer.zero_grad()
    return [*stats, session.stats()]


class Decoder(nn.Module):
    """GPT-2 blocks, of 12 parameters each."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(n_embd=WIDTH, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa")
        self.blocks = nn.ModuleList(GPT2Block(config, layer_idx=layer) for layer in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        for block in self.blocks:
            x = block(x)
        return x


def measure_decoder(binding: str, *, moves: bool, disk: str | Path) -> dict[str, Any]:
    """Calls a parameter of a decoder's step beyond plain PyTorch, where its blocks are bound so. NotMeasuredError as `measure` says."""
    warm_up()
    budget = {"host_memory": "2MiB" if moves else "256MiB", "disk": disk} if binding != "whole" else {}
    plain, model, inputs = Decoder(), Decoder(), torch.randn(1, 4, WIDTH)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (plain, model)]
    train(plain, optimizers[0], inputs)
    base = calls_of(partial(train, plain, optimizers[0], inputs))
    with unittest.mock.patch.dict(set_up.__kwdefaults__, binding=binding):
        session = assemble(model, optimizers[1], make_lane=lambda _src, _dst: InlineLane(), **CPU, **budget)
    with session:
        for _ in range(DECODER_STEPS - 1):
            stats = take_step(session, model, inputs, watched=nullcontext)
        expect_planned(stats, moves=moves)
        found = calls_of(partial(train, model, session.optimizer, inputs))
        if session.stats().reactive_steps:
            raise NotMeasuredError(f"a step was not planned: {session.stats().reason}")
    python, c = ((now - before) / len(list(model.parameters())) for now, before in zip(found, base, strict=True))
    moved = moved_bytes(stats[0], stats[-1])
    return {"binding": binding, "moves": moves, "moved_bytes": moved, "python": round(python, 1), "c": round(c, 1)}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    """One step, all of it."""
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def calls_of(run: Callable[[], None]) -> tuple[int, int]:
    """Calls in Python and in C that this thread does meanwhile."""
    events: list[str] = []

    def see(_frame: FrameType, event: str, _argument: object) -> None:
        events.append(event)

    gc.collect()
    gc.disable()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return events.count("call"), events.count("c_call")


def report(
    rows: Sequence[Mapping[str, Any]], weight: Mapping[str, Sequence[str]], decoder: Sequence[Mapping[str, Any]]
) -> str:
    """Tables of the figures: medians as calls in Python + calls in C, and routes."""
    heads = ("place", "chunks", *EVENTS, "step")
    lines = ["{:14}{:8}{:>12}{:>12}{:>12}{:>16}".format(*heads)]
    for row in rows:
        medians = [f"{row[event]['python']['median']} + {row[event]['c']['median']}" for event in EVENTS]
        step = f"{row['step']['python']} + {row['step']['c']}"
        chunks = "move" if row["moves"] else "rest"
        lines.append("{:14}{:8}{:>12}{:>12}{:>12}{:>16}".format(row["place"], chunks, *medians, step))
    for row in decoder:
        place, chunks = f"by {row['binding']}", "move" if row["moves"] else "rest"
        lines.append("{:14}{:8}{:>52} a parameter".format(place, chunks, f"{row['python']} + {row['c']}"))
    routes = {f"{row['place']}: a use": row["route"] for row in rows if "route" in row}
    for what, found in {**routes, "cpu and disk: a weight up to its update": weight}.items():
        classes, files = found["classes"], found["files"]
        lines += ["", f"{what} goes through {len(classes)} classes in {len(files)} files"]
        for names in ([name.rpartition(".")[2] for name in classes], files):
            lines.append(textwrap.fill(", ".join(names), 120, initial_indent="  ", subsequent_indent="  "))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
