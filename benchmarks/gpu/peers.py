"""The library against peers that keep parameters and states on the host: FSDP2, which comes with torch, and DeepSpeed where it is installed."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.gpu.decoder import Shape
from benchmarks.gpu.results import Result
from benchmarks.gpu.sides import Side, Turn
from benchmarks.gpu.step import TINY
from benchmarks.gpu.turns import Sides, compare, host_bytes

__all__ = ["run"]


def run(arguments: Namespace, result: Result) -> None:
    """The same model, batch and recomputing; each as it is fastest while exact: ours in backward, FSDP2 after it."""
    full = arguments.scale == "full"
    shape = Shape(layers=arguments.layers or 10) if full else TINY
    turn = Turn(4, 4096) if full else Turn(2, 16)
    rounds = 6 if full else 1
    # The host has both at once: 16 bytes a parameter of FSDP2's, rounded up where they are pinned, and 12 of ours.
    budget = ("16GiB", "20GiB", "28GiB", None) if full else ("16MiB",)
    host = host_bytes(arguments, share=0.35)
    result.set(shape=str(shape), numel=shape.numel(), tokens_a_step=turn.sequences * turn.tokens)
    with Sides(result) as sides:
        for name, side in {
            "fsdp2": Side("fsdp2", shape, arguments.device, step="deferred"),
            "deepspeed": Side("deepspeed", shape, arguments.device, step="deferred"),
            "managed": Side("managed", shape, arguments.device, device_memory=budget, host_memory=host),
            "managed, deferred": Side(
                "managed", shape, arguments.device, step="deferred", device_memory=budget, host_memory=host
            ),
        }.items():
            sides.begin(name, side, within_s=200)
        names = tuple(name for name in ("fsdp2", "deepspeed", "managed", "managed, deferred") if name in sides)
        if names:
            compare(sides, names, turn, result=result, key="steps", rounds=rounds)
    result.end()
