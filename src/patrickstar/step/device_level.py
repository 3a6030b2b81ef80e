"""The level that activations and workspaces of a session have come to, for which plans leave room on a device.

A forecast is low: kernels take what no trace shows. Before the first step of a kind a share of the budget is left for that (`core/fixed_costs.py`).
What they take is known once a step of that kind has been. From then on its plans have that much more at every moment, up to the level, in place of
the share; where that is more than the budget has, the next such step is refused before it begins.
"""

from __future__ import annotations

import logging

from patrickstar.core.trace import Trace
from patrickstar.errors import BudgetError
from patrickstar.plan.stretch import Stretch
from patrickstar.step.device_peak import DevicePeak
from patrickstar.step.known_forwards import KnownForward
from patrickstar.units import format_bytes

__all__ = ["DeviceLevel", "refused_as_learned"]

_log = logging.getLogger("patrickstar")


class DeviceLevel:
    """Learns what stretches take of a device. Where the host computes, it only keeps the largest number.

    Args:
        peak: what the allocator of a device has given out, where there is one that keeps it. least_bytes: the level before the first stretch.
        set_aside_bytes: of the budget, left for what kernels take until that is known.

    Attributes:
        nbytes: the most non-model bytes of any moment so far, foreseen or taken.
    """

    def __init__(self, peak: DevicePeak | None, *, least_bytes: int = 0, set_aside_bytes: int = 0) -> None:
        self._peak = peak
        self._set_aside_bytes = set_aside_bytes
        self._least_bytes = least_bytes
        self.nbytes = least_bytes
        self._has_told = False

    @property
    def is_unknown(self) -> bool:
        """True before anything is known of any forward."""
        return self.nbytes <= self._least_bytes

    def rise(self, nbytes: int) -> None:
        """Notes that a moment takes so much."""
        self.nbytes = max(self.nbytes, nbytes)

    def rise_on_device(self, trace: Trace) -> None:
        """Notes what a stretch without activations takes: scratch of updates and of the norm."""
        if self._peak is not None:
            self.rise(trace.peak)

    def begin(self) -> None:
        """Begins to count for a stretch."""
        if self._peak is not None:
            self._peak.begin()

    def stop(self) -> None:
        """Counts no more: the stretch is over, or its activations are gone."""
        if self._peak is not None:
            self._peak.stop()

    def learn(self, stretch: Stretch, known: KnownForward | None, *, is_over: bool, budget_bytes: int) -> None:
        """Plans with what a stretch has taken, from now on, where that is more than was foreseen; more than was left for it is said.

        Args:
            known: what is known of its forward. is_over: whether more was held than the budget in bytes has.
        """
        if self._peak is None:
            return
        self._peak.stop()
        most, excess, trace = self._peak.most, 0, None if known is None else known.expected.trace
        if known is None or trace is None:
            excess = most - self.nbytes
        elif stretch.foreseen is None:
            excess = known.expected.excess_bytes = max(0, most - trace.peak)
        else:
            # Moments of a plan that was left do not tell by how much.
            excess = max(stretch.excess_bytes, most - stretch.foreseen.peak if stretch.reason else 0)
            known.expected.excess_bytes = max(known.expected.excess_bytes, self.excess_of(known.expected) + excess)
        left = 0 if known is not None and known.expected.knows_workspaces else self._set_aside_bytes
        if known is not None and trace is not None and stretch.complete and self._peak.is_seen and not known.by_chance:
            known.expected.knows_workspaces = True
        if excess > left:
            over = f". In this one, chunks and they took more than the device_memory of {format_bytes(budget_bytes)}"
            _log.log(
                logging.INFO if self._has_told else logging.WARNING,
                "activations and workspaces took %s of the device in the %s, %s more at some op than its plan left them: plans are made anew, with "
                "more room for them%s",
                format_bytes(most),
                stretch.kind,
                format_bytes(excess),
                over if is_over else "",
            )
            self._has_told = True
        self.rise(most)

    def leave_room(self, nbytes: int) -> int:
        """Leaves room from the next stretch on for so many bytes more than are there now; gives the bytes that activations then have."""
        assert self._peak is not None, "only a device's allocator runs out of memory"
        self.rise(self._peak.short_of(nbytes))
        return self.nbytes

    def excess_of(self, known: KnownForward) -> int:
        """Bytes that plans of a forward have beside its trace: what such a step took more, as far as nothing is left for that anyway."""
        return known.excess_bytes if known.knows_workspaces else max(0, known.excess_bytes - self._set_aside_bytes)


def refused_as_learned(refusal: BudgetError, excess_bytes: int) -> BudgetError:
    """The refusal of a forward that earlier ones of its kind have shown to take more than was foreseen."""
    return BudgetError(
        f"{refusal}\n  of the activations {format_bytes(excess_bytes)} are in no trace: an earlier step took them; this one has not begun",
        tier=refusal.tier,
        moment=refusal.moment,
        needed_bytes=refusal.needed_bytes,
        available_bytes=refusal.available_bytes,
        smallest_bytes=refusal.smallest_bytes,
        fixed_bytes=refusal.fixed_bytes,
    )
