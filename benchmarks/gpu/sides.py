"""One side of a comparison, in a process of its own that takes steps when it is told to: plain PyTorch, the library, or a peer."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from benchmarks.gpu.decoder import Decoder
from benchmarks.gpu.offloading import deepspeed, fsdp2
from benchmarks.gpu.side import RATE, NotMeasuredError, Side, Step, Turn
from torch import Tensor, nn

import patrickstar
from patrickstar.memory.driver import DeviceAddresses
from patrickstar.memory.space import PinnedSpace

__all__ = ["work"]


def work(pipe: Connection, side: Side) -> None:
    """Says what it is ready with, or in one text why it is not; then takes a turn for each that it is sent."""
    torch.manual_seed(side.seed)
    began = time.perf_counter()
    try:
        with _SIDES[side.kind](side) as (step, library):
            synchronize(side)
            pipe.send(
                {"setup_seconds": time.perf_counter() - began, "numel": side.shape.numel(), **memory(side, library)}
            )
            while (turn := pipe.recv()) is not None:
                pipe.send(take(turn, side, step, library))
    except (patrickstar.Error, NotMeasuredError, torch.OutOfMemoryError, RuntimeError) as error:
        pipe.send(f"{type(error).__name__}: {error}")


def synchronize(side: Side) -> None:
    """Waits for all that is queued."""
    if side.device == "cuda":
        torch.cuda.synchronize()


def take(turn: Turn, side: Side, step: Step, library: Managed | None) -> dict[str, Any]:
    """Takes the steps of a turn; seconds are by step."""
    moved = {} if library is None else dict(library.session.stats().moved)
    generator = torch.Generator().manual_seed(turn.sequences)
    seconds, loss = list[float](), ""
    if side.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with _profiled(turn, side) as profile:
        for _ in range(turn.steps):
            tokens = torch.randint(side.shape.vocab, (turn.sequences, turn.tokens), generator=generator).to(side.place)
            synchronize(side)
            began = time.perf_counter()
            kept = step(tokens)
            synchronize(side)
            seconds.append(time.perf_counter() - began)
            loss = float(kept.detach()).hex()
    row: dict[str, Any] = {"seconds": seconds, "loss": loss, **memory(side, library), **profile}
    if library is not None:
        stats = library.session.stats()
        row["refusals"] = library.refusals
        row["moved_a_step"] = {link: max(0, nbytes - moved[link]) / turn.steps for link, nbytes in stats.moved.items()}
        row |= {"planned_steps": stats.planned_steps, "reactive_steps": stats.reactive_steps, "reason": stats.reason}
        row["phase_seconds"] = dict(stats.seconds)
    if turn.shares and side.device == "cuda":
        torch.cuda.empty_cache()
    return row


def memory(side: Side, library: Managed | None) -> dict[str, Any]:
    """Bytes, as torch, the driver and the session count them."""
    row: dict[str, Any] = {}
    if side.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        row |= {
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "device_free_bytes": free,
            "device_bytes": total,
        }
        found = gc.get_objects()
        row["mapped_bytes"] = sum(o.mapped_bytes for o in found if isinstance(o, DeviceAddresses))
        row["pinned_bytes"] = sum(o.pinned_bytes for o in found if isinstance(o, PinnedSpace))
    if library is not None:
        row["foreseen_peak_bytes"] = dict(library.session.stats().peak)
    return row


@contextmanager
def _profiled(turn: Turn, side: Side) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    if turn.trace is None or side.device != "cuda":
        yield row
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield row
    events = [e for e in profile.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    row["profile"] = busy([(e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events])
    turn.trace.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(turn.trace))


def busy(events: list[tuple[int, int, str]]) -> dict[str, Any]:
    """How much of the time from the first kernel to the last a kernel runs, and a copy each way. Events: start, end (ns), name."""
    kinds = {"kernels": list[tuple[int, int]](), "up": [], "down": []}
    for start, end, name in events:
        if not name.startswith("Mem"):
            kinds["kernels"].append((start, end))
        elif "HtoD" in name:
            kinds["up"].append((start, end))
        elif "DtoH" in name:
            kinds["down"].append((start, end))
    if not kinds["kernels"]:
        return {"kernels": 0}
    begin, over = min(s for s, _ in kinds["kernels"]), max(e for _, e in kinds["kernels"])
    longest: dict[str, int] = {}
    for start, end, name in events:
        longest[name[:90]] = longest.get(name[:90], 0) + end - start
    top = sorted(longest.items(), key=lambda item: -item[1])[:25]
    return {
        "span_seconds": (over - begin) / 1e9,
        **{f"{kind}_share": _union(spans) / (over - begin) for kind, spans in kinds.items()},
        "kernels": len(kinds["kernels"]),
        "longest_seconds": {name: ns / 1e9 for name, ns in top},
    }


def _union(spans: list[tuple[int, int]]) -> int:
    total, last = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, last))
        last = max(last, end)
    return total


# sides


@contextmanager
def plain(side: Side) -> Iterator[tuple[Step, None]]:
    """Weights in bf16, masters and moments in fp32, all where torch computes; updated as gradients arrive, or after backward."""
    with side.place:
        torch.set_default_dtype(torch.bfloat16)
        model = Decoder(side.shape)
        torch.set_default_dtype(torch.float32)
    masters = {p: p.detach().float() for p in model.parameters()}
    optimizers = {p: torch.optim.AdamW([master], lr=RATE, fused=True) for p, master in masters.items()}

    @torch.no_grad()
    def update(p: Tensor) -> None:
        assert p.grad is not None
        masters[p].grad, p.grad = p.grad.float(), None
        optimizers[p].step()
        masters[p].grad = None
        p.copy_(masters[p])

    if side.step == "in_backward":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        if side.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if side.step != "in_backward":
            for p in model.parameters():
                update(p)
        return loss

    yield step, None


class Managed:
    """The library. A budget that is refused at once, or in the first step, is followed by the next of the side's."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._left = list(side.device_memory)
        self._stepped = False
        self.session: Any = None
        self.refusals = list[str]()
        self._build(0)

    def step(self, tokens: Tensor) -> Tensor:
        """A step, as any loop takes it."""
        while True:
            try:
                loss: Tensor = self._model(tokens, tokens.roll(-1, 1))
                loss.backward()
                self.session.optimizer.step()
                self.session.optimizer.zero_grad()
            except patrickstar.BudgetError as refusal:
                if self._stepped or not self._left:
                    raise
                self.refusals.append(str(refusal))
                loss = None  # type: ignore[assignment]  # its graph holds what was taken
                self.close()
                self._build(int(1.02 * (refusal.smallest_bytes or 0)))
                continue
            self._stepped = True
            return loss

    def close(self) -> None:
        """Ends the session, if there is one."""
        if self.session is not None:
            self.session.close(keep_weights=False)
            self.session = None

    def _build(self, least: int) -> None:
        side = self._side
        while self._left:
            device_memory = self._left.pop(0)
            if isinstance(device_memory, int):
                device_memory = max(device_memory, least)
            with patrickstar.deferred_init():
                self._model = Decoder(side.shape)
            try:
                self.session = patrickstar.manage(
                    self._model,
                    torch.optim.AdamW(self._model.parameters(), lr=RATE),
                    device=side.device,
                    precision="bf16",
                    step=side.step,
                    max_grad_norm=1.0 if side.clips else None,
                    device_memory=device_memory,
                    host_memory=side.host_memory,
                    options=patrickstar.Options(stress_seed=side.stress_seed),
                )
            except patrickstar.BudgetError as refusal:
                self.refusals.append(str(refusal))
                continue
            return
        raise NotMeasuredError(f"no budget fits: {self.refusals}")


@contextmanager
def managed(side: Side) -> Iterator[tuple[Step, Managed]]:
    """The library, with the first of the side's budgets that trains."""
    library = Managed(side)
    try:
        yield library.step, library
    finally:
        library.close()


_SIDES: Final = {"plain": plain, "managed": managed, "fsdp2": fsdp2, "deepspeed": deepspeed}
