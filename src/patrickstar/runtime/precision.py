"""In which types a session keeps and computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from patrickstar.core.formats import FP32, Formats, bf16_formats
from patrickstar.core.layout import Layout
from patrickstar.core.plane import WEIGHT, PlaneRef
from patrickstar.errors import ConfigError
from patrickstar.torch_private import computes_bf16

__all__ = ["Precision", "find_precision", "lies_in", "whole_modules"]


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a session.

    Attributes:
        name: as `manage` has it. formats: of planes. compute: what parameters, inputs and buffers are of.
    """

    name: str
    formats: Formats
    compute: torch.dtype

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


def find_precision(name: str | None, *, accumulates: bool, compute: str | None = None) -> Precision:
    """The types for what `manage` was given; None: fp32, which every CPU computes fast.

    Raises:
        ConfigError: 16-bit weights would be widened to compute, which is yet to come.
    """
    if name == "bf16":
        if compute is None and not computes_bf16():
            raise ConfigError(
                'precision="bf16" on a processor that does not compute fast in it: weights will be widened to fp32 when they are fetched, in a '
                'later version; until then options=patrickstar.Options(compute="bf16") computes in bf16, slowly'
            )
        return Precision("bf16", bf16_formats(gradient="float32" if accumulates else "bfloat16"), torch.bfloat16)
    return Precision("fp32", FP32, torch.float32)


def lies_in(path: str, modules: frozenset[str]) -> bool:
    """Whether a parameter or buffer of this path belongs to one of these modules, or to a module inside of one."""
    parts = path.split(".")[:-1]
    return any(".".join(parts[:length]) in modules for length in range(len(parts) + 1))


def whole_modules(model: nn.Module, keep_fp32: Sequence[str] = ()) -> frozenset[str]:
    """The paths of modules that stay fp32 whole in 16-bit modes: batch norm, and what the model or the user names.

    Args:
        keep_fp32: names of modules, any part of a path, as in a transformers model's `_keep_in_fp32_modules`.
    """
    names = [*keep_fp32, *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    named = re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in names)) if names else None
    return frozenset(
        path
        for path, module in model.named_modules()
        if isinstance(module, _NormBase) or (named is not None and named.search(path))
    )
