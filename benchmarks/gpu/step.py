"""Steps at 4B to 6B parameters, against the same model in plain PyTorch, which keeps all of it on the device and recomputes as we do."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.gpu.decoder import Shape
from benchmarks.gpu.results import Result
from benchmarks.gpu.side import Side, Turn
from benchmarks.gpu.turns import Sides, compare, host_bytes, tflops

__all__ = ["run"]

LARGE_BYTES = 130e9  # of a device that has room for 5B
GB = 10**9
TINY = Shape(layers=2, width=32, heads=4, kv_heads=2, inner=64, vocab=64)


def run(arguments: Namespace, result: Result) -> None:
    """First states off the device, then everything, both updated in backward; then everything off at half the tokens, and deferred."""
    full = arguments.scale == "full"
    total = result.found["machine"].get("gpu_bytes") or 0
    shape = Shape(layers=arguments.layers or (22 if total > LARGE_BYTES else 17)) if full else TINY
    sequences, tokens = (4, 4096) if full else (2, 16)
    rounds = 6 if full else 1
    result.set(shape=str(shape), numel=shape.numel(), rounds=rounds)
    result.say(f"{shape.numel() / 1e9:.2f}B parameters, {sequences} x {tokens} tokens a step")
    turn = Turn(sequences, tokens)
    with Sides(result) as sides:
        common: dict[str, Any] = {"device": arguments.device}
        plain = sides.begin("plain", Side("plain", shape, **common), within_s=120)
        if plain is None:
            return
        row = sides.turn("plain", turn)
        if row is None:
            return
        # Weights, masters and two moments are there all the time; what is above them is activations and gradients on their way.
        beside = row.get("allocated_peak_bytes", 0) - 14 * shape.numel() if arguments.device == "cuda" else 0
        result.set(activations_bytes=beside)
        result.say(f"activations take {beside / GB:.1f} GB")
        host = host_bytes(arguments)
        weights = 2 * shape.numel()
        little = tuple(beside + more * GB for more in (5, 8, 14)) if full else ("16MiB",)
        budgets = {
            "states off": tuple(weights + limit for limit in little) if full else ("16MiB",),
            "all off": little,
        }
        for name, device_memory in budgets.items():
            side = Side("managed", shape, device_memory=device_memory, host_memory=host, **common)
            if sides.begin(name, side, within_s=240) is None:
                continue
            compare(
                sides, ("plain", name), turn, result=result, key=f"{name}, {sequences * tokens} tokens", rounds=rounds
            )
            if name == "all off" and name in sides:
                half = Turn(sequences // 2, tokens)
                compare(
                    sides,
                    ("plain", name),
                    half,
                    result=result,
                    key=f"{name}, {sequences * tokens // 2} tokens",
                    rounds=rounds,
                )
                if arguments.device == "cuda":
                    row = sides.turn(name, Turn(sequences, tokens, trace=arguments.trace / "step.json.gz"))
                    result.set(profile=(row or {}).get("profile"))
            sides.finish(name)
        _deferred(
            sides,
            Side("managed", shape, step="deferred", device_memory=little, host_memory=host, **common),
            turn,
            result=result,
            rounds=rounds,
        )
        for key, measured in list(result.found.items()):
            if key.startswith(("states off,", "all off,", "deferred,")):
                took = {n: sorted(s)[len(s) // 2] for n, s in measured["seconds"].items() if s}
                at = {n: tflops(shape.numel(), measured["tokens_a_step"], s) for n, s in took.items()}
                result.set(**{key: {**measured, "model_tflops": at}})
    result.end()


def _deferred(sides: Sides, side: Side, turn: Turn, *, result: Result, rounds: int) -> None:
    """All off, and updates after the backward, against the plain side, which updates in its backward: reported, with nothing to reach."""
    if sides.begin("deferred", side, within_s=240) is None:
        return
    key = f"deferred, {turn.sequences * turn.tokens} tokens"
    compare(sides, ("plain", "deferred"), turn, result=result, key=key, rounds=rounds)
    sides.finish("deferred")
