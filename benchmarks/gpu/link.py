"""The roofline: the link between host and device, copies on each side, and products of matrices."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.results import Result, spread

from patrickstar.memory.arena import Arena
from patrickstar.memory.space import DeviceSpace, HostSpace, PinnedSpace

__all__ = ["run"]

MIB = 1 << 20
TIMES = 7


def run(arguments: Namespace, result: Result) -> None:
    """Each way, both together; pinned by torch, pinned slot by slot, pageable. On a tiny scale, memory of the host plays the device."""
    full, cuda = arguments.scale == "full", arguments.device == "cuda"
    slot, slots = (64 * MIB, 16) if full else (MIB, 2)
    there = torch.device("cuda", 0) if cuda else torch.device("cpu")
    result.set(slot_bytes=slot, slots=slots)

    def device_arena(name: str) -> Arena:
        space: Callable[..., Any] = partial(DeviceSpace, device=there) if cuda else HostSpace
        return Arena(slot, virtual_slots=slots, name=name, make_space=space)

    host_space: Callable[..., Any] = PinnedSpace if cuda else HostSpace
    host, host2 = (Arena(slot, virtual_slots=slots, name=name, make_space=host_space) for name in ("h", "h2"))
    device, device2 = device_arena("d"), device_arena("d2")
    began = time.perf_counter()
    host.take(slots), host2.take(slots)
    taken = 2 * slots * slot / (time.perf_counter() - began)
    result.set(pinning_bytes_per_second=taken)
    result.say(f"slots of the host are pinned at {taken / 1e9:.2f} GB/s")
    began = time.perf_counter()
    device.take(slots), device2.take(slots)
    result.set(mapping_bytes_per_second=2 * slots * slot / (time.perf_counter() - began))
    nbytes = slots * slot
    kinds = {"pageable": torch.ones(nbytes, dtype=torch.uint8)}
    if cuda:
        kinds["pinned by torch"] = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    beside = torch.ones(nbytes, dtype=torch.uint8, device=there)
    works: dict[str, tuple[list[Callable[[], object]], int]] = {
        "slots, up": ([device.copying(0, slots, host, 0)], nbytes),
        "slots, down": ([host2.copying(0, slots, device2, 0)], nbytes),
        "slots, both": ([device.copying(0, slots, host, 0), host2.copying(0, slots, device2, 0)], 2 * nbytes),
    }
    for kind, tensor in kinds.items():
        works[f"{kind}, up"] = ([partial(beside.copy_, tensor, non_blocking=True)], nbytes)
        works[f"{kind}, down"] = ([partial(tensor.copy_, beside, non_blocking=True)], nbytes)
    other = torch.empty_like(beside)
    on_host = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    works["device, read and write"] = ([partial(other.copy_, beside)], 2 * nbytes)
    works["host, read and write"] = ([partial(on_host[1].copy_, on_host[0])], 2 * nbytes)
    found: dict[str, Any] = {}
    for name, (works_of, moved) in works.items():
        streams = [torch.cuda.Stream() for _ in works_of] if cuda else []
        rates = [moved / _seconds(works_of, streams) for _ in range(TIMES)][1:]
        found[name] = spread(rates)
        result.set(bytes_per_second=found)
        result.say(f"{name}: {found[name]['median'] / 1e9:.1f} GB/s ({min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f})")
    result.set(bf16_flops_per_second=_products(there, 8192 if full else 64))
    result.say(f"products in bf16: {result.found['bf16_flops_per_second']['median'] / 1e12:.1f} TFLOP/s")
    if cuda:
        torch.cuda.synchronize()
    for arena in (host, host2, device, device2):
        arena.close()


def _seconds(works: list[Callable[[], object]], streams: list[Any]) -> float:
    if streams:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for number, work in enumerate(works):
        if streams:
            with torch.cuda.stream(streams[number]):
                work()
        else:
            work()
    if streams:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _products(there: torch.device, size: int) -> dict[str, float]:
    left, right = (torch.randn(size, size, device=there, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(12):
        works = [partial(torch.mm, left, right)] * 5
        rates.append(
            5 * 2 * size**3 / _seconds(works, [torch.cuda.current_stream()] * 5 if there.type == "cuda" else [])
        )
    return spread(rates[2:])
