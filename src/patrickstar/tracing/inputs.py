"""Inputs of a forward: what kind of forward they make, and the type they are given in."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.parameters.transforms import leaves, tensors_in
from patrickstar.torch_private import Plain, checks_for_nan
from patrickstar.tracing.caches import CacheAt


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of forward: two of one signature are expected to do the same, moment by moment.

    `kind`: all but the sizes of tensors; `sizes`: those, of all dimensions of all tensors, in order.
    """

    kind: Hashable
    sizes: tuple[int, ...]

    def dominates(self, other: Signature) -> bool:
        """Tells whether another forward differs in sizes alone, and none is larger: it does the same in no more memory."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return self.kind == other.kind and all(ours >= theirs for ours, theirs in pairs)


def signature(
    modules: Iterable[nn.Module], parameters: Iterable[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Signature:
    """Shapes and types of the inputs of a model of these modules and parameters, plain values among them, and the modes that steer a forward.

    Tensor *values* are no part of it, nor what is inside of objects we do not know: where those make a difference, the step departs from its
    trace and is finished by the reactive pilot.
    """
    # Which modules train and which parameters are frozen decides what is saved for backward.
    training = hash(tuple([module.training for module in modules]))
    with Plain():
        trainable = hash(tuple([parameter.requires_grad for parameter in parameters]))
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        checks_for_nan(),
    )
    sizes: list[int] = []
    inputs = _key(args, sizes), _key(dict(kwargs), sizes)
    return Signature((*inputs, training, trainable, modes), tuple(sizes))


def _key(value: Any, sizes: list[int]) -> Hashable:
    if isinstance(value, Tensor):
        sizes.extend(value.values().shape if value.is_nested else value.shape)  # whose lengths are no numbers
        return value.ndim, value.dtype, value.device, value.requires_grad, value.is_nested
    if isinstance(value, Mapping):
        return tuple((name, _key(item, sizes)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_key(item, sizes) for item in value)
    if isinstance(value, CacheAt):
        return value.form(sizes)
    if isinstance(value, str | int | float | bool | None | torch.dtype | torch.device):
        return value
    return type(value).__qualname__


def can_be_traced(value: Any) -> bool:
    """Tells whether inputs hold nothing but tensors, containers and plain values: an unknown object could be changed by a trial run."""
    plain = Tensor | CacheAt | str | int | float | bool | None | torch.dtype | torch.device
    return all(isinstance(leaf, plain) for leaf in leaves(value))


def asks_for_gradients(value: Any) -> bool:
    """Tells whether a tensor of the inputs wants a gradient."""
    return any(tensor.requires_grad for tensor in tensors_in(value))


def cast_inputs(value: Any, dtype: torch.dtype) -> Any:
    """Inputs with floating tensors in this type, in containers too; what needs no cast is the very same object. Copies count as activations."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and not _stays(value, dtype) else value
    if type(value) is dict:
        items = {name: cast_inputs(item, dtype) for name, item in value.items()}
        return items if any(items[name] is not value[name] for name in value) else value
    if isinstance(value, list | tuple):
        cast = [cast_inputs(item, dtype) for item in value]
        if all(new is old for new, old in zip(cast, value, strict=True)):
            return value
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value


def _stays(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tells whether a floating input is of the type, or has 16 bits under autocast that fp32 would undo: each operation chooses a type there."""
    widens = dtype is torch.float32 and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.dtype is dtype or (widens and torch.is_autocast_enabled(tensor.device.type))
