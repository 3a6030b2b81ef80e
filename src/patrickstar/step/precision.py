"""The types that a session keeps and computes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.formats import FP32, Formats, PlaneFormat, formats_of_16_bits
from patrickstar.core.layout import Layout
from patrickstar.errors import ConfigError
from patrickstar.parameters.exchange import Travel
from patrickstar.step.resources import Resources

_TYPES: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a session.

    Attributes:
        formats: of planes, to begin with. compute: the type of parameters, inputs and buffers.
        whole: the paths of modules that stay fp32 whole, and all modules inside of them.
        copies: whether uses of other parameters see copies, converted from what is kept. rounding: the type a master is rounded to for that,
            where its plane is fp32. mixed: whether there are 16-bit types. scales: whether gradients may overflow, so that the loss is scaled.
        travel: the types in which weights and gradients go to other ranks.
    """

    formats: Formats
    compute: torch.dtype
    whole: frozenset[str] = frozenset()
    mixed: bool = False
    copies: bool = False
    rounding: torch.dtype | None = None
    scales: bool = False
    travel: Travel = Travel()  # noqa: RUF009  (frozen)

    def parameter_dtypes(self, layout: Layout) -> Mapping[str, torch.dtype]:
        """The types of parameters while they are managed, by name."""
        return {
            name: torch.float32 if layout.is_whole(place.chunk) else self.compute
            for name, place in layout.slices.items()
        }

    def copied(self, layout: Layout) -> frozenset[str]:
        """The parameters whose uses see copies, by name."""
        if not self.copies:
            return frozenset()
        return frozenset(name for name, place in layout.slices.items() if not layout.is_whole(place.chunk))


def find_precision(
    memory: MemoryOptions, model: nn.Module, has: Resources, *, over_ranks: bool = False, in_parts: bool = False
) -> Precision:
    """The types for what `manage` was given; those of the model's parameters where that says nothing.

    Weights of 16 bits are widened to fp32 at each use where what computes is not fast in their type, or where that is asked for.
    `over_ranks`: whether gradients are sums over ranks, which are kept in fp32. `in_parts`: whether they come in parts of a step (`Travel`).
    """
    kept, options = memory.precision or model_precision(model), memory.options
    if kept == "fp32":
        return Precision(FP32, torch.float32, travel=Travel(in_parts=in_parts))
    compute = options.compute or (kept if kept in has.fast_types else "fp32")
    whole = _whole_modules(model, options.keep_fp32)
    accumulates = (options.accumulate or 1) > 1 or in_parts
    travel = Travel(_TYPES[kept], _TYPES["fp32" if accumulates and compute == "fp32" else kept], in_parts)
    # Where fp16 weights cross a link, 2 bytes do that and 2 lie on the device; where nothing does, the master alone saves these 2.
    is_split = kept == "bf16" or has.device != "cpu"
    return Precision(
        formats_of_16_bits(kept, is_split=is_split, adds_up=accumulates or over_ranks),
        _TYPES[compute],
        whole,
        mixed=True,
        copies=not is_split or compute == "fp32",
        rounding=None if is_split else torch.float16,
        scales=kept == "fp16",
        travel=travel,
    )


def torch_type(form: PlaneFormat) -> torch.dtype:
    """torch's own name for the type of a plane's elements."""
    found: torch.dtype = getattr(torch, form.dtype)
    return found


def model_precision(model: nn.Module) -> str:
    """The precision of the type that most elements of a model's parameters have. ConfigError: there is no precision of that type."""
    numels: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        numels[parameter.dtype] = numels.get(parameter.dtype, 0) + parameter.numel()
    most = max(numels, key=lambda dtype: numels[dtype], default=torch.float32)
    for precision, dtype in _TYPES.items():
        if dtype is most:
            return precision
    raise ConfigError(
        f"{numels[most]:,} of the model's {sum(numels.values()):,} parameter elements are {most}, which no precision is: give precision="
        '"fp32", "bf16" or "fp16"'
    )


def lies_in(path: str, modules: Collection[str]) -> bool:
    """Tells whether a parameter or buffer of this path belongs to one of these modules."""
    return path.rpartition(".")[0] in modules


def _whole_modules(model: nn.Module, keep_fp32: Sequence[str]) -> frozenset[str]:
    """The paths of batch norm modules, and of those that model or user name by any part of a path (`_keep_in_fp32_modules` of transformers)."""
    names = (*keep_fp32, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    return frozenset(
        path
        for path, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) or any(f".{name}." in f".{path}." for name in names)
    )
