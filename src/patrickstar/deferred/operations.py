"""Effects of torch's operations on the tensors that they are given, as far as recording goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from patrickstar.core.strides import dense_strides

_DRAWS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
_OVERWRITES = frozenset(f"{name}_" for name in (*_DRAWS, "copy", "fill", "zero"))
_LIKE = frozenset(f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"))
_SHAPE_ONLY = _LIKE | {f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}
_COPIES = frozenset({"clone", "_to_copy"})


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

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors among the arguments that are changed in place."""
        found: list[Any] = []
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += _pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
        return [tensor for tensor in found if isinstance(tensor, Tensor)]


def is_plain(tensor: Tensor) -> bool:
    """Tells whether a tensor has elements in a storage in memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not isinstance(tensor, FakeTensor)
        and not torch.nn.parameter.is_lazy(tensor)
    )


def is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor's elements lie without gaps or overlaps."""
    return dense_strides(tensor.shape, tensor.stride()) == tensor.stride()
