"""A block that runs alone, with fresh inputs and parameters of its own: what it does is told for others. Note [Repeated blocks] in `repeats.py`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from patrickstar.core.layout import Layout, Run, Slice, aligned
from patrickstar.core.planes import EXP_AVG, GRAD
from patrickstar.core.trace import Moment, Phase
from patrickstar.parameters.bound import BoundParameter
from patrickstar.plan.recorder import TraceRecorder
from patrickstar.torch_private import call_without_hooks_of_all_modules
from patrickstar.tracing.block_kinds import PLAIN, BoundTwin, Member
from patrickstar.tracing.missing import MissingOperations
from patrickstar.tracing.trial_values import KnownValues
from patrickstar.tracing.twin import Twin, Unlike

Bind = Callable[[str, Collection[str], Layout, Collection[str]], BoundTwin]
"""Makes a twin of the block at a path, with the parameters of these names in a layout, and with these blocks in it bound at once."""


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor but for its values: how it lies in its storage, and the size of that."""

    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def is_all(self) -> bool:
        """True where the tensor takes all of its storage."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return not self.offset and self.nbytes == (last + 1 if all(self.shape) else 0) * self.dtype.itemsize

    def make(self) -> Tensor:
        """A fresh tensor like this one."""
        if self.is_all:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride, self.offset)


Likes = tuple[Like | None, ...]


def likes_of(tensors: Iterable[Tensor | None]) -> Likes:
    """The forms of tensors. Raises Unlike where there is more to one than its form, or two share memory."""
    found: list[Like | None] = []
    storages = set[int]()
    for one in tensors:
        if one is None:
            found.append(None)
            continue
        is_plain = type(one) is FakeTensor and one.layout is torch.strided and not one.is_inference()
        if not is_plain or one.is_conj() or one.is_neg() or one.untyped_storage()._cdata in storages:
            raise Unlike("a tensor is no plain one, or shares memory")
        storages.add(one.untyped_storage()._cdata)
        form = tuple(one.shape), one.stride(), int(one.storage_offset()), one.dtype, one.device, one.requires_grad
        found.append(Like(one.untyped_storage().nbytes(), *form))
    return tuple(found)


def fresh(likes: Likes) -> list[Any]:
    """Fresh tensors of these forms."""
    return [None if like is None else like.make() for like in likes]


@dataclass(frozen=True, slots=True)
class _At:
    """The place of a tensor in arguments or an output: its number among all."""

    number: int


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value in which each leaf of lists, tuples and dicts is changed."""
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return {key: mapped(item, change) for key, item in value.items()} if type(value) is dict else change(value)


def mark(tensors: list[Tensor], leaf: Any) -> Any:
    """Gives the mark of a tensor, which is noted once; any other leaf as it is."""
    if not isinstance(leaf, Tensor | PLAIN):
        raise Unlike("an object")
    if not isinstance(leaf, Tensor):
        return leaf
    for number, tensor in enumerate(tensors):
        if tensor is leaf:
            return _At(number)
    tensors.append(leaf)
    return _At(len(tensors) - 1)


def put(marked: Any, tensors: Sequence[Tensor]) -> Any:
    """A structure with tensors in the place of marks."""
    return mapped(marked, lambda leaf: tensors[leaf.number] if isinstance(leaf, _At) else leaf)


class Alone:
    """A block that runs alone: its forward, and then its backward, as often as there are others.

    Attributes:
        forward: its moments, between two marks. output: its structure. made: forms of what it makes. uses, apart: counts of uses, by parameter.
        held: numbers of the inputs, and after them of what it makes, that it holds for its backward. saved_bytes: what else it holds.
        numbers: of its parameters. has_backward: whether it has one.
    """

    def __init__(
        self,
        kind: Sequence[Member],
        given: Any,
        likes: Likes,
        contents: Sequence[Any],
        *,
        bind: Bind,
        values: KnownValues,
        missing: MissingOperations,
    ) -> None:
        self._one, records = kind[0], kind[0].records
        self._make = partial(bind, self._one.path, [bound.name for bound in records], _layout_of(records))
        pairs = [zip(self._one.traits, other.traits, strict=True) for other in kind[1:]]
        self._varied = {mine[0] for pair in pairs for mine, theirs in pair if mine != theirs}
        self._values = values
        self._missing = missing
        self._arguments = given, likes, contents
        self._passing: Sequence[Tensor | None] = ()
        self._backwards: dict[Any, tuple[tuple[Moment, ...], Likes]] = {}
        self.numbers = {bound.name: number for number, bound in enumerate(records)}
        self._begin()
        counts, size = self._owner.touches.counts, self._owner.meter.size
        self.uses, self.apart = ([n.get(bound.name, 0) for bound in records] for n in (counts.uses, counts.apart))
        self.has_backward = self._done is not None
        grown = self.forward[-1].live_bytes - self.forward[0].live_bytes
        if grown != self.saved_bytes + sum(size(like.nbytes) for like in self.made if like):
            raise Unlike("it keeps what it has made")
        if self.has_backward:  # most probably it will be this one; where it cannot be told, that is known now
            wanted = tuple(like for like in self.made if like and like.requires_grad)
            self.backward(wanted, [False] * (len(self.held) + len(wanted)))

    def _begin(self) -> None:
        """Runs the forward, on a fresh twin."""
        twin = self._make([""] if self._one.is_bound else [])
        # Its backward opens the blocks, for as long as somebody has them.
        self._owner, self._blocks = twin.owner, twin.blocks
        self._outgoing: Likes | None = None
        for path, name in self._varied:
            vars(twin.module.get_submodule(path))[name] = _Unseen()
        with self._shown():
            self._done = self._forward(twin, *self._arguments)
        living = [(number, storage) for number, storage in enumerate(self._storages) if storage() is not None]
        self.held, self._held = [number for number, _ in living], [storage for _, storage in living]
        self.saved_bytes = self._owner.meter.live - self._bytes_of(storage() for storage in self._held)
        self.forward = self._moments()

    def _forward(self, twin: BoundTwin, given: Any, likes: Likes, contents: Sequence[Any]) -> Tensor | None:
        """Gives what the backward begins with. After this nobody else holds inputs and outputs."""
        tensors = fresh(likes)
        for tensor, content in zip(tensors, contents, strict=True):
            self._values.know_as(tensor, content)
        wanting = [number for number, like in enumerate(likes) if like and like.requires_grad]
        if wanting and torch.is_grad_enabled():
            self._passing = tuple(tensors[number] for number in wanting)
            for number, tensor in zip(wanting, Node.apply(self._passed, self._leave, anchor(self._owner)), strict=True):
                tensors[number] = tensor
        args, kwargs = put(given, tensors)

        def state() -> list[Any]:
            versions = [tensor._version for tensor in tensors[: len(likes)]]
            return [self._values.asked, *versions, *map(id, attributes), *map(id, _attributes(twin.module))]

        attributes = [*_attributes(twin.module)]  # alive, so that no other object is in the same place
        before = state()
        done: Tensor | None = twin.blocks.call(twin.module, partial(self._result, twin.module, tensors, args, kwargs))
        if before != state():
            raise Unlike("it asks for values, or changes its inputs or itself")
        return done

    def _result(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Tensor | None:
        """Calls the block between two marks; gives what its backward begins with."""
        count = len(tensors)
        self._mark()
        output = call_without_hooks_of_all_modules(module, *args, **kwargs)
        self._mark()
        self.output = mapped(output, partial(mark, tensors))
        self.made = likes_of(tensors)[count:]
        self._storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        made = tensors[count:]
        for tensor, like in zip(made, self.made, strict=True):
            is_known = self._owner.leases.locate(tensor) or self._values.content(tensor)
            if is_known is not None or tensor._is_view() or not (like and like.is_all):
                raise Unlike("it gives views, or values")
        made = [tensor for tensor in made if tensor.requires_grad]
        return Node.apply(self._anchor, self._enter, *made) if made else None

    def backward(self, likes: Likes, outside: Sequence[bool]) -> tuple[tuple[Moment, ...], Likes]:
        """Moments of a backward from gradients of these forms, between two marks, and forms of the inputs' gradients.

        `outside`: which of what the block holds, and of these gradients, others hold for longer.
        """
        forms = tuple(like and replace(like, requires_grad=False) for like in likes)
        key = forms, tuple(outside)
        if key not in self._backwards:
            try:
                if self._done is None:
                    with torch.enable_grad():
                        self._begin()
                self._backwards[key] = self._backward(forms, outside)
            except Exception as problem:
                raise Unlike(str(problem)) from problem
        return self._backwards[key]

    def _backward(self, likes: Likes, outside: Sequence[bool]) -> tuple[tuple[Moment, ...], Likes]:
        done, self._done, owner = self._done, None, self._owner
        assert done is not None
        with self._shown():
            self._passing = fresh(likes)
            given = (one.untyped_storage() for one in self._passing if one is not None)
            there = zip([*(storage() for storage in self._held), *given], outside, strict=True)
            kept = [storage for storage, stays in there if stays]
            del there
            owner.recorder = TraceRecorder(owner.meter)
            done.backward(self._anchor())
        if self._outgoing is None:
            self._leave()
        moments, outgoing = self._moments(), self._outgoing or ()
        left = self._bytes_of(kept) + sum(owner.meter.size(like.nbytes) for like in outgoing if like)
        if moments[-1].live_bytes != left or not all(like.is_all for like in outgoing if like):
            raise Unlike("it keeps what it has made")
        return moments, outgoing

    def _enter(self, *_: Any) -> Sequence[Tensor | None]:
        self._mark()
        return self._passed()

    def _leave(self, *gradients: Tensor | None) -> Sequence[None]:
        self._outgoing = likes_of(gradients)
        self._mark()
        return (None,)

    def _passed(self) -> Sequence[Tensor | None]:
        """Gives what goes in, inputs or gradients, which nobody else has any more."""
        passing, self._passing = self._passing, ()
        return passing

    def _anchor(self) -> Tensor:
        return anchor(self._owner).detach()

    def _mark(self) -> None:
        """Makes a mark between moments."""
        self._owner.recorder.moment(Phase.STEP, "", (), ())

    def _moments(self) -> tuple[Moment, ...]:
        """The moments between two marks, and these. Unlike: they cannot be told."""
        moments = self._owner.recorder.trace().moments
        first, last = [at for at, moment in enumerate(moments) if moment.phase is Phase.STEP]
        arrived = set[int]()
        for at, moment in enumerate(moments[first + 1 :], first + 1):
            if is_arrival(moment):
                arrived.add(moment.touches[0].ref.chunk)
            is_let_go = self._one.is_bound and any(ref.chunk in arrived for ref in moment.held)
            is_use = at != last and not is_arrival(moment)
            is_told = not (self._one.is_bound or any(touch.writes for touch in moment.touches))
            if at > last or is_let_go or (is_use and not is_told):
                raise Unlike("it changes a parameter, holds one whose gradient has come, or goes on when it is over")
        return moments[first : last + 1]

    def _bytes_of(self, storages: Iterable[torch.UntypedStorage | None]) -> int:
        return sum(self._owner.meter.size(storage.nbytes()) for storage in storages if storage is not None)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """A context in which operations show to the meter of this block alone."""
        seer, self._missing.seer = self._missing.seer, self._owner.meter
        try:
            yield
        finally:
            self._missing.seer = seer


def is_arrival(moment: Moment) -> bool:
    """Tells whether a moment is about a gradient that has come."""
    return any(touch.ref.plane in (GRAD, EXP_AVG) for touch in moment.touches)


def _attributes(block: nn.Module) -> Iterator[Any]:
    """Gives what modules have as attributes, and what is in containers there."""
    for module in block.modules():
        for value in vars(module).values():
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, list | set) else ()


def _layout_of(records: Sequence[BoundParameter]) -> Layout:
    """A layout in which each parameter has a chunk."""
    sizes = {bound.name: bound.shape_only.numel() for bound in records}
    runs = tuple(Run(number, 1, (name,)) for number, name in enumerate(sizes))
    slices = {name: Slice(name, number, 0, numel) for number, (name, numel) in enumerate(sizes.items())}
    return Layout(aligned(max(1, *sizes.values())), runs, slices)


def anchor(owner: Twin) -> Tensor:
    """A number that has a gradient, and counts as a slot."""
    with owner.uncounted():
        return torch.empty((), device=owner.device, requires_grad=True)


class Node(torch.autograd.Function):
    """A node of autograd's graph. `make`: gives its outputs; `take`: is given their gradients, and gives those of its inputs."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Any], take: Callable[..., Any], *_: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.take = take
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *ctx.take(*gradients)


class _Unseen:
    """Stands for the number of a block: who looks at it learns that blocks differ."""

    def _refuse(self, *_: Any) -> Any:
        raise Unlike("it asks for its own number")

    __eq__ = __bool__ = __hash__ = __str__ = __repr__ = __format__ = _refuse
