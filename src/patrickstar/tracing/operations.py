"""Operations of a trial run, whose tensors are fake.

Note [Operations of one form]
    The blocks of a model do the same, so most operations of a trial run have been there before, with operands of the same forms, and torch finds out
    in Python what each of them gives. Here that is remembered by the operation, the forms of its tensors and its other operands: which of its results
    are operands, which are views of one, which are new, and of what forms.
    What is not a matter of forms alone is left to torch each time: operations that are not torch's own, operands that are no plain fake tensors (real
    ones, those whose values torch keeps), results that share memory with each other, and what gives an operand another form or other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.torch_private import Plain, Undispatched, fake_over
from patrickstar.tracing.missing import result_of
from patrickstar.tracing.trial_values import KnownValues

_device = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operation makes, but for its values. `base`: which of the operation's tensors it is a view of; None: it is new."""

    like: FakeTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    base: int | None

    def again(self, tensors: Sequence[Tensor]) -> Tensor:
        """One more of these."""
        with Undispatched():
            if self.base is not None:
                storage = tensors[self.base].untyped_storage()
                made = torch.empty(0, dtype=self.dtype, device="meta").set_(  # type: ignore[call-overload]
                    storage, self.offset, self.shape, self.stride
                )
            else:
                made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
                if made.untyped_storage().nbytes() != self.nbytes:
                    whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device="meta")
                    made = whole.as_strided(self.shape, self.stride, self.offset)
        return fake_over(made, self.like)


class TrialOperations(TorchDispatchMode):
    """Makes tensors fake, and does operations on them. See Note [Operations of one form].

    Attributes:
        fakes: the mode underneath. seer: is shown each operation with its result, from when it is set.
    """

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self._values = values
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.seer: Callable[[Any, Any], None] | None = None
        self._known: dict[Any, tuple[type | None, list[Any]]] = {}

    def __enter__(self) -> TrialOperations:
        self.fakes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self.fakes.__exit__(*problem)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device:  # asked for as often as all else together
            return args[0].device
        kwargs = kwargs or {}
        with Plain():
            value = self._values.value_for(func, args)
            if value is not None:
                return value
            key, tensors = _key(func, args, kwargs)
            known = self._known.get(key)
            result = self._first(func, args, kwargs, key, tensors) if known is None else _again(*known, tensors)
            self._values.follow(func, args, kwargs, result, tensors)
        if self.seer is not None:
            self.seer(func, result)
        return result

    def _first(self, func: Any, args: Any, kwargs: Any, key: Any, tensors: Sequence[Tensor]) -> Any:
        """The result of an operation with operands of forms that are new, remembered where it is a matter of forms alone."""
        if func.namespace != "aten" or not all(map(_is_plain, tensors)):
            return result_of(func, args, kwargs)
        memory = [*map(_memory, tensors)]
        result = result_of(func, args, kwargs)
        kind = type(result) if isinstance(result, list | tuple) else None
        results = [result] if kind is None else list(result)
        if _key(func, args, kwargs)[0] == key and [*map(_memory, tensors)] == memory:
            made = [_made(one, tensors, memory) for one in results]
            own = [
                _memory(one) for one, how in zip(results, made, strict=True) if type(how) is _Made and how.base is None
            ]
            if len(set(own)) == len(own) and _UNKNOWN not in made:
                self._known[key] = kind, made
        return result


def _again(kind: type | None, results: Iterable[Any], tensors: Sequence[Tensor]) -> Any:
    again = [one.again(tensors) if type(one) is _Made else one if one is None else tensors[one] for one in results]
    return again[0] if kind is None else kind(again)


_UNKNOWN = object()


def _made(one: Any, tensors: Sequence[Tensor], memory: Sequence[int]) -> Any:
    if one is None:
        return None
    if not isinstance(one, Tensor) or not _is_plain(one):
        return _UNKNOWN
    for number, tensor in enumerate(tensors):
        if tensor is one:
            return number
    base = memory.index(_memory(one)) if _memory(one) in memory else None
    like = FakeTensor(one.fake_mode, torch.empty(0, dtype=one.dtype, device="meta"), one.device)
    form = tuple(one.shape), one.stride(), int(one.storage_offset()), one.dtype
    return _Made(like, *form, one.untyped_storage().nbytes(), base)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """A key that is the same for operands of the same forms, and the tensors among these."""
    key, tensors = [func, torch.is_inference_mode_enabled(), torch.get_default_dtype(), *kwargs], list[Tensor]()
    _describe(args, key, tensors)
    if kwargs:
        _describe(kwargs.values(), key, tensors)
    return tuple(key), tensors


def _describe(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            if _is_plain(value):
                key += (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                )
            else:
                key.append(None)
        elif isinstance(value, list | tuple):
            key.append(len(value))
            _describe(value, key, tensors)
        else:
            key += (type(value), value)
