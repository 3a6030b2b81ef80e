"""How much of a link's time passes beside computing: steps on an emulated device whose link has a speed.

    python benchmarks/overlap.py [--pairs N] [--layers N] [--tokens N] [--width N] [--vocabulary N] [--write]

A GPT-2, fp32, one sequence of `--tokens`, half of the model data on the device. The link's speed is chosen so that the bytes of a step take
0.3, 1 and 3 times as long as computing does, which is the step of a device that holds everything, in the same run. For each speed there is a process
whose transfers begin early, and one whose transfers begin when they are needed. Steps are taken in turn, in an order that changes each time, and all
must have the same losses.

A step has two halves: the forward, with the update of the step before between its moments, and the backward. What comes up is tied to the half that
uses it, as the simulation of the plan has it whose transfers are issued when they are needed; what goes down, gradients and weights that were
changed, may go in either. The bound is the sum over the halves of the longer of computing and of what comes up, or the time of all that goes down,
if that is longer. The cores that compute also update and copy: the update is part of what computing takes, and what the copies take of all cores is
added to it. Both processes have the same bound. Prints seconds and ratios to the bound, and to a step that computes all and
sends all at once, with the median's 90 % interval; and how much longer a step takes that clips, less what the norm takes where nothing moves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from overhead_sides import interval
from transformers import GPT2Config, GPT2LMHeadModel
from worker import Worker

import patrickstar
from patrickstar.core.ledger import Ledger
from patrickstar.core.trace import Phase
from patrickstar.plan.actions import Issue
from patrickstar.plan.residency import Residency

TIMES = (0.3, 1.0, 3.0)
"""The link's time for the bytes of a step, as a multiple of computing."""

PARTS = ("forward", "backward")
_LINKS = ("H>D", "D>H")
_WARM_UP = 3  # steps: the first is measured by the session, in the second moments are there
_SHARE = 0.5
_NORM = 1.0


@dataclass(frozen=True)
class Side:
    """A way of training: the share of model data on the device, how early transfers begin, bytes a second of the link, and the norm to clip."""

    share: float
    prefetch: int | None
    link: float | None
    max_norm: float | None = None


def work(pipe: Connection, arguments: argparse.Namespace, side: Side) -> None:
    """One process: a step, with the seconds and the bytes of its parts, when it is asked for one."""
    model = build(arguments)
    model_data = 16 * sum(parameter.numel() for parameter in model.parameters())
    rate = None if side.link is None else max(1, int(side.link))
    session = patrickstar.manage(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        device="emulated",
        device_memory=int(side.share * model_data),
        precision="fp32",
        max_grad_norm=side.max_norm,
        options=patrickstar.Options(prefetch=side.prefetch, emulated_link=rate),
    )
    pipe.send(model_data)
    while (seed := pipe.recv()) is not None:
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randint(0, model.config.vocab_size, (1, arguments.tokens), generator=generator)
        marks, moved = [time.perf_counter()], [session.stats().moved]

        def mark() -> None:
            marks.append(time.perf_counter())  # noqa: B023
            moved.append(session.stats().moved)  # noqa: B023

        loss = model(input_ids=batch, labels=batch).loss
        mark()
        loss.backward()
        before = time.perf_counter()
        session.optimizer.step()  # the norm, if there is one: the update comes with the next forward
        norm = time.perf_counter() - before
        session.optimizer.zero_grad()
        mark()
        pipe.send(
            {
                "loss": loss.item().hex(),
                "seconds": [after - before for before, after in pairwise(marks)],
                "bytes": [{link: after[link] - before[link] for link in _LINKS} for before, after in pairwise(moved)],
                "simulated": simulated_halves(session),
                "norm": norm,
                "planned": session.stats().planned_steps,
            }
        )
    session.close(keep_weights=False)


def simulated_halves(session: patrickstar.Session) -> list[dict[str, int]]:
    """Bytes that the last step's plan moves in forward, updates included, and from the first moment of its backward on."""
    plan, trace = session.plan, session.trace
    assert plan is not None, "the step had no plan"
    assert trace is not None, "the step had no trace"
    state = Residency.of(plan.start)
    middle = next(index for index, moment in enumerate(trace.moments) if moment.phase is Phase.BACKWARD)
    halves = []
    for half in (plan.moments[:middle], plan.moments[middle:]):
        ledger = Ledger()
        for action in chain.from_iterable(half):
            if isinstance(action, Issue) and action.src is not None:
                ledger.move(action.src, action.work.tier, state.unit_bytes(action.of))
        halves.append({link: ledger.moved[link] for link in _LINKS})
    return halves


def _total(halves: list[dict[str, int]]) -> dict[str, int]:
    return {link: sum(half[link] for half in halves) for link in _LINKS}


def build(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=arguments.layers,
        n_embd=arguments.width,
        n_positions=arguments.tokens,
        vocab_size=arguments.vocabulary,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def copies_per_second() -> float:
    """Bytes a second that the cores copy from one place to another, if all of them do nothing else."""
    source, target = torch.randn(64 << 18), torch.empty(64 << 18)  # 64 MiB: no cache has them
    taken = []
    for _ in range(12):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(taken)


def bound(computing: list[float], nbytes: list[dict[str, int]], speed: float, copies: float) -> float:
    """Seconds of a step whose halves each take as long as computing or what comes up does, and all of it as long as what goes down."""
    busy = [own + sum(sent.values()) / copies for own, sent in zip(computing, nbytes, strict=True)]
    halves = sum(max(own, sent["H>D"] / speed) for own, sent in zip(busy, nbytes, strict=True))
    return max(halves, sum(sent["D>H"] for sent in nbytes) / speed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    fits = {
        "fits": started(arguments, Side(4.0, None, None)),
        "fits, clipped": started(arguments, Side(4.0, None, None, _NORM)),
    }
    unpaced = started(arguments, Side(_SHARE, 0, None))
    for number in range(_WARM_UP):
        for worker in fits.values():
            worker.ask(number)
        last = unpaced.ask(number)
    computing = [
        statistics.median(parts) for parts in zip(*(fits["fits"].ask(9)["seconds"] for _ in range(5)), strict=True)
    ]
    sent = max(sum(part[link] for part in last["simulated"]) for link in _LINKS)
    unpaced.dismiss()
    unpaced.join()
    copies = copies_per_second()
    rows = [measured(arguments, fits, times, sent / (times * sum(computing)), copies) for times in TIMES]
    for worker in fits.values():
        worker.dismiss()
        worker.join()
    result = {
        "what": "steps on an emulated device with half of the model data and a paced link",
        "layers": arguments.layers,
        "tokens": arguments.tokens,
        "copies_per_second": copies,
        "rows": rows,
        "command": " ".join(["python", "benchmarks/overlap.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        (Path(__file__).parent / "results" / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def started(arguments: argparse.Namespace, side: Side) -> Worker:
    worker = Worker(work, arguments, side)
    worker.hear()
    return worker


def measured(
    arguments: argparse.Namespace, fits: dict[str, Worker], times: float, speed: float, copies: float
) -> dict[str, Any]:
    """Rounds of five steps: everything there, transfers when they are needed, transfers that begin early, and the first and the last clipped."""
    sides = {
        "early": started(arguments, Side(_SHARE, None, speed)),
        "late": started(arguments, Side(_SHARE, 0, speed)),
        "clipped": started(arguments, Side(_SHARE, None, speed, _NORM)),
    }
    workers = {**fits, **sides}
    order = list(workers)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(_WARM_UP + arguments.pairs):
        order.reverse()
        found = {name: workers[name].ask(number) for name in order}
        assert found["early"]["loss"] == found["late"]["loss"], "losses differ"
        moved, simulated = (_total(found["late"][what]) for what in ("bytes", "simulated"))
        assert number < _WARM_UP or moved == simulated, f"moved {moved}, simulated {simulated}"
        rounds.append(found)
    for worker in sides.values():
        worker.dismiss()
    for worker in sides.values():
        worker.join()
    rounds = rounds[_WARM_UP:]
    row: dict[str, Any] = {"times": times, "bytes_per_second": speed, "pairs": len(rounds)}
    for name in ("late", "early"):
        to_bound, to_whole = [], []
        for found in rounds:
            halves, own = found["late"]["simulated"], found["fits"]["seconds"]
            total = sum(found[name]["seconds"])
            to_bound.append(total / bound(own, halves, speed, copies))
            whole = max(sum(part[link] for part in halves) for link in _LINKS) / speed
            to_whole.append(total / max(sum(own), whole))
        row[name] = {
            "seconds": statistics.median(sum(found[name]["seconds"]) for found in rounds),
            "parts": [
                statistics.median(parts) for parts in zip(*(found[name]["seconds"] for found in rounds), strict=True)
            ],
            "bytes": rounds[-1][name]["bytes"],
            "simulated": rounds[-1][name]["simulated"],
            "to_bound": {"median": statistics.median(to_bound), "interval": interval(sorted(to_bound))},
            "to_whole": {"median": statistics.median(to_whole), "interval": interval(sorted(to_whole))},
        }
    clipping = [
        (sum(found["clipped"]["seconds"]) - found["fits, clipped"]["norm"]) / sum(found["early"]["seconds"])
        for found in rounds
    ]
    row["clipped"] = {
        "norm_seconds": statistics.median(found["fits, clipped"]["norm"] for found in rounds),
        "to_early": {"median": statistics.median(clipping), "interval": interval(sorted(clipping))},
    }
    row["computing"] = [
        statistics.median(parts) for parts in zip(*(found["fits"]["seconds"] for found in rounds), strict=True)
    ]
    print(
        f"link {times:g} x computing ({speed / 2**20:.0f} MiB/s): computing {sum(row['computing']):.2f} s", flush=True
    )
    for name in ("late", "early"):
        own = row[name]
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in zip(PARTS, own["parts"], strict=True))
        low, high = own["to_bound"]["interval"]
        print(
            f"  {name:5} {own['seconds']:.2f} s ({parts}); {own['to_bound']['median']:.2f} x the bound ({low:.2f} to {high:.2f}), "
            f"{own['to_whole']['median']:.2f} x the whole step's",
            flush=True,
        )
    low, high = row["clipped"]["to_early"]["interval"]
    print(
        f"  clipped {row['clipped']['to_early']['median']:.3f} x early ({low:.3f} to {high:.3f}), "
        f"less {row['clipped']['norm_seconds']:.2f} s of the norm",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
