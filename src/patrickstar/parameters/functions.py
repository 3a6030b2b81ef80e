"""Tables of torch functions by what each does with a parameter that it is given.

Everything that is in no table here is a *use*: the parameter's bytes are fetched for its duration. So a function that torch adds one day is
slow at worst, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.nn import functional

from patrickstar.parameters.transforms import tensors_in
from patrickstar.torch_private import writes_by_schema

Function = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
"""A function and what it is called with, as torch's override protocol gives them."""


def accessor(name: str, kind: str) -> Function:
    """The function by which torch's override protocol knows reading ("__get__"), writing ("__set__") or deleting ("__delete__") an attribute."""
    attribute: Any = getattr(Tensor, name)
    found: Function = getattr(attribute, kind)
    return found


def _methods(names: str) -> frozenset[Function]:
    return frozenset(getattr(Tensor, name) for name in names.split())


def _getters(names: str) -> frozenset[Function]:
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
"""Functions that the stand-in answers as it is: it has the shape, type, device, version and autograd state of the parameter."""

SHAPE_ONLY = _methods("stride is_contiguous storage_offset")
"""Functions that are answered by a meta tensor with the parameter's real strides, which the stand-in does not have."""

ESCAPES = _methods("numpy __array__ __dlpack__ data_ptr untyped_storage storage _typed_storage")
"""Functions that hand out memory that can be written to behind torch's back: a digest tells whether it was."""

_OPERATORS = "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift"
_ASSIGN = frozenset(f"__i{name}__" for name in _OPERATORS.split())
"""Names of operators in place, such as that of `weight += x`."""
_RENORMALISE = (functional.embedding, functional.embedding_bag)
"""Functions that with `max_norm` shorten the rows that are looked up, in the table itself."""
_AVERAGE = MappingProxyType(
    {
        functional.batch_norm: 1,
        functional.instance_norm: 1,
        torch.batch_norm: 3,
        torch.native_batch_norm: 3,
        torch.instance_norm: 3,
    }
)
"""Functions that in training write running means and variances: the arguments from this one on, where these are not given by name."""


def uncounted(func: Function, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments that a function may write in place without adding to torch's count of their changes."""
    first = _AVERAGE.get(func)
    if first is None:
        return []
    return [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]


def writes_to(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The arguments that a function may write in place, as far as names, arguments or schema tell; None: none."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if _name(func).startswith("_fused_") and _writes_by_name(_name(func)):
        return [*args, *kwargs.values()]  # an optimizer's step: parameters and all of their state
    if _writes_by_name(_name(func)) or kwargs.get("inplace"):
        return args[0] if args else list(kwargs.values())  # torch passes all by name for some (`nn.init.uniform_`)
    if (func in _RENORMALISE and kwargs.get("max_norm") is not None) or writes_by_schema(func):
        return [*args, *kwargs.values()]
    return uncounted(func, args, kwargs) or None


def _writes_by_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _ASSIGN


class Effects(NamedTuple):
    """Effects of a function on tensors that it is given, as far as the function itself tells; its arguments may tell more."""

    only_reads: bool
    """True for a function that writes none of its tensors, unless it is called with `out=` or `inplace=`."""
    escapes: bool
    is_foreach: bool
    """True for a function that does the same with each tensor of a list, or of several lists alike."""


def written_by(func: Any, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The tensors that a registered operation changes in place, as its schema says."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def effects_of(func: Function) -> Effects:
    """The effects of a function of torch's override protocol."""
    name = _name(func)
    writes = func in _RENORMALISE or func in _AVERAGE or _writes_by_name(name) or writes_by_schema(func)
    is_foreach = name.startswith(("_foreach_", "_amp_foreach_")) or (name.startswith("_fused_") and name.endswith("_"))
    return Effects(not writes, func in ESCAPES, is_foreach)


def _name(func: Function) -> str:
    """A function's name; of an operation of `torch.ops`, without that of its overload."""
    return getattr(func, "__name__", "").partition(".")[0]


STRIDED = frozenset(
    getattr(module, name)
    for name in ("as_strided", "as_strided_", "as_strided_copy")
    for module in (Tensor, torch)
    if hasattr(module, name)
)
"""Functions whose argument `storage_offset` counts from the start of memory: from that of the parameter, which does not begin where its slot does."""

SCATTERS = frozenset({Tensor.as_strided_scatter, torch.as_strided_scatter})
"""Functions whose backward takes the start of memory for that of the tensor."""

HOOKS = _methods("register_hook register_post_accumulate_grad_hook retain_grad")
"""Functions that ask to be told of a gradient."""

_MOVES = "set resize resize_as t transpose swapaxes swapdims squeeze unsqueeze as_strided share_memory"
REPOINTS = frozenset(f"{name}_" for name in _MOVES.split())
"""Names of functions that give a tensor another storage, shape or strides: a parameter in its slot has only those it has."""


def counted(func: Function, run: Function) -> Function:
    """`run`, with the versions of what `func` writes in lists counted up where torch does not do that: `_fused_`, and `_foreach_` under a mode."""
    name = _name(func)
    if not name.endswith("_"):
        return run
    operation: OpOverloadPacket = getattr(torch.ops.aten, name)
    schema = getattr(operation, operation.overloads()[0])._schema
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(argument.type, torch.ListType)
    ]

    def run_and_count(*args: Any, **kwargs: Any) -> Any:
        lists = [args[place] if place < len(args) else kwargs.get(name, ()) for place, name in written]
        tensors: list[Tensor] = [tensor for value in lists for tensor in value if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = run(*args, **kwargs)
        same = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version == version]
        torch.autograd.graph.increment_version(same)
        return result

    return run_and_count


def from_offset(args: Args, kwargs: Kwargs, *, offset: int) -> Any:
    """The arguments of one of `STRIDED`, with a `storage_offset`, where it is given, that counts from this offset."""
    if kwargs.get("storage_offset") is not None:
        return args, {**kwargs, "storage_offset": kwargs["storage_offset"] + offset}
    tensor, *layout, given = args if len(args) > 3 else (*args, None)
    return (args if given is None else [tensor, *layout, given + offset]), kwargs


def one_by_one(handle: Callable[[Function, Args, Kwargs], Any], func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The result of `handle` for each tensor of the lists in turn, which need not all be resident at once. Same arithmetic, same bits."""
    lengths = [len(value) for value in (*args, *kwargs.values()) if _is_list(value) and value]
    length = lengths[0]
    if set(lengths) != {length}:
        raise RuntimeError(f"{func.__name__}: lists must have the same number of elements, got {lengths}")

    def item(value: Any, index: int) -> Any:
        if _is_list(value):
            return [value[index]] if value else value  # what a step has no use for is an empty list
        # One scalar for each tensor, as a tensor of them.
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) == length:
            return value[index : index + 1]
        return value

    results: list[Any] = []
    for index in range(length):
        given, named = [item(one, index) for one in args], {key: item(one, index) for key, one in kwargs.items()}
        result = handle(func, given, named)
        results.extend(result if result is not None else ())
    return results or None


def is_of_several(args: Args, kwargs: Kwargs) -> bool:
    """Tells whether a function of lists is given more than one tensor in them."""
    return any(_is_list(value) and len(value) > 1 for value in (*args, *kwargs.values()))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
