"""Inputs of a forward: what kind of forward they make, the type they are given in, and caches of keys and values among them.

Note [Caches]
    `generate()` of Hugging Face models passes a cache from one forward to the next.
    A forward with a cache adds the keys and values of its tokens to those of all tokens before. So no two forwards of a generation have the same
    shapes; each does what the last one will do, in less memory. It is traced and planned as if the cache held its *bound* already. A static cache
    has its whole length from the start. The bound of one that grows is what the model's `generation_config` allows: `max_length`, or
    `max_new_tokens` beside the prompt. Arguments of a call show in no forward: beyond what the model allows the bound is the next power of two. Where
    that does not fit, ever less is tried, down to what the forward itself needs; where that does not fit either, it is refused before it begins.
    What is in the cache counts as activations from the start of a forward on: it is there, and goes as what is made in its place comes.
    Known are caches of nothing but keys and values, of all tokens or of a window that slides. With others (quantized, offloaded, static with a
    window, of linear attention) a forward runs unplanned, and what it takes is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patrickstar.errors import BudgetError
from patrickstar.parameters.transforms import leaves, tensors_in
from patrickstar.torch_private import Plain, checks_for_nan
from patrickstar.units import format_bytes

_CACHE = "past_key_values"
_MASKS = ("attention_mask", "decoder_attention_mask")  # of all tokens: alone, and beside an encoder
_IDS = ("decoder_input_ids", "input_ids", "inputs_embeds")
_GROW = ("DynamicLayer", "DynamicSlidingWindowLayer")
_KNOWN = (*_GROW, "StaticLayer", "DynamicCache", "StaticCache")


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


@dataclass(frozen=True, slots=True)
class CacheAt:
    """A cache as it is when it holds so many tokens, if it grows; one that does not is as it is."""

    cache: Any
    past: int

    def form(self, sizes: list[int]) -> Hashable:
        """All but the sizes of its tensors, which are added to a list."""
        kinds: list[Hashable] = []
        growing = {*map(id, _growing(self.cache))}
        for layer in _layers(self.cache):
            kinds.append((type(layer).__name__, *(value for value in vars(layer).values() if isinstance(value, bool))))
            for tensor in _tensors_of(layer):
                shape = list(tensor.shape)
                if id(layer) in growing and tensor.ndim:
                    shape[-2] = self.past
                sizes.extend(shape)
                kinds.append((tensor.ndim, tensor.dtype, tensor.device))
        return tuple(kinds)

    def copied(self, like: Callable[[Tensor], Tensor]) -> Any:
        """A copy that holds so many tokens. `like`: gives what stands in the place of a tensor."""
        memo = {id(tensor): like(tensor) for layer in _layers(self.cache) for tensor in _tensors_of(layer)}
        copied = copy.deepcopy(self.cache, memo)
        for layer in _growing(copied):
            more, held = self.past - layer.get_seq_length(), (layer.keys, layer.values)
            for tokens in (more - 1, 1) if more > 0 else ():  # a window has the memory of the last addition to it
                layer.update(*(one.new_empty((*one.shape[:-2], tokens, one.shape[-1])) for one in held))
        return copied


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


def bounded(
    kwargs: Mapping[str, Any], model: nn.Module, bounds: MutableMapping[Any, int]
) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Gives the inputs as which a forward may be traced, the largest first, and whether they are its own, which come last. See Note [Caches].

    `bounds`: of each cache, which stay until there is more in it.
    """
    cache = kwargs.get(_CACHE)
    if torch.is_grad_enabled() or not _is_known(cache):
        yield kwargs, True
        return
    past = max((layer.get_seq_length() for layer in _growing(cache)), default=0)
    if bounds.get(cache, 0) < past:
        bounds[cache] = _bound(past, getattr(model, "generation_config", None))
    bound = bounds.get(cache, 0)
    rounded = {-(-past >> power) << power for power in range(past.bit_length())}
    name = _MASKS[len(_caches(cache)) - 1]
    for length in sorted({past, bound, *(length for length in rounded if length < bound)}, reverse=True):
        inputs, mask = {**kwargs, _CACHE: CacheAt(cache, length)}, kwargs.get(name)
        if length > past and isinstance(mask, Tensor) and mask.ndim == 2:
            inputs[name] = nn.functional.pad(mask, (0, length - past), value=1)
        yield inputs, length == past


def _bound(past: int, config: Any) -> int:
    length, new = (getattr(config, name, None) or 0 for name in ("max_length", "max_new_tokens"))
    said = (past + new if new else length) - 1
    return said if said >= past else 1 << past.bit_length()


def refused(refusal: BudgetError, kwargs: Mapping[str, Any]) -> BudgetError:
    """The refusal of a forward, with what a cache among its inputs has to do with it."""
    cache = kwargs.get(_CACHE)
    ids = next((one for one in map(kwargs.get, _IDS) if isinstance(one, Tensor)), None)
    if torch.is_grad_enabled() or ids is None or not _is_known(cache):
        return refusal
    held = format_bytes(sum(tensor.nbytes for tensor in cache_tensors(kwargs)))
    lengths = (getattr(layer, "max_cache_len", 0) or layer.get_seq_length() for layer in _caches(cache)[0].layers)
    return BudgetError(
        f"{refusal}\n  it adds {ids.shape[1]} tokens of {ids.shape[0]} sequences to a cache of {max(lengths, default=0)}, which takes {held} of the "
        "activations as it begins: generate fewer tokens (max_new_tokens), fewer sequences or beams at once, or give a shorter static cache",
        **vars(refusal),
    )


def cache_tensors(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a known cache among the inputs of a forward."""
    cache = kwargs.get(_CACHE)
    return [tensor for layer in _layers(cache) for tensor in _tensors_of(layer)] if _is_known(cache) else []


def _is_known(cache: Any) -> bool:
    """Tells whether a cache is one of transformers whose layers hold keys and values, and nothing else, where the model computes."""
    return cache is not None and not any(
        type(part).__module__ != "transformers.cache_utils"
        or type(part).__name__ not in _KNOWN
        or getattr(part, "offloading", False)
        for part in (*_caches(cache), *_layers(cache))
    )


def _caches(cache: Any) -> list[Any]:
    """A cache, or the two that one beside an encoder consists of; that which grows comes first."""
    if type(cache).__name__ == "EncoderDecoderCache":
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _layers(cache: Any) -> list[Any]:
    return [layer for part in _caches(cache) for layer in getattr(part, "layers", ())]


def _growing(cache: Any) -> list[Any]:
    """The layers that grow with each forward, and hold something."""
    return [layer for layer in _caches(cache)[0].layers if type(layer).__name__ in _GROW and layer.is_initialized]


def _tensors_of(layer: Any) -> list[Tensor]:
    return [value for value in vars(layer).values() if isinstance(value, Tensor)]
