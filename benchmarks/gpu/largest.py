"""The largest model that trains without a disk: the first of a falling list of sizes that takes two steps."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.gpu.decoder import Shape
from benchmarks.gpu.results import Result
from benchmarks.gpu.side import Side, Turn
from benchmarks.gpu.step import TINY
from benchmarks.gpu.turns import Sides, host_bytes

__all__ = ["run_clipped", "run_in_backward"]

LAYERS = (82, 68, 58, 48, 40)  # 18.2B, 15.1B, 12.9B, 10.7B, 9.0B


def run_in_backward(arguments: Namespace, result: Result) -> None:
    """Exact, updated in backward: 12 bytes a parameter."""
    run(arguments, result, step="in_backward", clips=False, layers=LAYERS)


def run_clipped(arguments: Namespace, result: Result) -> None:
    """Exact, deferred and clipped: 14 bytes a parameter."""
    run(arguments, result, step="deferred", clips=True, layers=LAYERS[1:])


def run(arguments: Namespace, result: Result, *, step: str, clips: bool, layers: tuple[int, ...]) -> None:
    """Sizes that are refused are noted with the words of the refusal."""
    full = arguments.scale == "full"
    refused = dict[str, str]()
    for number in (arguments.layers,) if arguments.layers else layers if full else (2,):
        shape = Shape(layers=number) if full else TINY
        name = f"{shape.numel() / 1e9:.2f}B"
        side = Side(
            "managed", shape, arguments.device, step=step, clips=clips, host_memory=host_bytes(arguments, share=0.93)
        )
        with Sides(result) as sides:
            ready = sides.begin(name, side, within_s=450)
            row = sides.turn(name, Turn(1, 4096 if full else 16, steps=3, shares=False), within_s=300)
            if ready is not None and row is not None:
                result.say(f"{name} trains: {row['seconds'][-1]:.2f} s a step")
                result.set(numel=shape.numel(), shape=str(shape), ready_with=ready, row=row, refused=refused)
                result.end()
                return
            refused[name] = sides.missing[name]
            result.set(refused=refused)
