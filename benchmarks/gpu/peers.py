"""The library against peers that keep parameters and states on the host: FSDP2, which comes with torch, and DeepSpeed where it is installed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from benchmarks.gpu.decoder import Shape
from benchmarks.gpu.results import Result
from benchmarks.gpu.side import Side, Turn
from benchmarks.gpu.step import TINY
from benchmarks.gpu.turns import Sides, compare, host_bytes

__all__ = ["run_deepspeed", "run_fsdp2"]


def run_fsdp2(arguments: Namespace, result: Result) -> None:
    """`fully_shard` with `CPUOffloadPolicy`."""
    run("fsdp2", arguments, result)


def run_deepspeed(arguments: Namespace, result: Result) -> None:
    """ZeRO-3 with the optimizer and the parameters on the host."""
    run("deepspeed", arguments, result)


def run(peer: str, arguments: Namespace, result: Result) -> None:
    """The same model, batch and recomputing; each as it is fastest while exact: ours in backward, the peer after it, and ours after it too."""
    full = arguments.scale == "full"
    shape = Shape(layers=arguments.layers or 10) if full else TINY
    turn = Turn(4, 4096) if full else Turn(2, 16)
    rounds = 6 if full else 1
    budget = ("16GiB", "20GiB", "28GiB", None) if full else ("16MiB",)
    # The host has three at once: up to 20 bytes a parameter of the peer's, rounded up where they are pinned, and twice 12 of ours.
    host = host_bytes(arguments, share=0.27)
    result.set(shape=str(shape), numel=shape.numel(), tokens_a_step=turn.sequences * turn.tokens)
    ours = Side("managed", shape, arguments.device, device_memory=budget, host_memory=host)
    with Sides(result) as sides:
        if sides.begin(peer, Side(peer, shape, arguments.device, step="deferred"), within_s=240) is not None:
            sides.begin("managed", ours, within_s=200)
            sides.begin("managed, deferred", replace(ours, step="deferred"), within_s=200)
            names = tuple(name for name in (peer, "managed", "managed, deferred") if name in sides)
            compare(sides, names, turn, result=result, key="steps", rounds=rounds)
    result.end()
