"""Bit patterns of two records, compared; differences come back as readable lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tests.parity.oracle import Record

# How many lines a failing test shows; the first are what matters, later ones follow from them.
SHOWN = 12


def differences(want: Record, got: Record, *, unseen: Collection[str] = (), any_nan: bool = False) -> list[str]:
    """Where the records differ, in the order in which a run meets it. An empty list: equal in every bit.

    Args:
        unseen: what the second run could not show, of "gradients" (a step in backward) and "norms" (clipped inside it).
        any_nan: a gradient that is NaN may be another NaN: which one a sum of two gives depends on the order of its operands. So may a norm, always.
    """
    found = compare_sequences("loss of micro-step", want.losses, got.losses)
    if "gradients" not in unseen:
        found += compare_counts("steps with gradients", want.gradients, got.gradients)
        for step, (ours, theirs) in enumerate(zip(want.gradients, got.gradients, strict=False), start=1):
            seen = [{n: _one_nan(g) if any_nan else g for n, g in each.items()} for each in (ours, theirs)]
            found += compare_mappings(f"step {step}, gradient of", *seen)
    if "norms" not in unseen:
        found += compare_sequences("norm of step", [*map(_one_nan, want.norms)], [*map(_one_nan, got.norms)])
    found += compare_sequences("evaluation", want.evaluations, got.evaluations)
    found += compare_mappings("weight", want.weights, got.weights)
    found += compare_mappings("exp_avg of", want.exp_avg, got.exp_avg)
    found += compare_mappings("exp_avg_sq of", want.exp_avg_sq, got.exp_avg_sq)
    if want.updates != got.updates:
        found.append(f"updates: want {want.updates}, got {got.updates}")
    if want.scales != got.scales:
        found.append(f"loss scales: want {want.scales}, got {got.scales}")
    found += compare_mappings("buffer", want.buffers, got.buffers)
    if len(found) > SHOWN:
        return [*found[:SHOWN], f"and {len(found) - SHOWN} more"]
    return found


def _one_nan(tensor: Tensor) -> Tensor:
    """Every NaN as the same one."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


def same_bits(want: Tensor, got: Tensor) -> bool:
    """Equal type, shape and bit pattern: unlike `torch.equal`, tells -0.0 from 0.0 and takes a NaN for itself."""
    if want.dtype != got.dtype or want.shape != got.shape:
        return False
    return torch.equal(bits(want), bits(got))


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern as integers, flat, in row-major order of the logical elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype is torch.bool:
        return flat
    return flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[flat.element_size()]
    )


def describe(label: str, want: Tensor, got: Tensor) -> str:
    """How two tensors of one meaning differ: type, shape, or how many elements and the first of them."""
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{label}: want {want.dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}"
    unequal = bits(want) != bits(got)
    first = int(unequal.nonzero()[0])
    share = f"{int(unequal.sum())} of {unequal.numel()} elements"
    ours, theirs = (tensor.detach().contiguous().reshape(-1)[first].item() for tensor in (want, got))
    return f"{label}: {share}, first at {first}: want {ours!r}, got {theirs!r}"


def compare_counts(label: str, want: Sequence[object], got: Sequence[object]) -> list[str]:
    return [] if len(want) == len(got) else [f"{label}: want {len(want)}, got {len(got)}"]


def compare_sequences(label: str, want: Sequence[Tensor], got: Sequence[Tensor]) -> list[str]:
    pairs = enumerate(zip(want, got, strict=False), start=1)
    found = [
        describe(f"{label} {index}", ours, theirs) for index, (ours, theirs) in pairs if not same_bits(ours, theirs)
    ]
    return compare_counts(label, want, got) + found


def compare_mappings(label: str, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[str]:
    found = []
    if want.keys() != got.keys():
        missing, extra = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
        found.append(f"{label}: missing {missing}, not expected {extra}")
    for name, ours in want.items():
        if name in got and not same_bits(ours, got[name]):
            found.append(describe(f"{label} {name}", ours, got[name]))
    return found
