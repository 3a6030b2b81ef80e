"""Refusals that a person can act on: what does not fit where, in numbers that add up, and what to change."""

from __future__ import annotations

from patrickstar.core.machine import Tier
from patrickstar.core.plane import GRAD
from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError
from patrickstar.units import GIB, KIB, MIB

_UNITS = ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_NAMED = 3  # of names in a message


def refuse_moment(
    *,
    tier: Tier,
    moment: str,
    slot_bytes: int,
    slots: int,
    nonmodel_bytes: int,
    budget_bytes: int,
    smallest_bytes: int,
    fixed_bytes: int = 0,
) -> BudgetError:
    """A moment needs more of the compute tier than its budget.

    Args:
        moment: as `Trace.name` prints it, `"118 backward layers.7.mlp.w1"`.
        slots: what the moment must hold at once; smallest_bytes: the smallest budget for the whole trace, 0: unknown.
        fixed_bytes: what a budget for that much holds beside chunks and activations.
    """
    chunks = slots * slot_bytes
    parts = [chunks, nonmodel_bytes, fixed_bytes]
    needed = sum(parts)
    size = _Sizes(needed)
    # What is printed as needed is a sum of sizes rounded up: where that very need is the smallest budget, it reads the same.
    smallest = size.total(parts) if smallest_bytes == needed else size.up(smallest_bytes)
    fits = [f"{tier.label}_memory >= {smallest}"] if smallest_bytes else []
    if chunks + fixed_bytes < budget_bytes:
        fits.append(
            f"activations of at most {size.down(budget_bytes - chunks - fixed_bytes)} there: a smaller batch, or recompute"
        )
    message = (
        f"{tier.label} memory is {size.short(parts, budget_bytes)} short at moment {moment}\n"
        f"  needed {size.total(parts)} = chunk slots {size.up(chunks)} ({slots} of "
        f"{_Sizes(slot_bytes).up(slot_bytes)}) + activations {size.up(nonmodel_bytes)}{_fixed(size, fixed_bytes)};  "
        f"budget {size.down(budget_bytes)}"
    )
    return BudgetError(
        message + (f"\n  fits with: {'  |  '.join(fits)}" if fits else ""),
        tier=tier.label,
        moment=moment,
        needed_bytes=needed,
        available_bytes=budget_bytes,
        smallest_bytes=smallest_bytes,
        fixed_bytes=fixed_bytes,
    )


def refuse_homes(
    *,
    tier: Tier,
    parts: dict[str, int],
    budget_bytes: int,
    smallest_bytes: int,
    instead: str = "",
    why: str = "",
    fixed_bytes: int = 0,
) -> BudgetError:
    """What rests on a tier takes more than its budget.

    Args:
        parts: what rests there, and its bytes; instead: another change that would help; why: what is to rest there as well.
        fixed_bytes: what a budget for that much holds beside it.
    """
    sizes = [*parts.values(), fixed_bytes]
    size = _Sizes(sum(sizes))
    fits = [f"{tier.label}_memory >= {size.up(smallest_bytes)}", *filter(None, [instead])]
    return BudgetError(
        f"{tier.label} memory is {size.short(sizes, budget_bytes)} short of what rests there{f': {why}' if why else ''}\n"
        f"  needed {size.total(sizes)} = {' + '.join(f'{name} {size.up(nbytes)}' for name, nbytes in parts.items())}"
        f"{_fixed(size, fixed_bytes)};"
        f"  budget {size.down(budget_bytes)}\n"
        f"  fits with: {'  |  '.join(fits)}",
        tier=tier.label,
        needed_bytes=sum(sizes),
        available_bytes=budget_bytes,
        smallest_bytes=smallest_bytes,
        fixed_bytes=fixed_bytes,
    )


def _fixed(size: _Sizes, fixed_bytes: int) -> str:
    """The term of a sum that says what the process takes beside the rest, where the budget holds that."""
    return f" + fixed costs {size.up(fixed_bytes)}" if fixed_bytes else ""


def name_gradients(trace: Trace) -> str:
    """Which gradients a trace shows in their plane, and with that why they need room: for `refuse_homes`."""
    names = list(dict.fromkeys(m.label for m in trace.moments if any(touch.ref.plane == GRAD for touch in m.touches)))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"gradients that cannot be used as they arrive ({', '.join(names[:_NAMED])}{more})"


class _Sizes:
    """Sizes of one message, all in the unit of the largest and in whole hundredths of it, so that they add up.

    Needs are rounded up and budgets down: nothing that is printed as fitting is short by a rounding.
    """

    def __init__(self, largest: int) -> None:
        self._nbytes, self._name = next((unit for unit in _UNITS if largest >= unit[0]), _UNITS[-1])
        self._grain = 1 if self._nbytes == 1 else 100

    def up(self, nbytes: int) -> str:
        return self._text(self._ceil(nbytes))

    def down(self, nbytes: int) -> str:
        return self._text(self._floor(nbytes))

    def total(self, parts: list[int]) -> str:
        return self._text(sum(map(self._ceil, parts)))

    def short(self, parts: list[int], budget_bytes: int) -> str:
        return self._text(sum(map(self._ceil, parts)) - self._floor(budget_bytes))

    def _ceil(self, nbytes: int) -> int:
        return -(-nbytes * self._grain // self._nbytes)

    def _floor(self, nbytes: int) -> int:
        return nbytes * self._grain // self._nbytes

    def _text(self, grains: int) -> str:
        return f"{grains} B" if self._nbytes == 1 else f"{grains / 100:.2f} {self._name}"
