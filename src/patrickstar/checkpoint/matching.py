"""Matching of the tensors of some files with those of a model. Looks at names, shapes and types only; reads no tensor but to compare tied ones.

What is taken over satisfies, or nothing is:

(1) It has the shape of the model's tensor. A view or a broadcast would be a guess.
(2) It is of the same type or of one that becomes it by widening or by rounding once: floats for floats, integers for no
    narrower integers. Eight-bit floats and integers for floats are quantised; what they mean stands elsewhere.
(3) It alone goes there. Where a tied tensor stands in the files under several of its names, all are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from patrickstar.checkpoint.naming import Naming
from patrickstar.checkpoint.weight_files import WeightFiles
from patrickstar.errors import CheckpointError, some

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PIECE_NUMEL = 1 << 20
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a tensor: the tensor `parts[0]` of the files as it is, or with `patterns` a conversion to `key` of all parts.

    `shape`, `dtype`: of what comes of it. `made`: the key of what the conversion gives that is wanted here.
    """

    key: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    patterns: tuple[str, ...] = ()
    made: str = ""

    def read(self, files: WeightFiles, naming: Naming) -> Tensor:
        """The tensor, of the type that it has in the files."""
        if not self.patterns:
            return files.read(self.parts[0])
        parts = [(name, pattern, files.read(name)) for name, pattern in zip(self.parts, self.patterns, strict=True)]
        return naming.convert(self.key, parts)[self.made]


@dataclass(frozen=True, slots=True)
class Match:
    """Origins by the key that a tensor is known by; what neither side has."""

    origins: Mapping[str, Origin]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match(files: WeightFiles, tensors: Mapping[tuple[str, ...], Tensor], naming: Naming) -> Match:
    """The origin in some files of a model's tensors, by all keys that each has in the state dict; it is known by the first.

    CheckpointError: a rule above does not hold, for the tensors that the message names; or nothing fits at all.
    """
    by_key = {key: tensor for keys, tensor in tensors.items() for key in keys}
    found, unexpected = _origins(files, by_key, naming)
    given = {keys[0]: [key for key in keys if key in found] for keys in tensors}
    problems = [problem for key in by_key if key in found and (problem := _misfit(key, found[key], by_key[key]))]
    origins = {name: found[keys[0]] for name, keys in given.items() if keys}
    if problems:
        raise CheckpointError(
            f"{files.path}: weights of another model, nothing was loaded: {some(problems, most=_SHOWN, separator='; ')}"
        )
    if not origins:
        raise CheckpointError(
            f"{files.path}: none of its {len(files.spans)} tensors is one of the model's: it has {some(list(files.spans), most=_SHOWN)}, "
            f"the model {some(list(by_key), most=_SHOWN)}"
        )
    for name, keys in given.items():
        for key in keys[1:]:
            _expect_same(files, naming, origins[name], found[key])
    return Match(
        MappingProxyType(origins),
        tuple(key for key in given if key not in origins and not naming.missing.search(key)),
        tuple(name for name in unexpected if not naming.unexpected.search(name)),
    )


def _origins(files: WeightFiles, by_key: Mapping[str, Tensor], naming: Naming) -> tuple[dict[str, Origin], list[str]]:
    """Origins by key of the model, and the names in the files that nothing takes."""
    found: dict[str, Origin] = {}
    unexpected: list[str] = []
    groups: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, key, pattern in naming.renamed(files.spans, by_key):
        if key not in by_key:
            unexpected.append(name)
        elif pattern is not None:
            groups[key].append((name, pattern))
        else:
            span = files.spans[name]
            _add(found, files, key, Origin(key, (name,), span.shape, span.dtype))
    for key, parts in groups.items():
        names, patterns = tuple(name for name, _ in parts), tuple(pattern for _, pattern in parts)
        for made, tensor in _sketch(files, key, parts, naming).items():
            if made in by_key:
                _add(found, files, made, Origin(key, names, tuple(tensor.shape), tensor.dtype, patterns, made))
    return found, unexpected


def _sketch(files: WeightFiles, key: str, parts: Sequence[tuple[str, str]], naming: Naming) -> dict[str, Tensor]:
    """The result of a conversion, without bytes."""
    spans = {name: files.spans[name] for name, _ in parts}
    bare = {name: torch.empty(span.shape, dtype=span.dtype, device="meta") for name, span in spans.items()}
    try:
        return naming.convert(key, [(name, pattern, bare[name]) for name, pattern in parts])
    except Exception as problem:  # the library's own code, over shapes that a file has: anything
        raise CheckpointError(
            f"{files.path}: {some(list(spans), most=_SHOWN)} do not make {key}, as the model's library would: {problem}"
        ) from problem


def _add(found: dict[str, Origin], files: WeightFiles, key: str, given: Origin) -> None:
    if key in found:
        names = f"{found[key].parts[0]!r} and {given.parts[0]!r}"
        raise CheckpointError(f"{files.path}: {names} are both {key} of the model")
    found[key] = given


def _misfit(key: str, origin: Origin, one: Tensor) -> str:
    name = key if origin.parts == (key,) else f"{key} (from {some(origin.parts, most=_SHOWN)})"
    if origin.shape != one.shape:
        return f"{name} has shape {list(origin.shape)} in the files, {list(one.shape)} in the model"
    dtype = origin.dtype
    if dtype == one.dtype or (dtype in _FLOATS and one.dtype in _FLOATS):
        return ""
    if dtype in _INTEGERS and one.dtype in _INTEGERS and torch.promote_types(dtype, one.dtype) == one.dtype:
        return ""
    quantised = ", which is quantised: give weights that are not" if one.dtype in _FLOATS else ""
    return f"{name} is {dtype} in the files, {one.dtype} in the model{quantised}"


def _expect_same(files: WeightFiles, naming: Naming, one: Origin, other: Origin) -> None:
    """Checks rule (3), in the precision that weights are taken over in."""
    whole = bool(one.patterns or other.patterns)

    def pieces(origin: Origin) -> Iterable[Tensor]:
        return [origin.read(files, naming).reshape(-1)] if whole else files.pieces(origin.parts[0], _PIECE_NUMEL)

    for pair in zip(pieces(one), pieces(other), strict=True):
        left, right = (t.float().view(torch.int32) if t.is_floating_point() else t for t in pair)
        if not torch.equal(left, right):
            raise CheckpointError(
                f"{files.path}: {some(one.parts, most=_SHOWN)} and {some(other.parts, most=_SHOWN)} differ, but are one tied tensor in the model: "
                "build the model without tying them, or give weights that have it once"
            )
