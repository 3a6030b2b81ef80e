"""A toy owner for the binding: few slots that move and are poisoned, so that whatever reads a stale byte reads NaN."""

from __future__ import annotations

import copy
import mmap
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from patrickstar.core.formats import FP32, SessionFormats
from patrickstar.core.layout import Layout, TensorSpec, build_layout
from patrickstar.core.planes import GradientUse, PlaneRef
from patrickstar.core.trace import Touch
from patrickstar.deferred.deferred_init import deferred_by
from patrickstar.memory.leases import AssembledKey, CopyKey, Leases
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import Owner
from patrickstar.plan.touches import Touches
from patrickstar.torch_private import Plain


class NoSlot(Exception):
    pass


class ToyOwner(Owner):
    """Homes outside, `slots` slots inside. Evicts the longest unused unit, never into the same slot, and poisons what it leaves."""

    def __init__(self, model: nn.Module, *, slots: int, chunk_numel: int) -> None:
        named = dict(model.named_parameters())
        self.layout: Layout = build_layout(
            [TensorSpec(n, tuple(p.shape)) for n, p in named.items()], chunk_numel=chunk_numel
        )
        self.numel = chunk_numel
        longest = max(run.length for run in self.layout.runs)
        # Every slot is as long as the longest run: the toy has no adjacency.
        self.slot_numel = chunk_numel * longest
        self.memory = mmap.mmap(-1, (slots + 1) * self.slot_numel * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.slots = slots
        self.resident: dict[PlaneRef, int] = {}
        self.last_used: dict[PlaneRef, int] = {}
        self.dirty: set[PlaneRef] = set()
        self.last_given, self.fetches, self.clock = -1, 0, 0
        self.gradients: dict[str, Tensor] = {}
        self.firings: Counter[str] = Counter()
        self.escapes: list[PlaneRef] = []
        touches = Touches(self.layout, GradientUse.CHUNK, named.__contains__, SessionFormats(FP32))
        self.binding = Binding(named, self, leases=Leases(self.wrap), touches=touches)
        self.homes = {PlaneRef(run.head, "weight"): torch.zeros(self.slot_numel) for run in self.layout.runs}
        for bound in self.binding:
            bound.over(self.homes[bound.ref]).copy_(bound.parameter.data)
        self.binding.let_go()

    def slot(self, index: int) -> Tensor:
        return torch.frombuffer(
            self.memory, dtype=torch.float32, count=self.slot_numel, offset=index * self.slot_numel * 4
        )

    def use(self, label: str, touches: Sequence[Touch]) -> None:
        refs = [touch.ref for touch in touches]
        held = set(self.binding.leases.held()) | set(refs)
        for ref in refs:
            self.clock += 1
            self.last_used[ref] = self.clock
            if ref in self.resident:
                continue
            while len(self.resident) >= self.slots:
                victims = [other for other in self.resident if other not in held]
                if not victims:
                    raise NoSlot(f"{label}: {sorted(held)} in {self.slots} slots")
                self.evict(min(victims, key=lambda other: self.last_used[other]))
            free = [index for index in range(self.slots + 1) if index not in self.resident.values()]
            index = next((index for index in free if index != self.last_given), free[0])
            self.slot(index).copy_(self.homes[ref])
            self.resident[ref] = index
            self.fetches += 1

    unpack = use

    def evict(self, ref: PlaneRef) -> None:
        index = self.resident.pop(ref)
        if ref in self.dirty:
            self.homes[ref].copy_(self.slot(index))
            self.dirty.discard(ref)
        self.slot(index).fill_(float("nan"))
        self.last_given = index

    def wrap(self, ref: PlaneRef) -> Tensor:
        with torch.inference_mode(False):
            return self.slot(self.resident[ref])

    def make_copy(self, key: CopyKey) -> Tensor:
        assert isinstance(key, AssembledKey), f"{key} is not copied"
        with torch.inference_mode(False):
            return self.gradients[key.name].reshape(-1).clone()

    def renew(self, key: str | AssembledKey, copy: Tensor) -> None:
        assert isinstance(key, AssembledKey), f"{key} is not copied"
        copy.copy_(self.gradients[key.name].view(-1))

    def changed(self, ref: PlaneRef) -> None:
        self.dirty.add(ref)

    def escaped(self, ref: PlaneRef) -> None:
        self.escapes.append(ref)

    def gradient(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        self.firings[name] += 1
        if name in self.gradients:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name] = gradient.clone()
        self.binding.assembled.changed(AssembledKey(name, "grad"))

    def has_gradient(self, name: str) -> bool:
        return name in self.gradients

    def drop_gradient(self, name: str) -> None:
        self.gradients.pop(name, None)
        self.binding.assembled.dropped(AssembledKey(name, "grad"), "it was released")

    def assembled_changed(self, key: AssembledKey, *, wholly: bool) -> None:
        self.gradients[key.name].view(-1).copy_(self.binding.leases.take_copy(key, self.make_copy))

    def values(self, name: str) -> Tensor:
        bound = self.binding.by_name[name]
        if bound.ref in self.dirty and bound.ref in self.resident:
            return bound.over(self.slot(self.resident[bound.ref])).clone()
        return bound.over(self.homes[bound.ref]).clone()


def raw_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    with Plain():
        return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    slots: int,
    chunk_numel: int,
    steps: int = 2,
    moves: bool = True,
) -> ToyOwner:
    """Losses and all gradients, bit for bit, of a managed model and a plain copy of it. Something must have moved."""
    torch.manual_seed(0)
    plain = build()
    managed = copy.deepcopy(plain)
    owner = ToyOwner(managed, slots=slots, chunk_numel=chunk_numel)
    for step in range(steps):
        losses = []
        for model in (plain, managed):
            torch.manual_seed(step)
            loss = loss_of(model)
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        want = raw_gradients(plain)
        assert set(owner.gradients) == {name for name, gradient in want.items() if gradient is not None}
        for name, gradient in want.items():
            assert gradient is None or torch.equal(gradient, owner.gradients[name]), name
        assert all(gradient is None for gradient in raw_gradients(managed).values())
    if moves:
        assert owner.fetches > len(owner.layout.runs), "a run in which nothing moved proves nothing"
    assert not owner.binding.leases.held(), "a lease outlived its use"
    return owner


def initial_value(parameter: Tensor) -> Tensor:
    """A parameter's values: its data, or, built under `deferred_init()`, a tensor that is made now."""
    recorder = deferred_by(parameter)
    return parameter.data if recorder is None else recorder.value(parameter)
