"""The smallest budgets in which the traces of a step fit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import EXP_AVG, EXP_AVG_SQ, GRAD, REST, WEIGHT
from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError
from patrickstar.plan import residency
from patrickstar.plan.fit import minimum_bytes, worst_moment
from patrickstar.plan.placement import place, place_on_all_tiers
from patrickstar.plan.residency import Residency
from patrickstar.session.start import Setup, add_gradients
from patrickstar.units import MIB

_GRAIN_BYTES = 64 * MIB
_TRIES = 6


def smallest_budgets(setup: Setup, traces: tuple[Trace, ...]) -> dict[str, int]:
    """The smallest budget of the compute tier when everything may rest below it, or on it where there is nothing below.

    Where the tiers below a device have no room for all, those of the device and of the host, each with the other as it is; the device's with the
    smallest host, or one that holds everything, where they have no room whatever rests on the device.
    """
    machine, layout, formats = setup.budgets.machine, setup.layout, setup.formats.now
    minimum = {tier.label: 0 for tier in Tier}
    if machine.compute is Tier.DEVICE and not _rests_below(setup):
        needs = partial(_needed_beside_homes, setup, traces)
        units = formats.units(layout, (WEIGHT, REST, EXP_AVG, EXP_AVG_SQ, GRAD))
        slots = sum(residency.slots_of(ref, layout, formats) for ref in units)
        everything = slots * residency.bytes_of_slot(layout, formats)
        minimum[Tier.HOST.label] = enough = _smallest_host(machine, needs, everything)
        try:
            needed = needs(machine)
        except BudgetError:
            needed = needs(_with_host(machine, enough or everything))
    elif machine.compute is Tier.HOST and Tier.DISK not in machine.budget:
        needed = _needed_beside_homes(setup, traces, machine)
    else:
        needed = minimum_bytes(*traces, layout=layout, formats=formats)
    minimum[machine.compute.label] = needed + machine.costs.beside(needed)
    return minimum


def _rests_below(setup: Setup) -> bool:
    """Tells whether everything finds room below the device."""
    machine, planes = setup.budgets.machine, setup.gradients.planes
    whole = machine.budget[machine.compute]
    with suppress(BudgetError):
        place(setup.layout, machine, planes=planes, nonmodel_bytes=whole, formats=setup.formats.now)
        return True
    return False


def _needed_beside_homes(setup: Setup, traces: tuple[Trace, ...], machine: Machine) -> int:
    """The smallest budget of the compute tier where what the tiers below have no room for is at home there."""
    layout, formats, compute = setup.layout, setup.formats.now, machine.compute
    roomy = Machine(compute, {**machine.budget, compute: sys.maxsize})
    home = place_on_all_tiers(layout, roomy, planes=setup.gradients.planes, formats=formats)
    contents = Residency.at_rest(layout, compute=compute, home=home, free=home, formats=formats)
    add_gradients(contents, traces[0], setup, roomy)
    at_home = sum(contents.unit_bytes(ref) for ref, tier in contents.home.items() if tier is compute)
    # By a step after others, where what is at home there never leaves it.
    return max(at_home, *(worst_moment(trace, start=contents, trained=True).nbytes for trace in traces))


def _smallest_host(machine: Machine, needs: Callable[[Machine], int], everything: int) -> int:
    """The smallest budget of the host with which the device's is enough, or little more than that; 0: none is, with `everything` on the host."""
    device_bytes = machine.budget[Tier.DEVICE]
    if needs(_with_host(machine, everything)) > device_bytes:
        return 0
    host_bytes, best = machine.budget[Tier.HOST], everything
    for _ in range(_TRIES):
        try:
            short = needs(_with_host(machine, host_bytes)) - device_bytes
        except BudgetError as refusal:  # of the tiers below, whatever the device has
            host_bytes += refusal.smallest_bytes - refusal.available_bytes
            if host_bytes >= best:
                break
            continue
        if short <= 0:
            best = min(best, host_bytes)
            if short > -_GRAIN_BYTES:
                break
        # Where anything rests on the device at all, a byte more of the host is a byte less there.
        more = short + _GRAIN_BYTES // 2 if short > 0 else short
        host_bytes = min(max(host_bytes + more, 1), best)
    return best


def _with_host(machine: Machine, host_bytes: int) -> Machine:
    return Machine(machine.compute, {**machine.budget, Tier.HOST: host_bytes})


def let_gradients_go(state: Residency, *, keeps: bool) -> None:
    """Gradients that nobody wants give their slots back. `keeps`: whether the step goes on, which wants those that have contents."""
    for ref in sorted(state.home):
        if ref.plane == GRAD and (ref in state.stale[state.compute] if state.is_free(ref) else not keeps):
            for action in residency.release(state, ref):
                residency.apply(state, action)
