"""Blocks: modules whose parameters are ordinary ones, all at once, for as long as they run.

Note [Blocks]
    People write modules that repeat. While one of them runs, its parameters have their bytes and the plain class, so that whatever PyTorch can do
    inside of it, it can do under management: one moment, with all that the block touches, comes before it. In between they are placeholders,
    bound by use (Note [Binding] in `binding.py`), and so is whatever no block owns. Modules that hold parameters outside of these are blocks too.
    Hooks of saved tensors are on while a block runs: what lies in a slot is packed as where it lies (Note [Saved tensors] in `saved.py`).
    Its backward begins with the backward of an output that the block has made, or with its recomputation where it ran without a graph. From
    then on its parameters have their bytes, and what autograd unpacks is there: one moment again. Each is let go of when its gradient has come, and
    all of them when another block begins, or with the backward. Nothing depends on it: what is unpacked elsewhere is fetched by itself.
    Gradients that are kept, and come one after the other into the same chunk while a block is open, are one moment.
    Which blocks are bound is decided for each kind of forward, before it runs: the outermost whose moments fit, else those inside of them, else none.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from patrickstar.errors import BudgetError, StateError
from patrickstar.hooks import is_called_by_compiled, watch_calls
from patrickstar.parameters.binding import Binding
from patrickstar.parameters.bound import BoundParameter
from patrickstar.parameters.call_order import CallOrder
from patrickstar.parameters.changes import WatchedUse
from patrickstar.parameters.transforms import is_compiled, tensors_in
from patrickstar.parameters.weight_access import Tell
from patrickstar.torch_private import (
    Plain,
    at_end_of_backward,
    backward_id,
    is_compiling,
    never_compile,
    next_sequence_number,
)

_Result = TypeVar("_Result")

FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules with a path that torch takes only where parameters are of no subclass, and that computes other bits."""

WITH_FUSED = (*FUSED, nn.TransformerEncoder)
"""These, and what asks for it on behalf of the layers in it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A block in a model: its path, the names of the parameters in it, the blocks inside of it.

    `repeats`: whether there are others of its kind beside it, or torch has a fused path for it.
    """

    path: str
    names: frozenset[str]
    inner: tuple[Place, ...]
    is_compiled: bool
    repeats: bool

    def without(self, labels: Collection[str]) -> Iterator[Place]:
        """Gives this block or, where it has one of these parameters, the blocks inside of it."""
        if self.is_compiled or self.names.isdisjoint(labels):
            yield self
        else:
            yield from self.inner


def places_in(module: nn.Module, names: Mapping[int, str], prefix: str = "") -> tuple[Place, ...]:
    """The outermost blocks of a model, or of the part of one whose names have a prefix. `names`: of its parameters, by `id()`."""
    found: list[Place] = []
    of_a_class = Counter(map(type, module.children()))
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(module, ParametrizationList)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        inner = () if is_parametrized(child) else places_in(child, names, f"{path}.")
        own = frozenset(names[id(parameter)] for parameter in child.parameters() if id(parameter) in names)
        repeats = isinstance(child, FUSED) or (is_list and of_a_class[type(child)] > 1)
        is_called = not isinstance(child, nn.ParameterList | nn.ParameterDict)
        if own and is_called and (repeats or not inner):
            found.append(Place(path, own, inner, is_compiled(child), repeats))
        else:
            found += inner
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A module that is watched. `records`: of its parameters."""

    path: str
    module: nn.Module
    records: tuple[BoundParameter, ...]


class NotInBlocksError(StateError):
    """A block does something that can be followed only where parameters are bound by use."""


class Blocks:
    """The blocks of a model under management. See Note [Blocks].

    `order`: over ranks, what is told of the calls of its blocks, bound or not. `bound`: paths of those whose parameters are ordinary while they run.
    """

    def __init__(self, model: nn.Module, binding: Binding, order: CallOrder | None = None) -> None:
        never_compile("patrickstar")
        self._order = order
        self._model = model
        self._binding = binding
        self._access = binding.access
        self.bound: frozenset[str] = frozenset()
        self._blocks: dict[int, Block] = {}
        self._watched = ExitStack()
        self._ordinary: dict[BoundParameter, int] = {}  # how many calls have made it so
        self._opened: Block | None = None  # in a backward
        binding.gradients.arrives = partial(Blocks._arrives, weakref.proxy(self))

    def watch(self) -> None:
        """Watches modules that torch computes otherwise where parameters are of a subclass, from now on: these are bound by use."""
        others = () if self._order is None else self._order.blocks
        named = self._model.named_modules()
        self._watch([(path, module) for path, module in named if isinstance(module, WITH_FUSED) or path in others])

    def bind(self, paths: Iterable[str]) -> None:
        """Has these modules be the blocks from now on; whatever a backward has left open is closed."""
        self._access.close()
        paths = frozenset(paths)
        if paths == self.bound:
            return
        self.bound = paths
        modules = [(path, self._model.get_submodule(path)) for path in self.bound]
        self._watch(modules)
        self._access.in_blocks.update(id(parameter) for _, module in modules for parameter in module.parameters())

    def _watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        new = []
        for path, module in modules:
            if id(module) not in self._blocks:
                # A container asks for the class of its first layer's parameters, and leaves their bytes to the layer.
                owner = next(module.get_submodule("layers").children(), module) if _is_container(module) else module
                found = (self._binding.bound(parameter) for parameter in owner.parameters())
                records = tuple(bound for bound in found if bound is not None)
                self._blocks[id(module)] = Block(path, module, records)
                new.append(module)
        # Inside of the hooks of what has a fused path, as torch looks for these; around those of others, which may use parameters.
        fused = [module for module in new if isinstance(module, WITH_FUSED)]
        others = [module for module in new if not isinstance(module, WITH_FUSED)]
        self._watched.enter_context(watch_calls(fused, self, "forward"))
        self._watched.enter_context(watch_calls(others, self, "_call_impl"))

    def expect_compilable(self, modules: Iterable[nn.Module]) -> None:
        """Raises StateError where what runs compiled uses parameters that no block owns: of these, or of the model whose forward begins."""
        if len(self._access.in_blocks) == len(self._binding.by_name):
            return  # blocks own all of them
        called = [self._model] if is_called_by_compiled() else []
        for module in (*called, *filter(is_compiled, modules)):
            by_use = next((p for p in module.parameters() if id(p) not in self._access.in_blocks), None)
            bound = self._binding.bound(by_use)
            if bound is not None:
                raise StateError(
                    f"torch.compile() of {type(module).__name__} cannot see {bound.name}, which lies in chunks, bound by use: no block owns it, "
                    "or none that fits at once. Compile blocks (block.compile()) or functions that are given no parameters, such as the loss, or "
                    "give a larger budget"
                )

    def remove(self) -> None:
        """Watches nothing any more."""
        self._access.close()
        self.bound = frozenset()
        self._watched.close()
        self._blocks.clear()

    def call(self, module: nn.Module, run: Callable[[], _Result]) -> _Result:
        """The result of a call of a module that is watched."""
        block = self._blocks.get(id(module))
        if block is None:
            return run()
        if self._order is None or block.path not in self._order.blocks:
            return self._call(block, module, run)
        self._order.begin_call(block.path, in_backward=backward_id() != -1)
        first_node = next_sequence_number()
        result = self._call(block, module, run)
        nodes = _nodes_of(result, first_node)
        if nodes and backward_id() == -1:
            self._order.await_backward(block.path, first_node)
        for node in nodes:
            begin = weakref.WeakMethod(self._order.begin_backward)
            node.register_prehook(partial(_begins, begin, block.path, first_node))
        return result

    def _call(self, block: Block, module: nn.Module, run: Callable[[], _Result]) -> _Result:
        if block.path not in self.bound and not self._is_ordinary_in(block):
            return run()
        recomputes = backward_id() != -1 and torch.is_grad_enabled()
        try:
            if recomputes:
                self._open(block, self._access.owner.use)
            self._enter(block)
        except BudgetError:
            if block.path not in self.bound or is_compiled(module) or is_compiling():
                raise
            return run()  # there is no room for all at once: by use
        changes = self._binding.changes
        tensors = [bound.tensor() for bound in block.records]
        watched = WatchedUse(type(module).__name__, tensors, [tensor._version for tensor in tensors], {})
        memory = [tensor.untyped_storage()._cdata for tensor in tensors]
        first_node = next_sequence_number()
        try:
            saves = self._binding.saved.around_use(of_block=True) if torch.is_grad_enabled() else nullcontext()
            with saves:
                result = run()
            if module._modules:  # the backward of one without others in it may need nothing of it, as an embedding's
                for node in _nodes_of(result, first_node):
                    node.register_prehook(partial(_begins, weakref.WeakMethod(self.backward_begins), block))
            return result
        finally:
            with Plain():
                try:
                    if not _is_container(module):
                        self._expect_same(block, memory)
                        changes.tell(watched)
                finally:
                    self._leave(block)

    def _expect_same(self, block: Block, memory: Sequence[int]) -> None:
        for bound, before in zip(block.records, memory, strict=True):
            if bound.tensor().untyped_storage()._cdata != before:
                raise NotInBlocksError(
                    f"{block.path}: its forward gives {bound.name}.data other memory, which the session does not see. Copy into it, "
                    f"{bound.name}.data.copy_(value)"
                )

    def _is_ordinary_in(self, block: Block) -> bool:
        """Tells whether a call of a block that is not bound has ordinary parameters if it begins now."""
        if not isinstance(block.module, WITH_FUSED):
            return False
        trains = torch.is_grad_enabled() and any(bound.parameter.requires_grad for bound in block.records)
        return not (block.module.training or trains)

    def _enter(self, block: Block) -> None:
        with self._access.lock, Plain():
            if not _is_container(block.module):
                self._access.enter(block.records)
            for bound in block.records:
                self._ordinary[bound] = self._ordinary.get(bound, 0) + 1
            new = [bound for bound in block.records if self._ordinary[bound] == 1]
            for bound in new:
                bound.tensor().__class__ = self._binding.plain_class
            self._binding.gradients.show(new)

    def _leave(self, block: Block) -> None:
        with self._access.lock, Plain():
            for bound in block.records:
                self._ordinary[bound] -= 1
            left = [bound for bound in block.records if not self._ordinary[bound]]
            self._binding.gradients.hide(left)
            for bound in left:
                bound.tensor().__class__ = self._binding.parameter_class
            if not _is_container(block.module):
                self._access.leave(block.records)

    def backward_begins(self, block: Block) -> None:
        """Opens a block, whose backward begins."""
        if block.path in self.bound:
            try:
                self._open(block, self._access.owner.unpack)
            except BudgetError:
                return  # there is no room for all at once: each is fetched where it is needed

    def _open(self, block: Block, tell: Tell) -> None:
        if self._opened is block and self._access.open:
            return
        with self._access.lock, Plain():
            self._access.close()
            leased = self._access.enter(block.records, tell)
            self._opened = block
            self._access.open.update({bound: leased[bound.key] for bound in block.records})
        at_end_of_backward(self._access.close)

    def _arrives(self, bound: BoundParameter) -> None:
        """Takes its bytes from a parameter of the open block whose gradient has come: they are not needed again, and may be updated."""
        del self._access.open[bound]
        self._access.leave([bound])
        for left in self._access.open:
            if left.tensor().requires_grad:
                return
        self._access.close()


def _begins(begin_backward: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    there = begin_backward()
    if there is not None:
        there(*args[:-1])  # the last ones are the gradients


def _nodes_of(result: Any, first_node: int) -> set[Node]:
    """The nodes of autograd that have made a result, from one on. What was only passed on, others have made."""
    parts = vars(result) if is_dataclass(result) else result
    return {
        node
        for tensor in tensors_in(parts)
        if (node := tensor.grad_fn) is not None and node._sequence_nr() >= first_node
    }


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoder)
