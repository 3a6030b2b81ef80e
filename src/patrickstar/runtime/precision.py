"""In which types a session keeps and computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from patrickstar.config.arguments import MemoryOptions
from patrickstar.core.formats import FP32, Formats, bf16_formats
from patrickstar.core.layout import Layout
from patrickstar.core.plane import WEIGHT, PlaneRef
from patrickstar.errors import ConfigError
from patrickstar.torch_private import computes_bf16

__all__ = ["Precision", "find_precision", "lies_in"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a session.

    Attributes:
        formats: of planes. compute: what parameters, inputs and buffers are of.
        whole: the paths of modules that stay fp32 whole, and all modules inside of them.
    """

    formats: Formats
    compute: torch.dtype
    whole: frozenset[str] = frozenset()

    @property
    def is_split(self) -> bool:
        """Whether masters are split in two halves."""
        return self.formats is not FP32

    def dtype(self, ref: PlaneRef, layout: Layout) -> torch.dtype:
        """torch's type of a unit's elements."""
        found: torch.dtype = getattr(torch, self.formats.of(ref, layout).dtype)
        return found

    def parameter_dtypes(self, layout: Layout) -> Mapping[str, torch.dtype]:
        """What parameters are of while they are managed, by name."""
        return {name: self.dtype(PlaneRef(place.chunk, WEIGHT), layout) for name, place in layout.slices.items()}


def find_precision(memory: MemoryOptions, model: nn.Module) -> Precision:
    """The types for what `manage` was given; where that says nothing, fp32, which every CPU computes fast.

    Raises:
        ConfigError: 16-bit weights would be widened to compute, which is yet to come.
    """
    if memory.precision != "bf16":
        return Precision(FP32, torch.float32)
    options = memory.options
    if options.compute is None and not computes_bf16():
        raise ConfigError(
            'precision="bf16" on a processor that does not compute fast in it: weights will be widened to fp32 when they are fetched, in a '
            'later version; until then options=patrickstar.Options(compute="bf16") computes in bf16, slowly'
        )
    accumulates = (options.accumulate or 1) > 1
    formats = bf16_formats(gradient="float32" if accumulates else "bfloat16")
    return Precision(formats, torch.bfloat16, _whole_modules(model, options.keep_fp32))


def lies_in(path: str, modules: Collection[str]) -> bool:
    """Whether a parameter or buffer of this path belongs to one of these modules."""
    return path.rpartition(".")[0] in modules


def _whole_modules(model: nn.Module, keep_fp32: Sequence[str]) -> frozenset[str]:
    """Batch norm, and what the model or the user names: any part of a path, as in a transformers model's `_keep_in_fp32_modules`."""
    names = (*keep_fp32, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    return frozenset(
        path
        for path, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) or any(f".{name}." in f".{path}." for name in names)
    )
