"""Values in a trial run: fake tensors have none, and a forward may ask for one all the same (`item()`, `tolist()`, `if tensor:`).

Note [Values in a trial run]
    Two kinds of small tensors have values: what the caller passes in, and what the forward draws. What is computed from these and from Python
    numbers alone is computed for real, beside the fake result, and answers where a value is asked for. Nothing else has values: where one is
    asked for, there is no trace.

    A draw is a quantile of its distribution here, the same for each draw of a run. Near 0 and near 1, every comparison of a draw with a
    threshold goes one way and the other; at 1/2 it goes the more probable way. So a layer that may be dropped is dropped in one run and kept in
    another, however the comparison is written. Draws without bounds (`randn`) have no such quantiles, and permutations have none at all: they
    have no values.

    Values belong to storages, so that views have them too. What is written by an operation whose other operands have none loses its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from patrickstar.parameters.functions import written_by
from patrickstar.parameters.transforms import tensors_in
from patrickstar.torch_private import Undispatched, backward_id, checks_for_nan

_MOST_ELEMENTS = 1 << 16
_MOST_READS = 1000
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_UNDEFINED = frozenset(
    getattr(_aten, name)
    for name in ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"]
)


class Endless(Exception):  # noqa: N818  (a reason why there is no trace)
    """A forward that may be drawing until it likes the outcome, which in a trial run is always the same."""


@dataclass(slots=True)
class _Content:
    """Contents of a fake storage, 1-D. `drawn`: whether they depend on draws. `storage`: the fake one, with which they go."""

    elements: Tensor
    drawn: bool
    storage: weakref.ref[torch.UntypedStorage]

    def of(self, tensor: Tensor) -> Tensor:
        """The values of a tensor over the storage, as a view."""
        return self.elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class KnownValues:
    """Answers for values. See Note [Values in a trial run].

    `quantile`: what a draw is, from 0 to 1. `branches`: whether a value that depends on draws has been asked for.
    """

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile

        self.branches = False
        self._reads = 0
        self._contents: dict[int, _Content] = {}

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Takes note of an input's values, copied. Of an input that lies in a large storage, no values are known."""
        if real.is_meta or real.layout is not torch.strided:
            return
        numel, odd_bytes = divmod(real.untyped_storage().nbytes(), real.itemsize)
        if numel <= _MOST_ELEMENTS and not odd_bytes:
            with Undispatched(), torch.no_grad():
                self._keep(fake, real.as_strided((numel,), (1,), 0).clone(), drawn=False)

    def value_for(self, func: Any, args: Any) -> Any:
        """The value that an operation asks for; None where it asks for none, or nobody knows it."""
        if func is not _aten._local_scalar_dense.default:
            return None
        content = self._content(args[0])
        if content is not None:
            return self._read(args[0], content)
        if args[0].dtype is torch.bool and backward_id() != -1 and checks_for_nan():
            return False  # there is none
        return None

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor]) -> None:
        """Gives what an operation has made or written its values, or takes them away. `given`: the tensors among its operands."""
        if _draws(func):
            number = self._drawn_number(func.overloadpacket, _by_name(func, args, kwargs), result)
            if number is None or not self._fill(result, number, drawn=True):
                self._forget_written(func, args, kwargs)
        elif func is _aten.lift_fresh.default:  # torch.tensor(number)
            self._fill(result, args[0], drawn=False)
        else:
            self._follow(func, args, kwargs, result, given)

    def _read(self, tensor: Tensor, content: _Content) -> Any:
        if content.drawn:
            self.branches = True
            self._reads += 1
            if self._reads > _MOST_READS:
                raise Endless(
                    f"it asks for more than {_MOST_READS} of the numbers that it draws: a forward that draws until one is right does not end "
                    "in a fake-tensor trace, where all draws are alike"
                )
        with Undispatched():
            return content.of(tensor).item()

    def _drawn_number(self, packet: Any, given: dict[str, Any], result: Any) -> Tensor | float | None:
        """The quantile of the distribution; of several, a tensor that is one number or has the shape of the result. None: there is none."""
        if packet in (_aten.rand, _aten.rand_like, _aten.uniform_):
            low, high = given.get("from", 0.0), given.get("to", 1.0)
            # The largest number below 1 that the type has: 1 itself is never drawn.
            return low + min(self._quantile, 1 - torch.finfo(result.dtype).eps / 2) * (high - low)
        if packet in (_aten.randint, _aten.randint_like, _aten.random_):
            low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
            if not isinstance(high, int):
                return None
            return low + min(int(self._quantile * (high - low)), high - low - 1)
        if packet in (_aten.bernoulli, _aten.bernoulli_):
            probability = given.get("p", given["self"])
            if not isinstance(probability, Tensor):
                return float(self._quantile < probability or probability == 1)
            content = self._content(probability)
            if content is None:
                return float(self._quantile < 0.5)  # of whatever probability: each outcome in one of the runs
            with Undispatched():
                values = content.of(probability)
                return (values > self._quantile).logical_or(values == 1)
        return None

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor]) -> None:
        contents = [self._content(tensor) for tensor in given]
        known = [content for content in contents if content is not None]
        if len(known) < len(given) or func.namespace != "aten" or func.overloadpacket in _UNDEFINED:
            self._forget_written(func, args, kwargs)
            return
        results = list(tensors_in(result))
        if not all(map(_can_be_known, results)):
            return
        made = [tensor.untyped_storage()._cdata not in self._contents for tensor in results]
        if not any(made) and not func._schema.is_mutable:
            return  # a view has the values of its storage
        drawn = any(content.drawn for content in known)
        with Undispatched():
            values = {id(tensor): content.of(tensor) for tensor, content in zip(given, known, strict=True)}
            operands, named = _pytree.tree_map(partial(_real, values), (args, kwargs))
            real = func(*operands, **named)
        for tensor in written_by(func, args, kwargs):
            self._contents[tensor.untyped_storage()._cdata].drawn |= drawn
        for fake, found, is_new in zip(results, tensors_in(real), made, strict=True):
            if is_new:
                self._fill(fake, found, drawn=drawn)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written_by(func, args, kwargs):
            if tensor.layout is torch.strided:
                self._contents.pop(tensor.untyped_storage()._cdata, None)

    def _content(self, tensor: Tensor) -> _Content | None:
        """Known contents of a tensor's storage, as elements of the tensor's type."""
        if not self._contents or tensor.layout is not torch.strided or tensor.is_complex():  # a conjugate is a view
            return None
        content = self._contents.get(tensor.untyped_storage()._cdata)
        return content if content is not None and content.elements.dtype is tensor.dtype else None

    def _fill(self, tensor: Tensor, values: Tensor | float, *, drawn: bool) -> bool:
        """Gives a tensor values. False: the tensor is too large, or a part of something without values, and its values stay unknown."""
        content = self._content(tensor)
        with Undispatched():
            if content is not None:
                content.of(tensor).copy_(torch.as_tensor(values))
                content.drawn |= drawn
                return True
            storage = tensor.untyped_storage() if _can_be_known(tensor) else None
            if (
                storage is None
                or storage._cdata in self._contents
                or storage.nbytes() != tensor.numel() * tensor.itemsize
            ):
                return False
            elements = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(torch.as_tensor(values))
            self._keep(tensor, elements, drawn=drawn)
            return True

    def _keep(self, tensor: Tensor, elements: Tensor, *, drawn: bool) -> None:
        storage, contents = tensor.untyped_storage(), self._contents
        key = storage._cdata
        reference = weakref.ref(storage, lambda _, key=key: contents.pop(key, None))  # type: ignore[misc]
        contents[key] = _Content(elements, drawn, reference)


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _can_be_known(tensor: Tensor) -> bool:
    return tensor.numel() <= _MOST_ELEMENTS and tensor.layout is torch.strided and not tensor.is_meta


def _real(values: dict[int, Tensor], operand: Any) -> Any:
    """An operand, or the values, which are on the CPU, of a fake tensor."""
    if isinstance(operand, torch.device):
        return _CPU
    return values[id(operand)] if isinstance(operand, Tensor) else operand


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return {**{argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
