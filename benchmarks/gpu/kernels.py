"""The passes over planes: an update and a norm on each side, against a copy there."""

from __future__ import annotations

import inspect
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.results import Result, spread

from patrickstar.optim.choose import choose_kernels
from patrickstar.optim.hyper import Hyper
from patrickstar.optim.norm import GlobalNorm, norm_of

__all__ = ["run"]

TIMES = 8
HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)


def run(arguments: Namespace, result: Result) -> None:
    """In fp32 and, where the library's passes know them, in split bf16: bytes that an update must move over its seconds."""
    there = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    kernels = choose_kernels(there)
    found: dict[str, Any] = {}
    for place in dict.fromkeys((there, torch.device("cpu"))):
        numel = (1 << 28 if place.type == "cuda" else 1 << 26) if arguments.scale == "full" else 1 << 12
        kernel: Any = kernels[place.type]
        result.say(f"{place.type}: {type(kernel).__name__}")
        cases = {"copy": _copy(place, numel), "norm": _norm(kernel, place, numel), **_updates(kernel, place, numel)}
        for name, (work, nbytes) in cases.items():
            try:
                rates = [nbytes / _seconds(work, place) for _ in range(TIMES)][2:]
            except Exception as error:  # one pass that fails is no reason to lose the others
                found[f"{place.type}, {name}"] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                result.say(f"{place.type}, {name}: failed: {error}")
                continue
            found[f"{place.type}, {name}"] = {**spread(rates), "kernel": type(kernel).__name__}
            result.say(f"{place.type}, {name}: {spread(rates)['median'] / 1e9:.1f} GB/s")
            result.set(bytes_per_second=found)
        del cases


def _copy(place: torch.device, numel: int) -> tuple[Callable[[], object], int]:
    source, target = torch.ones(numel, device=place), torch.empty(numel, device=place)
    return lambda: target.copy_(source), 8 * numel


def _norm(kernel: Any, place: torch.device, numel: int) -> tuple[Callable[[], object], int]:
    gradient = torch.randn(numel, device=place)

    def work() -> object:
        norm: Any = (
            kernel.norm(place if place.type == "cuda" else None) if hasattr(kernel, "norm") else GlobalNorm(place)
        )
        norm.add(gradient)
        norm.end_tensor()
        return norm_of(norm.numbers().tolist())

    return work, 4 * numel


def _updates(kernel: Any, place: torch.device, numel: int) -> dict[str, tuple[Callable[[], object], int]]:
    weight, grad, exp_avg, exp_avg_sq = (torch.randn(numel, device=place) for _ in range(4))
    exp_avg_sq.abs_()
    if "rest" not in inspect.signature(kernel.update).parameters:

        def whole() -> None:
            kernel.update(weight, grad, exp_avg, exp_avg_sq, step=3, hyper=HYPER)

        return {"update in fp32": (whole, 28 * numel)}
    half, rest = weight.bfloat16(), torch.randint(-(1 << 15), 1 << 15, (numel,), device=place, dtype=torch.int16)
    narrow = grad.bfloat16()

    def fp32() -> None:
        kernel.update(weight, None, grad, exp_avg, exp_avg_sq, step=3, hyper=HYPER)

    def bf16() -> None:
        kernel.update(half, rest, narrow, exp_avg, exp_avg_sq, step=3, hyper=HYPER)

    # A gradient is read; halves or whole of the weight, and both moments, are read and written.
    return {"update in fp32": (fp32, 28 * numel), "update in split bf16": (bf16, 26 * numel)}


def _seconds(work: Callable[[], object], place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if place.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
