"""Refusals of what cannot be recorded while modules are built."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from patrickstar.deferred.operations import is_plain
from patrickstar.deferred.recipe import Call, Cell
from patrickstar.errors import LayoutError
from patrickstar.units import KIB, format_bytes

__all__ = ["CONSTANT_BYTES", "ELSEWHERE", "expect_own", "outside", "unrecordable"]

CONSTANT_BYTES: Final = 64 * KIB
"""Of values that no recorded operation has made: up to here they are kept."""

ELSEWHERE: Final = "values that torch's operations have not made (NumPy, a file)"


def unrecordable(label: str, why: str) -> LayoutError:
    """An initialisation that cannot be recorded: of what, and the operation."""
    return LayoutError(
        f"{label} cannot be built under deferred_init(): {why}. Build the model outside of it; or leave this out there, "
        "and give the values with manage(weights=...) or session.write()"
    )


def expect_own(label: str, call: Call, own: Cell, how: str) -> None:
    """LayoutError where a call depends on the values of another parameter than its own."""
    others = sorted({cell.label for cell in call.parameters if cell is not own})
    if others:
        raise unrecordable(label, f"{how} the values of another parameter, {others[0]}")


def outside(tensor: Tensor) -> str:
    """A phrase for values that cannot be kept."""
    if is_plain(tensor) and tensor.untyped_storage().resizable():
        return f"{format_bytes(tensor.nbytes)} of values made elsewhere; up to {format_bytes(CONSTANT_BYTES)} are kept"
    return ELSEWHERE
