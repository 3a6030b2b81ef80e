"""Operations of a trial run, whose tensors are fake.

Note [Operations of one form]
    The blocks of a model do the same, so most operations of a trial run have been there before, with operands of the same forms, and torch finds out
    in Python what each of them gives. Here that is remembered by the operation, the forms of its tensors and its other operands: which of its results
    are operands, which are views of one, which are new, and of what forms.
    What is not a matter of forms alone is left to torch each time: operations that are not torch's own, operands or results that are no plain fake
    tensors (real ones, those whose values torch keeps, conjugates), and what gives an operand another form or other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.torch_private import Plain, Undispatched, fake_over
from patrickstar.tracing.trial_values import KnownValues

_device = torch.ops.prim.device.default


class TrialOperations(TorchDispatchMode):
    """Makes tensors fake, and does operations on them. See Note [Operations of one form]. `quantile`: what a draw is, from 0 to 1.

    Attributes:
        fakes: the mode underneath. values: those that are known, by inputs and by what follows from the time when there is a seer.
        seer: is shown each operation with its result.
    """

    def __init__(self, quantile: float) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues(quantile)
        self.seer: Callable[[Any, Any], None] | None = None
        self._known: dict[Any, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a trial run, of which that detour would be a tenth

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
            value = self.values.value_for(func, args)
            if value is not None:
                return value
            key, tensors = _key(func, args, kwargs)
            known = self._known.get(key)
            result = self._first(func, args, kwargs, key, tensors) if known is None else known.again(tensors)
            if self.seer is not None:
                self.values.follow(func, args, kwargs, result, tensors)
                self.seer(func, result)
            return result

    def _first(self, func: Any, args: Any, kwargs: Any, key: Any, tensors: Sequence[Tensor]) -> Any:
        """The result of an operation with operands of other forms than before, remembered where it is a matter of forms alone."""
        if func.namespace != "aten" or not all(map(_is_plain, tensors)):
            return result_of(func, args, kwargs)
        memory = [*map(_memory, tensors)]
        result = result_of(func, args, kwargs)
        several = isinstance(result, list | tuple)
        results: Sequence[Any] = result if several else [result]
        is_as_it_was = _key(func, args, kwargs)[0] == key and [*map(_memory, tensors)] == memory
        if is_as_it_was and all(one is None or (isinstance(one, Tensor) and _is_plain(one)) for one in results):
            given = [*tensors, *results]
            made = [_made(one, given[: len(tensors) + number]) for number, one in enumerate(results)]
            self._known[key] = _Known(type(result) if several else None, made)
        return result


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operation makes, but for its values. `base`: the number of the tensor that it is a view of; None: its memory is new."""

    like: FakeTensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    base: int | None

    def again(self, given: Sequence[Any]) -> Tensor:
        """One more of these. `given`: the tensors that the operation was given, and its results before this one."""
        with Undispatched():
            if self.base is not None:
                storage = given[self.base].untyped_storage()
                made = torch.empty(0, dtype=self.dtype, device="meta")
                made = made.set_(storage, self.offset, self.shape, self.stride).data  # of version 0
            else:
                made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
                if made.untyped_storage().nbytes() != self.nbytes:
                    whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device="meta")
                    made = whole.as_strided(self.shape, self.stride, self.offset)
        return fake_over(made, self.like)


@dataclass(frozen=True, slots=True)
class _Known:
    """The results of an operation: tensors that it makes, and numbers of those that there were. `kind`: of a list or tuple; None: it is one."""

    kind: type | None
    results: Sequence[_Made | int | None]

    def again(self, tensors: Sequence[Tensor]) -> Any:
        """The results once more, for other tensors of the same forms."""
        given: list[Any] = [*tensors]
        for one in self.results:
            given.append(one.again(given) if isinstance(one, _Made) else one if one is None else given[one])
        return given[-1] if self.kind is None else self.kind(given[len(tensors) :])


def _made(one: Any, given: Sequence[Any]) -> _Made | int | None:
    """The way in which an operation comes by one of its results."""
    if one is None:
        return None
    base = None
    for number, other in enumerate(given):
        if other is one:
            return number
        if base is None and other is not None and _memory(other) == _memory(one):
            base = number
    like = FakeTensor(one.fake_mode, torch.empty(0, dtype=one.dtype, device="meta"), one.device)
    form = tuple(one.shape), one.stride(), one.storage_offset(), one.dtype
    return _Made(like, *form, one.untyped_storage().nbytes(), base)


def _is_plain(tensor: Tensor) -> bool:
    return (
        isinstance(tensor, FakeTensor)
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
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
                form = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
                key += (*form, value.requires_grad)
            else:
                key.append(None)
        elif isinstance(value, list | tuple):
            key.append(len(value))
            _describe(value, key, tensors)
        else:
            key += (type(value), value)


_aten = torch.ops.aten
_REDUCED = frozenset((_aten.mse_loss, _aten.smooth_l1_loss, _aten.binary_cross_entropy, _aten.soft_margin_loss))


def result_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation on fake tensors: by shape, where these cannot do what real ones can, or have another type or less memory then."""
    # The grouped product of experts: torch 2.13 has it for CPUs in fp32, and its shape rule in bf16 alone.
    if func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped_product(*args, **kwargs)
    # The state of a device's generator, which checkpointing sets again: no input of the model, and real.
    if func is _aten.clone.default and type(args[0]) is Tensor and args[0].dtype is torch.uint8:
        with Undispatched():
            return func(*args, **kwargs)
    result = func(*args, **kwargs)
    # One number, in the memory of as many as there were before they were reduced.
    if func.overloadpacket in _REDUCED and not result.ndim:
        return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).as_strided((), ())
    # 16-bit inputs of a batch norm that stays fp32: what it saves for backward is fp32 too.
    if func is _aten.native_batch_norm.default and args[1] is not None:
        return (result[0], *(saved.new_empty(saved.shape, dtype=args[1].dtype) for saved in result[1:]))
    # An LSTM's two biases have one gradient. So they have in a trial run, but where torch's cache of fake results makes two of it.
    if func is _aten.mkldnn_rnn_layer_backward.default:
        return (*result[:4], result[3], *result[5:])
    return result


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """A product [M, K] x [G, K, N], [G, M, K] x [K, N], [G, M, K] x [G, K, N], or [M, K] x [K, N] with K in G groups."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.ndim == right.ndim:
        groups = left.shape[0] if left.ndim == 3 or offsets is None else offsets.shape[0]
        return left.new_empty((groups, rows, columns))
    return left.new_empty((rows, columns))
