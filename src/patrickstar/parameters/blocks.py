"""Blocks: modules that a model repeats, whose parameters are ordinary ones, all at once, for as long as they run.

Note [Blocks]
    People write modules that repeat. While one of them runs, its parameters have their bytes and the plain class, so that whatever PyTorch can do
    inside of it, it can do under management: one moment, with all that the block touches, comes before it. In between they are placeholders,
    bound by use (Note [Binding] in `binding.py`), and so is whatever no block owns.
    Hooks of saved tensors are on while a block runs: what lies in a slot is packed as where it lies (Note [Saved tensors] in `saved.py`).
    Its backward begins with the backward of an output that the block has made, or with its recomputation where it ran without a graph. From
    then on its units are held, and what autograd unpacks is there: one moment again. That ends when all its gradients have come, when another block
    begins, or with the backward. Nothing depends on it: what is unpacked elsewhere is fetched by itself.
    Which blocks are bound is decided for each kind of forward, before it runs: the outermost whose moments fit, else those inside of them, else none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from patrickstar.core.trace import Touch
from patrickstar.errors import BudgetError
from patrickstar.hooks import Watched, watch_calls
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.torch_private import Plain, at_end_of_backward, backward_id, next_sequence_number

__all__ = ["Blocks", "Place", "places_in"]

_Result = TypeVar("_Result")

FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules with a path that torch takes only where parameters are of no subclass, and that computes other bits."""


@dataclass(frozen=True, slots=True)
class Place:
    """A block in a model: its path, the names of the parameters in it, and the blocks inside of it."""

    path: str
    names: frozenset[str]
    inner: tuple[Place, ...]

    def without(self, labels: Collection[str]) -> Iterator[Place]:
        """This block or, where it has one of these parameters, the blocks inside of it."""
        if self.names.isdisjoint(labels):
            yield self
        else:
            yield from self.inner


def places_in(model: nn.Module, names: Mapping[int, str]) -> tuple[Place, ...]:
    """The outermost blocks of a model. `names`: of its parameters, by `id()`."""
    return tuple(_places_in(model, "", names))


def _places_in(module: nn.Module, prefix: str, names: Mapping[int, str]) -> Iterator[Place]:
    of_a_class: dict[type, int] = {}
    for child in module.children():
        of_a_class[type(child)] = of_a_class.get(type(child), 0) + 1
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(module, ParametrizationList)
    for name, child in module.named_children():
        path, inner = f"{prefix}{name}", tuple(_places_in(child, f"{prefix}{name}.", names))
        own = frozenset(names[id(parameter)] for parameter in child.parameters() if id(parameter) in names)
        if own and ((is_list and of_a_class[type(child)] > 1) or isinstance(child, FUSED)):
            yield Place(path, own, inner)
        else:
            yield from inner


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A module that is watched. `records`: of its parameters; `touches`: their units."""

    path: str
    module: nn.Module
    records: tuple[BoundParameter, ...]
    touches: tuple[Touch, ...]


class Blocks:
    """The blocks of a model under management. See Note [Blocks].

    Attributes:
        bound: paths of the blocks whose parameters are ordinary ones while they run.
    """

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        self._model = model
        self._binding = binding
        self._access = binding.access
        self.bound: frozenset[str] = frozenset()
        self._blocks: dict[int, Block] = {}
        self._watched: list[Watched] = []
        self._ordinary: dict[BoundParameter, int] = {}  # how many calls have made it so
        self._opened: Block | None = None  # in a backward
        self._to_come: set[str] = set()  # gradients of that
        binding.gradients.arrived = partial(Blocks._arrived, weakref.proxy(self))

    def watch(self) -> None:
        """Watches modules that torch computes otherwise where parameters are of a subclass, from now on: these are bound by use."""
        kinds = (*FUSED, nn.TransformerEncoder)
        self._watch([(path, module) for path, module in self._model.named_modules() if isinstance(module, kinds)])

    def bind(self, paths: Iterable[str]) -> None:
        """Has these modules be the blocks from now on; whatever a backward has left open is closed."""
        self.close()
        self.bound = frozenset(paths)
        self._watch([(path, self._model.get_submodule(path)) for path in self.bound])

    def _watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        new = []
        for path, module in modules:
            if id(module) not in self._blocks:
                # A container asks for the class of its first layer's parameters, and leaves their bytes to the layer.
                owner = next(module.get_submodule("layers").children(), module) if _is_container(module) else module
                found = (self._binding.bound(parameter) for parameter in owner.parameters())
                records = tuple(bound for bound in found if bound is not None)
                touches = tuple(sorted({touch for bound in records for touch in bound.touches}))
                self._blocks[id(module)] = Block(path, module, records, touches)
                new.append(module)
        for method in ("forward", "_call_impl"):  # torch looks for hooks of the former; of the others, hooks belong to the call
            kinds = [module for module in new if isinstance(module, (*FUSED, nn.TransformerEncoder)) == (method == "forward")]
            self._watched.append(watch_calls(kinds, self, method))

    def remove(self) -> None:
        """Watches nothing any more."""
        self.close()
        self.bound = frozenset()
        for watched in self._watched:
            watched.remove()
        self._watched.clear()
        self._blocks.clear()

    # calls

    def call(self, module: nn.Module, run: Callable[[], _Result]) -> _Result:
        """The result of a call of a module that is watched."""
        block = self._blocks.get(id(module))
        if block is None or not self._is_ordinary_in(block):
            return run()
        recomputes = backward_id() != -1 and torch.is_grad_enabled()
        try:
            if recomputes:
                self._open(block, self._access.owner.use)
            self._enter(block, is_there=recomputes)
        except BudgetError:
            if block.path not in self.bound:
                raise
            return run()  # there is no room for all at once: by use
        changes = self._binding.changes
        watched = changes.watch_call(type(module).__name__, [bound.parameter for bound in block.records])
        first_node = next_sequence_number()
        try:
            with self._binding.saved.around_use() if torch.is_grad_enabled() else nullcontext():
                result = run()
            self._await_backward(block, result, first_node)
            return result
        finally:
            with Plain():
                try:
                    if not _is_container(module):
                        changes.tell(watched)
                finally:
                    self._leave(block)

    def _is_ordinary_in(self, block: Block) -> bool:
        """Tells whether a call of a block that begins now has ordinary parameters."""
        if block.path in self.bound:
            return True
        if not isinstance(block.module, (*FUSED, nn.TransformerEncoder)):
            return False
        trains = torch.is_grad_enabled() and any(bound.parameter.requires_grad for bound in block.records)
        return not (block.module.training or trains)

    def _enter(self, block: Block, *, is_there: bool) -> None:
        with self._access.lock, Plain():
            if not _is_container(block.module):
                self._access.enter(block.records, is_there=is_there)
            for bound in block.records:
                self._ordinary[bound] = self._ordinary.get(bound, 0) + 1
                self._binding.make_ordinary(bound)

    def _leave(self, block: Block) -> None:
        with self._access.lock, Plain():
            for bound in block.records:
                self._ordinary[bound] -= 1
                if not self._ordinary[bound]:
                    del self._ordinary[bound]
                    self._binding.make_managed(bound)
            if not _is_container(block.module):
                self._access.leave(block.records)

    # backwards

    def _await_backward(self, block: Block, result: Any, first_node: int) -> None:
        """Has the block open with the backward of the first of its outputs. What it only passes on, others have made."""
        nodes = {tensor.grad_fn for tensor in _tensors_in(result) if tensor.grad_fn is not None}
        for node in nodes:
            if node._sequence_nr() >= first_node:
                node.register_prehook(partial(_backward_begins, weakref.ref(self), block))

    def backward_begins(self, block: Block) -> None:
        """Opens a block, whose backward begins."""
        if block.path in self.bound:
            try:
                self._open(block, self._access.owner.unpack)
            except BudgetError:
                return  # there is no room for all at once: each is fetched where it is needed

    def _open(self, block: Block, tell: Callable[[str, tuple[Touch, ...]], None]) -> None:
        if self._opened is block:
            return
        access = self._access
        with access.lock, Plain():
            self.close()
            tell(block.records[0].name, block.touches)
            access.open.update((touch.ref, access.leases.take(touch.ref)) for touch in block.touches)
            self._opened = block
            self._to_come = {bound.name for bound in block.records if bound.parameter.requires_grad}
        at_end_of_backward(self.close)

    def _arrived(self, bound: BoundParameter) -> None:
        """Notes that a gradient has come."""
        self._to_come.discard(bound.name)
        if self._opened is not None and not self._to_come:
            self.close()

    def close(self) -> None:
        """Closes the block that a backward has opened, if there is one: its units may move."""
        self._opened = None
        self._access.open.clear()


def _backward_begins(blocks: weakref.ref[Blocks], block: Block, *_: Any) -> None:
    there = blocks()
    if there is not None:
        there.backward_begins(block)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoder)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
