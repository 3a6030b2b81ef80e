"""How much of a link's time passes beside computing: steps on an emulated device whose link has a speed.

    python benchmarks/overlap.py [--pairs N] [--layers N] [--tokens N] [--width N] [--vocabulary N] [--write]

A GPT-2, fp32, one sequence of `--tokens`, half of the model data on the device. The link's speed is chosen so that the bytes of a step take
0.3, 1 and 3 times as long as computing does, which is the step of a device that holds everything, in the same run. For each speed there is a process
whose transfers begin early, and one whose transfers begin when they are needed. Steps are taken in turn, in an order that changes each time, and all
must have the same losses.

A step has two halves: the forward, with the update of the step before between its moments, and the backward. What comes up is tied to the half that
uses it; what goes down, gradients and weights that were changed, may go in either. The bound is the sum over the halves of the longer of computing
and of what comes up, or the time of all that goes down, if that is longer. Where cores compute, update and copy, all of that is in what computing
takes. Prints seconds and ratios to the bound, and to a step that computes all and sends all at once, with the median's 90 % interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from overhead_sides import interval
from transformers import GPT2Config, GPT2LMHeadModel
from worker import Worker

import patrickstar

TIMES = (0.3, 1.0, 3.0)
"""The link's time for the bytes of a step, as a multiple of computing."""

PARTS = ("forward", "backward")
_WARM_UP = 3  # steps: the first is measured by the session, in the second moments are there
_SHARE = 0.5


def work(
    pipe: Connection, arguments: argparse.Namespace, share: float, prefetch: int | None, link: float | None
) -> None:
    """One process: a step, with the seconds and the bytes of its parts, when it is asked for one."""
    model = build(arguments)
    model_data = 16 * sum(parameter.numel() for parameter in model.parameters())
    rate = None if link is None else max(1, int(link))
    session = patrickstar.manage(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        device="emulated",
        device_memory=int(share * model_data),
        precision="fp32",
        options=patrickstar.Options(prefetch=prefetch, emulated_link=rate),
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
        session.optimizer.step()
        session.optimizer.zero_grad()
        mark()
        pipe.send(
            {
                "loss": loss.item().hex(),
                "seconds": [after - before for before, after in pairwise(marks)],
                "bytes": [
                    {link: after[link] - before[link] for link in ("H>D", "D>H")} for before, after in pairwise(moved)
                ],
                "planned": session.stats().planned_steps,
            }
        )
    session.close(keep_weights=False)


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


def bound(computing: list[float], nbytes: list[dict[str, int]], speed: float) -> float:
    """Seconds of a step whose halves each take as long as computing or what comes up does, and all of it as long as what goes down."""
    halves = sum(max(own, sent["H>D"] / speed) for own, sent in zip(computing, nbytes, strict=True))
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
    fits = started(arguments, 4.0, None, None)
    unpaced = started(arguments, _SHARE, 0, None)
    for number in range(_WARM_UP):
        fits.ask(number)
        last = unpaced.ask(number)
    computing = [statistics.median(parts) for parts in zip(*(fits.ask(9)["seconds"] for _ in range(5)), strict=True)]
    sent = max(sum(part[link] for part in last["bytes"]) for link in ("H>D", "D>H"))
    unpaced.dismiss()
    unpaced.join()
    rows = [measured(arguments, fits, times, sent / (times * sum(computing))) for times in TIMES]
    fits.dismiss()
    fits.join()
    result = {
        "what": "steps on an emulated device with half of the model data and a paced link",
        "layers": arguments.layers,
        "tokens": arguments.tokens,
        "rows": rows,
        "command": " ".join(["python", "benchmarks/overlap.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    if arguments.write:
        (Path(__file__).parent / "results" / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def started(arguments: argparse.Namespace, share: float, prefetch: int | None, link: float | None) -> Worker:
    worker = Worker(work, arguments, share, prefetch, link)
    worker.hear()
    return worker


def measured(arguments: argparse.Namespace, fits: Worker, times: float, speed: float) -> dict[str, Any]:
    """Rounds of three steps: everything there, transfers when they are needed, transfers that begin early."""
    sides = {"early": started(arguments, _SHARE, None, speed), "late": started(arguments, _SHARE, 0, speed)}
    order = ["fits", *sides]
    workers = {"fits": fits, **sides}
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(_WARM_UP + arguments.pairs):
        order.reverse()
        found = {name: workers[name].ask(number) for name in order}
        assert found["early"]["loss"] == found["late"]["loss"], "losses differ"
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
            step, own = found[name], found["fits"]["seconds"]
            total = sum(step["seconds"])
            to_bound.append(total / bound(own, step["bytes"], speed))
            whole = max(sum(part[link] for part in step["bytes"]) for link in ("H>D", "D>H")) / speed
            to_whole.append(total / max(sum(own), whole))
        row[name] = {
            "seconds": statistics.median(sum(found[name]["seconds"]) for found in rounds),
            "parts": [
                statistics.median(parts) for parts in zip(*(found[name]["seconds"] for found in rounds), strict=True)
            ],
            "bytes": rounds[-1][name]["bytes"],
            "to_bound": {"median": statistics.median(to_bound), "interval": interval(sorted(to_bound))},
            "to_whole": {"median": statistics.median(to_whole), "interval": interval(sorted(to_whole))},
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
    return row


if __name__ == "__main__":
    sys.exit(main())
