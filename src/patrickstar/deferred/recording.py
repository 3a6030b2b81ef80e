"""Records what a model's construction does, and keeps its parameters out of memory meanwhile.

Note [Deferred]
    Everything that is made is ordinary until a module registers it as a parameter: buffers, masks and intermediate tensors are real, and what
    depends on their values just works. A registered parameter's memory is let go. Its storage is then address space that is never touched, so
    that views, shapes and strides stay real; operations on it are written down (Note [Recipes]).
    What draws random numbers is also carried out, once, on memory of the same shape: the generator is left as it would be. The values of the
    parameter touched last are kept *in hand*: rejection sampling (`trunc_normal_`) looks at what it has drawn.
    While modules are built, parameters are `nn.Parameter` itself, and `deferred_init()` sees what is done with aliases before their class does.
    Afterwards the classes let nobody read or write values that are not there. They are made for one context each.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from patrickstar.deferred import recipe
from patrickstar.deferred.recipe import Call, Cell, Storages, is_dense, is_plain, operand, over, room
from patrickstar.errors import LayoutError, StateError
from patrickstar.memory.allocator import release_free_memory
from patrickstar.parameters.functions import NEEDS_NO_DATA, SHAPE_ONLY, accessor, written_by
from patrickstar.torch_private import Plain, Unseen
from patrickstar.units import KIB, MIB, format_bytes

_CONSTANT_BYTES = 64 * KIB  # of values that no recorded operation has made: up to here they are kept
_RELEASE_BYTES = 32 * MIB
_COPY = "a copy of a parameter"
_ELSEWHERE = "values that torch's operations have not made (NumPy, a file)"
Known = Mapping[int, Cell]
_DRAWS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
_OVERWRITES = frozenset(f"{name}_" for name in (*_DRAWS, "copy", "fill", "zero"))
_LIKE = frozenset(f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"))
_SHAPE_ONLY = _LIKE | {f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}
_COPIES = frozenset({"clone", "_to_copy"})
_ALLOWED = (
    NEEDS_NO_DATA
    | SHAPE_ONLY
    | {Tensor.requires_grad_, accessor("requires_grad", "__set__")}
    | {accessor("grad", kind) for kind in ("__get__", "__set__", "__delete__")}
)


def unrecordable(label: str, why: str) -> LayoutError:
    """An initialisation that cannot be recorded: of what, and the operation."""
    return LayoutError(
        f"{label} cannot be built under deferred_init(): {why}. Build the model outside of it; or leave this out there, "
        "and give the values with manage(weights=...) or session.write()"
    )


class OperationSignature:
    """An operation's effects on the tensors that it is given, by its schema and its name.

    Attributes:
        is_view: gives tensors over the storages that it is given, and writes to none. draws: random numbers.
        shape_only: of tensors that it is given it looks at shape and type. copies: gives the same values, cast at most.
        overwrites: what it writes to, it writes whole, whatever was there.
    """

    def __init__(self, func: Any) -> None:
        arguments = func._schema.arguments
        aliases = [argument.alias_info for argument in arguments if argument.alias_info is not None]

        self.func = func
        self.name: str = func.overloadpacket.__name__
        # `t_()` and the like change what the tensor is, and not what is in its storage.
        self.is_view = (bool(aliases) and not any(alias.is_write for alias in aliases)) or (
            torch.Tag.inplace_view in func.tags
        )
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.shape_only = self.name in _SHAPE_ONLY
        self.copies = self.name in _COPIES
        self.overwrites = self.name in _OVERWRITES or any(
            argument.name == "out" and argument.alias_info is not None for argument in arguments
        )


class DeferredRecorder(TorchDispatchMode):
    """A recorder of what happens to tensors during one `deferred_init()`, and afterwards the source of its parameters' values."""

    def __init__(self) -> None:
        super().__init__()
        self._parameter_class, self._alias_class = deferred_classes(self)
        self._storages = Storages()
        self._number = 0
        self._freed_bytes = 0
        self._seen: list[weakref.ref[Tensor]] = []
        self._hand: tuple[Cell, torch.UntypedStorage] | None = None

    # parameters

    def register(self, parameter: nn.Parameter, label: str) -> None:
        """A parameter has no memory from now on."""
        with _apart():
            if type(parameter) not in (nn.Parameter, self._alias_class) or not is_plain(parameter):
                return
            cell = self._storages.cell(parameter)
            if cell is None:
                if not parameter.untyped_storage().resizable():
                    raise unrecordable(label, f"it is made of {_ELSEWHERE}")
                return  # made before this context: it stays as it is
            if cell.last is not None:
                if cell.last.lost:
                    raise unrecordable(label, cell.last.lost)
                # What it was made of is its own now (`weight_norm` makes two of one).
                cell.last.parameters = frozenset()
            if not cell.deferred:
                cell.deferred = True
                self._let_go(cell)
                parameter.data = self._storages.without_memory(cell, parameter)
                self._freed_bytes += cell.nbytes
                if self._freed_bytes >= _RELEASE_BYTES:  # from time to time: the allocator is to give it back
                    release_free_memory()
                    self._freed_bytes = 0
            cell.label = cell.label or label
            self._seen.append(weakref.ref(parameter))

    def cell(self, tensor: Tensor) -> Cell | None:
        """The record of a tensor's storage."""
        with _apart():
            return self._storages.cell(tensor)

    def has_no_memory(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is a parameter whose values are recorded, or an alias of one."""
        cell = self.cell(tensor)
        return cell is not None and cell.deferred

    def label(self, tensor: Tensor) -> str:
        """The name of a parameter in messages."""
        cell = self.cell(tensor)
        return (cell.label if cell is not None else "") or _COPY

    def dress(self, result: Any) -> Any:
        """Gives aliases of parameters a class that lets nobody read them after the context."""
        if type(result) is Tensor:
            if self.has_no_memory(result):
                result.__class__ = self._alias_class
                self._seen.append(weakref.ref(result))
        elif type(result) in (list, tuple):
            for item in result:
                self.dress(item)
        return result

    def close(self) -> None:
        """Ends the recording: parameters get their class, and what they do not need is forgotten."""
        for seen in self._seen:
            tensor = seen()
            if tensor is not None and isinstance(tensor, nn.Parameter) and self.has_no_memory(tensor):
                tensor.__class__ = self._parameter_class
                tensor.__dict__.pop("_is_param", None)  # torch marks so what is made of one of our aliases
        self._seen.clear()
        self._hand = None
        self._storages.keep_deferred()
        release_free_memory()

    def value(self, parameter: Tensor) -> Tensor:
        """A parameter's values, made now: a tensor of its shape and strides."""
        with torch.inference_mode(False), _apart():
            cell = self._storages.cell(parameter)
            assert cell is not None, "a parameter without a record"
            return over(recipe.replay(cell), operand(parameter, cell, None))

    def digest(self, parameter: Tensor) -> bytes:
        """The digest of what makes a parameter's values: alike, where these will be."""
        with torch.inference_mode(False), _apart():
            cell = self._storages.cell(parameter)
            return b"" if cell is None else recipe.digest(cell)

    def can_make_in(self, parameter: Tensor, dtype: torch.dtype) -> bool:
        """Tells whether a parameter's values can be made in memory of this type that is theirs, without any other."""
        with _apart():
            cell = self._storages.cell(parameter)
            is_whole = cell is not None and parameter.nbytes == cell.nbytes > 0 and is_dense(parameter)
            return is_whole and cell is not None and recipe.can_replay_in(cell, dtype)

    def make_in(self, parameter: Tensor, place: Tensor) -> None:
        """Makes a parameter's values in a given 1-D tensor, in the order in which the parameter lies in memory."""
        with torch.inference_mode(False), _apart():
            cell = self._storages.cell(parameter)
            assert cell is not None, "a parameter without a record"
            recipe.replay(cell, place)

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with _apart():
            signature = OperationSignature(func)
            if signature.is_view:
                result = func(*args, **kwargs)
                if signature.name == "lift_fresh":
                    self._note_literal(result)
                return result
            leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            known = {id(tensor): cell for tensor in tensors if (cell := self._storages.cell(tensor)) is not None}
            written = written_by(func, args, kwargs)
            whole = signature.overwrites and _covers(written, known)
            call = self._call(signature, leaves, spec, known, blank=written if whole else [])
            changed = {id(known[id(tensor)]): known[id(tensor)] for tensor in written if id(tensor) in known}
            if any(cell.deferred for cell in changed.values()):
                self._write(signature, call, leaves, known, changed.values(), whole=whole)
                return written[0] if func._schema.returns else None
            if signature.copies and any(cell.deferred for cell in known.values()):
                return self._copy(call, func(*args, **kwargs))
            read = () if signature.shape_only else known.values()
            result = _run(call, leaves, known, {id(cell): self._values(cell) for cell in read if cell.deferred})
            self._made(call, result)
            for cell in changed.values():
                cell.last = call
            return result

    def _call(
        self, signature: OperationSignature, leaves: list[Any], spec: Any, known: Known, *, blank: list[Tensor]
    ) -> Call:
        """The record of an operation that is about to be carried out. `blank`: whose contents it does not look at."""
        self._number += 1
        call = Call(self._number, signature.func, (), spec)
        ignored = {id(tensor) for tensor in blank}
        recorded: list[Any] = []
        for leaf in leaves:
            cell = known.get(id(leaf))
            if cell is not None:
                after = None if signature.shape_only or id(leaf) in ignored else cell.last
                recorded.append(operand(leaf, cell, after))
                if after is not None:
                    call.lost = call.lost or after.lost
                    if not signature.copies:
                        call.parameters |= after.parameters | ({cell} if cell.label else set())
            elif isinstance(leaf, Tensor):
                is_ours = is_plain(leaf) and leaf.untyped_storage().resizable()
                if is_ours and leaf.nbytes <= _CONSTANT_BYTES:
                    recorded.append(leaf.detach().clone())
                    continue
                recorded.append(None)
                large = f"{format_bytes(leaf.nbytes)} of values made elsewhere; up to {format_bytes(_CONSTANT_BYTES)} are kept"
                call.lost = call.lost or f"{signature.name}() takes {large if is_ours else _ELSEWHERE}"
            elif isinstance(leaf, torch.Generator):
                recorded.append(leaf.clone_state())
            else:
                recorded.append(leaf)
        if signature.draws and not any(isinstance(leaf, torch.Generator) for leaf in leaves):
            call.random_state = torch.get_rng_state()
        call.leaves = tuple(recorded)
        return call

    def _write(
        self, signature: OperationSignature, call: Call, leaves: list[Any], known: Known, changed: Any, *, whole: bool
    ) -> None:
        """Writes down an operation that changes a parameter in place, and carries it out only where something depends on that."""
        cell, *others = changed
        label, name = cell.label or _COPY, signature.name
        if others:
            raise unrecordable(label, f"{name}() changes several parameters at once")
        if call.lost:
            came_of = "" if call.lost.startswith(name) else f"{name}() takes what comes of this: "
            raise unrecordable(label, came_of + call.lost)
        if read := sorted({found.label for found in call.parameters if found is not cell}):
            raise unrecordable(label, f"{name}() reads the values of another parameter, {read[0]}")
        if whole or any(found.deferred and found is not cell for found in known.values()):
            self._let_go(cell)
        if signature.draws and whole:
            self._hand = None  # before the next: one parameter in memory at a time
            self._hand = (cell, room(cell.nbytes))
        if self._hand is not None and self._hand[0] is cell:
            _run(call, leaves, known, {id(cell): self._hand[1]})
        elif signature.draws:
            blank = {id(found): room(found.nbytes) for found in known.values() if found.deferred}
            _run(call, leaves, known, blank)
        cell.last = call

    def _copy(self, call: Call, result: Tensor) -> Tensor:
        """A parameter as a whole is copied or cast: the copy has no memory either."""
        cell = Cell(result.untyped_storage().nbytes(), call, deferred=True)
        call.makes.append((0, cell))
        return self._storages.without_memory(cell, result)

    def _values(self, cell: Cell) -> torch.UntypedStorage:
        """The values of a parameter so far, for an operation that reads them."""
        if self._hand is None or self._hand[0] is not cell:
            self._hand = None
            self._hand = (cell, recipe.replay(cell))
        return self._hand[1]

    def _let_go(self, cell: Cell) -> None:
        if self._hand is not None and self._hand[0] is cell:
            self._hand = None

    def _made(self, call: Call, result: Any) -> None:
        for place, tensor in enumerate(_pytree.tree_leaves(result)):
            if isinstance(tensor, Tensor) and is_plain(tensor) and self._storages.cell(tensor) is None:
                cell = Cell(tensor.untyped_storage().nbytes(), call)
                call.makes.append((place, cell))
                self._storages.add(tensor.untyped_storage(), cell)

    def _note_literal(self, tensor: Tensor) -> None:
        """`torch.tensor(2.65)`: the numbers stand in the program, and are kept."""
        if is_plain(tensor) and self._storages.cell(tensor) is None and tensor.untyped_storage().resizable():
            leaves, spec = _pytree.tree_flatten(((tensor.detach(),), {}))
            self._made(self._call(OperationSignature(torch.ops.aten.clone.default), leaves, spec, {}, blank=[]), tensor)


def _covers(written: list[Tensor], known: Known) -> bool:
    """Tells whether writing to a tensor leaves nothing of its storage as it was, and no other argument has that storage."""
    if len(written) != 1 or id(written[0]) not in known:
        return False
    cell = known[id(written[0])]
    alone = sum(found is cell for found in known.values()) == 1
    return alone and is_dense(written[0]) and written[0].nbytes == cell.nbytes


def _run(call: Call, leaves: list[Any], known: Known, storages: Mapping[int, torch.UntypedStorage]) -> Any:
    """Carries a call out, with these storages in the place of those without memory."""

    def real(leaf: Any) -> Any:
        cell = known.get(id(leaf))
        return leaf if cell is None or id(cell) not in storages else over(storages[id(cell)], operand(leaf, cell, None))

    args, kwargs = _pytree.tree_unflatten([real(leaf) for leaf in leaves], call.spec)
    return call.func(*args, **kwargs)


@contextmanager
def _apart() -> Iterator[None]:
    """A context for our own operations on tensors: seen by no mode."""
    # Not `inference_mode(False)` as well: below autograd, that would put autograd back on top.
    with Unseen(), _disable_current_modes(), torch.no_grad():
        yield


def deferred_classes(recorder: DeferredRecorder) -> tuple[type[Any], type[Any]]:
    """Classes for the parameters of one recorder, and for views of them, which let nobody read what is not there."""

    class Deferred:
        __slots__ = ()
        deferred_by = recorder
        _kind: str

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in _ALLOWED:
                ours: Any = next(leaf for leaf in _pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
                raise _has_no_values(recorder.label(ours), getattr(func, "__name__", str(func)))
            with Plain():
                return func(*args, **(kwargs or {}))

        def __repr__(self: Any, **_: Any) -> str:
            with Plain():
                return f"{self._kind} of shape {tuple(self.shape)}, {self.dtype}, without values until manage()"

        def __reduce_ex__(self: Any, protocol: Any) -> Any:
            raise _has_no_values(recorder.label(self), "pickle")

    class DeferredParameter(Deferred, nn.Parameter):  # type: ignore[misc]
        """A parameter whose values are made when it is managed."""

        _kind = "Parameter"

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            raise _has_no_values(recorder.label(self), "copy.deepcopy")

    class DeferredAlias(Deferred, Tensor):  # type: ignore[misc]
        """A view of a deferred parameter, its `.data`, `detach()`."""

        _kind = "Tensor"

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            if id(self) not in memo:
                copy = self.clone()
                memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
            copied: Tensor = memo[id(self)]
            return copied

    return DeferredParameter, DeferredAlias


def _has_no_values(label: str, what: str) -> StateError:
    return StateError(
        f"{what}() was called on {label}, which was built under deferred_init() and has no values yet: call "
        "patrickstar.manage() first, or do this inside of deferred_init()"
    )
