"""In which types a session keeps and computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.formats import FP32, Formats, PlaneFormat, bf16_formats, fp16_formats
from patrickstar.core.layout import Layout
from patrickstar.torch_private import computes_bf16, computes_fp16

__all__ = ["Precision", "default_precision", "find_precision", "lies_in", "torch_type"]

_TYPES: Final = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a session.

    Attributes:
        formats: of planes, to begin with. compute: what parameters, inputs and buffers are of.
        whole: the paths of modules that stay fp32 whole, and all modules inside of them.
        copies: whether uses of other parameters see copies, converted from what is kept. rounding: the type a master is rounded to for that,
            where its plane is fp32. mixed: whether there are 16-bit types.
    """

    formats: Formats
    compute: torch.dtype
    whole: frozenset[str] = frozenset()
    mixed: bool = False
    copies: bool = False
    rounding: torch.dtype | None = None

    @property
    def scales(self) -> bool:
        """Whether gradients may overflow, so that the loss is scaled."""
        return self.rounding is torch.float16

    def parameter_dtypes(self, layout: Layout) -> Mapping[str, torch.dtype]:
        """What parameters are of while they are managed, by name."""
        return {
            name: torch.float32 if layout.is_whole(place.chunk) else self.compute
            for name, place in layout.slices.items()
        }

    def copied(self, layout: Layout) -> frozenset[str]:
        """The parameters whose uses see copies, by name."""
        if not self.copies:
            return frozenset()
        return frozenset(name for name, place in layout.slices.items() if not layout.is_whole(place.chunk))


def find_precision(memory: MemoryOptions, model: nn.Module) -> Precision:
    """The types for what `manage` was given; see `default_precision` for where that says nothing.

    Weights of 16 bits are widened to fp32 at each use where the processor has no instructions for products of theirs, or where that is asked for.
    """
    kept, options = memory.precision or default_precision(), memory.options
    if kept == "fp32":
        return Precision(FP32, torch.float32)
    compute = options.compute or (kept if _is_fast(kept) else "fp32")
    whole = _whole_modules(model, options.keep_fp32)
    accumulates = (options.accumulate or 1) > 1
    if kept == "bf16":
        formats = bf16_formats(gradient="float32" if accumulates else "bfloat16")
        return Precision(formats, _TYPES[compute], whole, mixed=True, copies=compute == "fp32")
    formats = fp16_formats(gradient="float32" if accumulates else "float16")
    return Precision(formats, _TYPES[compute], whole, mixed=True, copies=True, rounding=torch.float16)


def torch_type(form: PlaneFormat) -> torch.dtype:
    """torch's own name for the type of a plane's elements."""
    found: torch.dtype = getattr(torch, form.dtype)
    return found


def default_precision() -> str:
    """What weights are kept in where nobody says: bf16 where the processor has instructions for it, else fp32."""
    return "bf16" if computes_bf16() else "fp32"


def lies_in(path: str, modules: Collection[str]) -> bool:
    """Whether a parameter or buffer of this path belongs to one of these modules."""
    return path.rpartition(".")[0] in modules


def _is_fast(kept: str) -> bool:
    """Whether the processor is fast in a 16-bit type."""
    return computes_bf16() if kept == "bf16" else computes_fp16()


def _whole_modules(model: nn.Module, keep_fp32: Sequence[str]) -> frozenset[str]:
    """Batch norm, and what the model or the user names: any part of a path, as in a transformers model's `_keep_in_fp32_modules`."""
    names = (*keep_fp32, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    return frozenset(
        path
        for path, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) or any(f".{name}." in f".{path}." for name in names)
    )
