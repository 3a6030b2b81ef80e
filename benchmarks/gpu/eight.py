"""8B parameters with everything off the device: TFLOP/s, what idles, what is pinned, and what was foreseen of memory."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.gpu.decoder import Shape
from benchmarks.gpu.results import Result, spread
from benchmarks.gpu.side import Side, Turn
from benchmarks.gpu.step import TINY
from benchmarks.gpu.turns import Sides, host_bytes, tflops

__all__ = ["run"]


def run(arguments: Namespace, result: Result) -> None:
    """At 16k tokens a step and at 8k, sequences of 4k; a profile of each."""
    full = arguments.scale == "full"
    shape = Shape(layers=arguments.layers or 36) if full else TINY
    budgets: tuple[Any, ...] = ("22GiB", "26GiB", "34GiB", "50GiB", None) if full else ("16MiB",)
    side = Side("managed", shape, arguments.device, device_memory=budgets, host_memory=host_bytes(arguments))
    result.set(shape=str(shape), numel=shape.numel(), budgets=budgets)
    result.say(f"{shape.numel() / 1e9:.2f}B parameters")
    with Sides(result) as sides:
        if sides.begin("managed", side, within_s=400) is None:
            return
        for sequences, tokens in ((4, 4096), (2, 4096)) if full else ((2, 16),):
            key = f"{sequences * tokens} tokens"
            if sides.turn("managed", Turn(sequences, tokens, steps=3, shares=False), within_s=400) is None:
                return
            seconds = list[float]()
            for number in range(6 if full else 1):
                row = sides.turn("managed", Turn(sequences, tokens, steps=1, shares=False))
                if row is None:
                    return
                seconds += row["seconds"]
                rates = [tflops(shape.numel(), sequences * tokens, s) for s in seconds]
                result.say(f"{key}, step {number + 1}: {seconds[-1]:.3f} s, {rates[-1]:.0f} TFLOP/s")
                result.set(**{key: {"seconds": seconds, "model_tflops": spread(rates), "last_row": row, **shares(row)}})
            if arguments.device == "cuda":
                path = arguments.trace / f"eight-{sequences}.json.gz"
                row = sides.turn("managed", Turn(sequences, tokens, shares=False, trace=path))
                if row is None:
                    return
                profile = row.get("profile", {})
                result.set(**{key: {**result.found[key], "profile": profile}})
                result.say(f"{key}: a kernel runs {profile.get('kernels_share', 0):.1%} of the time")
    result.end()


def shares(row: dict[str, Any]) -> dict[str, float]:
    """What was foreseen over what was measured, and what is pinned over what was asked for."""
    if not row.get("mapped_bytes"):
        return {}
    foreseen = row["foreseen_peak_bytes"]
    return {
        "device_foreseen_over_measured": foreseen["device"] / (row["mapped_bytes"] + row["allocated_peak_bytes"]),
        "pinned_over_asked": row["pinned_bytes"] / foreseen["host"],
    }
