"""Kinds of blocks: those of one kind do the same. See Note [Repeated blocks] in `repeats.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from patrickstar.parameters.blocks import WITH_FUSED, Blocks, Place
from patrickstar.parameters.bound import BoundParameter
from patrickstar.torch_private import Undispatched
from patrickstar.tracing.twin import Twin

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device | None
_FEW = 4096  # elements of a buffer that are compared


@dataclass(frozen=True, slots=True, eq=False)
class BoundTwin:
    """A twin of a model or a block, its owner, and its blocks."""

    module: nn.Module
    owner: Twin
    blocks: Blocks


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A block. `is_bound`: at once. `records`: of its parameters. `traits`: what tells its kind, each after its place."""

    path: str
    module: nn.Module
    is_bound: bool
    records: tuple[BoundParameter, ...]
    traits: list[tuple[Any, Any]]

    def is_like(self, other: Member) -> bool:
        """Tells whether two blocks are of one kind."""
        numbers = [(int, int(name) if name.isdigit() else -1) for name in (self._name, other._name)]
        return len(self.traits) == len(other.traits) and all(
            mine == theirs or (mine[0] == theirs[0] and [mine[1], theirs[1]] == numbers)
            for mine, theirs in zip(self.traits, other.traits, strict=True)
        )

    @property
    def _name(self) -> str:
        return self.path.rpartition(".")[2]


def kinds_in(twin: BoundTwin, places: Iterable[Place]) -> Iterator[list[Member]]:
    """Gives the kinds of blocks of which there are several: the outermost ones, and those inside of blocks that are alone."""
    bound = twin.blocks.bound
    level = list(_apart(places, bound))
    while level:
        kinds: list[list[Member]] = []
        alone: dict[Member, Place] = {}
        for place in level:
            member = _member_at(place.path, twin)
            kind = next((kind for kind in kinds if kind[0].is_like(member)), None)
            if kind is None:
                alone[member] = place
                kinds.append([member])
            else:
                alone.pop(kind[0], None)
                kind.append(member)
        yield from (kind for kind in kinds if len(kind) > 1 and kind[0].module._modules)
        level = [inner for one, place in alone.items() if not one.is_bound for inner in _apart(place.inner, bound)]


def _apart(places: Iterable[Place], bound: Collection[str]) -> Iterator[Place]:
    """Gives the places that are bound, or have nothing bound in them."""
    for place in places:
        if place.path in bound or not any(path.startswith(f"{place.path}.") for path in bound):
            yield place
        else:
            yield from _apart(place.inner, bound)


def _member_at(path: str, twin: BoundTwin) -> Member:
    block, binding, updates = twin.module.get_submodule(path), twin.owner.binding, twin.owner.touches.updates
    assert binding is not None
    records: dict[int, BoundParameter] = {}
    known: dict[int, int] = {}
    inside, is_bound = set(block.modules()), path in twin.blocks.bound

    def trait(value: Any) -> Any:
        """Equal for what does the same: plain values and containers of these, tensors of one form, the very same objects."""
        if isinstance(value, PLAIN):
            return type(value), value
        is_new, number = id(value) not in known, known.setdefault(id(value), len(known))
        if isinstance(value, dict | list | tuple | set):
            items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
            return number, type(value), [*map(trait, items)] if is_new else None
        if isinstance(value, nn.Module):
            return number, type(value) if value in inside else object()
        if not isinstance(value, Tensor):
            return number, id(value)
        bound = binding.bound(value)
        if bound is None:
            return number, _form(value)
        records[id(value)] = bound
        is_odd = bound.tiles or (is_bound and isinstance(block, WITH_FUSED))
        more = object() if is_odd else (updates(bound.name), bound.is_copied, value.requires_grad)
        return number, _form(bound.shape_only), more

    traits = [
        ((at, name), trait(value))
        for at, module in block.named_modules()
        for name, value in {**vars(module), "__class__": type(module)}.items()
        if name != "_call_impl" and name not in HOOKS
    ]
    return Member(path, block, is_bound, tuple(records.values()), [*traits, ("", is_bound)])


def _form(tensor: Tensor) -> Any:
    """Equal for tensors of one form and, where they have values, of the same values."""
    more: Any = object()  # like no other
    if tensor.is_meta or (type(tensor) is FakeTensor and not tensor.requires_grad):
        more = None
    elif type(tensor) is Tensor and tensor.numel() <= _FEW:
        with Undispatched():
            more = tensor.tolist()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, more
