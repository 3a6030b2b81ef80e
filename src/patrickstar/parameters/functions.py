"""Which torch functions do what with a parameter that they are given.

Everything that is in no table here is a *use*: the parameter's bytes are fetched for its duration. So a function that torch adds one day is
slow at worst, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from patrickstar.torch_private import writes_by_schema

__all__ = [
    "ESCAPES",
    "HOOKS",
    "NEEDS_NO_DATA",
    "REPOINTS",
    "SHAPE_ONLY",
    "Effects",
    "accessor",
    "counted",
    "effects_of",
    "one_by_one",
    "uncounted",
    "writes_to",
]


def accessor(name: str, kind: str) -> Callable[..., Any]:
    """What torch's override protocol calls reading ("__get__"), writing ("__set__") or deleting ("__delete__") an attribute of a tensor."""
    attribute: Any = getattr(Tensor, name)
    found: Callable[..., Any] = getattr(attribute, kind)
    return found


def _methods(names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(Tensor, name) for name in names.split())


def _getters(names: str) -> frozenset[Callable[..., Any]]:
    # Which of these attributes exist differs by torch version.
    return frozenset(accessor(name, "__get__") for name in names.split() if hasattr(Tensor, name))


NEEDS_NO_DATA = (
    _methods(
        "dim numel nelement size element_size is_floating_point is_complex is_signed is_inference get_device "
        "register_hook register_post_accumulate_grad_hook retain_grad"
    )
    | _getters(
        "shape dtype device layout ndim itemsize nbytes name names is_leaf grad_fn output_nr retains_grad requires_grad _version _base "
        "_backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized "
        "is_sparse is_sparse_csr is_vulkan is_xla is_xpu"
    )
    | {accessor("_backward_hooks", "__set__"), accessor("_post_accumulate_grad_hooks", "__set__")}
)
"""Answered by the stand-in as it is: it has the shape, type, device, version and autograd state of the parameter."""

SHAPE_ONLY = _methods("stride is_contiguous storage_offset")
"""Answered by a meta tensor with the parameter's real strides, which the stand-in does not have."""

ESCAPES = _methods("numpy __array__ __dlpack__ data_ptr untyped_storage storage _typed_storage")
"""Hand out memory that can be written to behind torch's back: a digest tells whether it was."""


_OPERATORS = "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift"
_ASSIGN = frozenset(f"__i{name}__" for name in _OPERATORS.split())
"""`weight += x` and its like."""
_RENORMALISE = (functional.embedding, functional.embedding_bag)
"""With `max_norm`, they shorten the rows that are looked up, in the table itself."""
_AVERAGE = MappingProxyType(
    {
        functional.batch_norm: 1,
        functional.instance_norm: 1,
        torch.batch_norm: 3,
        torch.native_batch_norm: 3,
        torch.instance_norm: 3,
    }
)
"""In training they write running means and variances: the arguments from this one on, where they are not given by name."""


def uncounted(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a function may write in place without adding to torch's count of its changes."""
    first = _AVERAGE.get(func)
    if first is None:
        return []
    return [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]


def writes_to(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function may write in place, as far as its name, its arguments or its schema tell; None: nothing."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if _writes_by_name(getattr(func, "__name__", "")) or kwargs.get("inplace"):
        return args[0] if args else list(kwargs.values())  # torch passes all by name for some (`nn.init.uniform_`)
    if (func in _RENORMALISE and kwargs.get("max_norm") is not None) or writes_by_schema(func):
        return [*args, *kwargs.values()]
    return uncounted(func, args, kwargs) or None


def _writes_by_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _ASSIGN


class Effects(NamedTuple):
    """What a function does with tensors that it is given, as far as the function itself tells; its arguments may tell more."""

    only_reads: bool
    """Whether it writes none of them, unless it is called with `out=` or `inplace=`."""
    escapes: bool
    is_foreach: bool
    """Whether it does the same with each tensor of a list."""


def effects_of(func: Callable[..., Any]) -> Effects:
    """The effects of a function of torch's override protocol."""
    name = getattr(func, "__name__", "")
    writes = func in _RENORMALISE or func in _AVERAGE or _writes_by_name(name) or writes_by_schema(func)
    return Effects(not writes, func in ESCAPES, name.startswith(("_foreach_", "_amp_foreach_")))


HOOKS = _methods("register_hook register_post_accumulate_grad_hook retain_grad")
"""Ask to be told of a gradient."""

REPOINTS = frozenset(
    {
        "set_",
        "resize_",
        "resize_as_",
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "squeeze_",
        "unsqueeze_",
        "as_strided_",
    }
)
"""Names of functions that give a tensor another storage, shape or strides: a parameter in its slot has only those it has."""


def counted(func: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with the versions of what `func` writes counted up where torch does not do that."""
    if not func.__name__.startswith("_amp_foreach_"):
        return run

    def run_and_count(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        result = run(tensors, *args, **kwargs)
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        return result

    return run_and_count


def one_by_one(
    handle: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`handle` for each tensor of the lists, so that they need not be resident all at once. Same arithmetic, same bits."""
    lengths = [len(value) for value in (*args, *kwargs.values()) if _is_list(value)]
    length = lengths[0]
    if set(lengths) != {length}:
        raise RuntimeError(f"{func.__name__}: lists must have the same number of elements, got {lengths}")

    def item(value: Any, index: int) -> Any:
        if _is_list(value):
            return [value[index]]
        # One scalar for each tensor, as a tensor of them.
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) == length:
            return value[index : index + 1]
        return value

    results: list[Any] = []
    for index in range(length):
        result = handle(
            func, [item(value, index) for value in args], {key: item(value, index) for key, value in kwargs.items()}
        )
        results.extend(result if result is not None else ())
    return results or None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
