"""Parameters that keep their bytes, as long as all model states fit beside the worst op of each forward. See Note [Whole] in the binding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from patrickstar.core.planes import GRAD, WEIGHT
from patrickstar.core.trace import Touch, Trace
from patrickstar.errors import BudgetError
from patrickstar.parameters.binding import Binding
from patrickstar.step.budgets import Budgets
from patrickstar.step.executor import Executor
from patrickstar.step.known_forwards import KnownForward
from patrickstar.torch_private import has_views
from patrickstar.units import format_bytes

_log = logging.getLogger("patrickstar")


@dataclass(kw_only=True, eq=False)
class Whole:
    """Parameters that keep their bytes: lets them go where they do not fit any more.

    Attributes:
        kept_in: gives the parameters whose gradients wait in a step with a trace, or with one that nobody knows.
        sizes: gives the bytes of all model states with these gradients, which are no units and in no trace, and those of the gradients alone.
        why: why parameters are bound by use; empty as long as they are not.
        leaving: is called before they may be, left: where they are from now on.
        kept: the parameters whose gradients wait in the step under way. known_sizes: `sizes`, as long as there are no others.
    """

    binding: Binding
    executor: Executor
    kept_in: Callable[[Trace | None], frozenset[str]]
    sizes: Callable[[frozenset[str]], tuple[int, int]]
    budgets: Budgets
    why: str

    leaving: Callable[[], None] = lambda: None
    left: Callable[[], None] = lambda: None
    kept: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = self.kept_in(Trace(()))
        self.known_sizes = cache(self.sizes)

    @property
    def needed_bytes(self) -> int:
        """The budget of the compute tier with which parameters would keep their bytes, beside the largest forward so far."""
        return self.known_sizes(self.kept)[0] + self.executor.room.level_bytes + self.budgets.spare_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes that gradients, and what is kept beside weights of 16 bits, take beside the units and what traces have."""
        state = self.executor.store.state
        kept = (state.unit_bytes(ref) for ref in state.home if ref.plane == GRAD and not state.is_free(ref))
        return max(0, self.known_sizes(self.kept)[1] - sum(kept))

    def stays(self, expected: KnownForward, reserve_bytes: Callable[[], int]) -> bool:
        """Tells whether parameters keep their bytes in a forward that is about to begin. Where it takes too much beside them they are let go.

        Args:
            reserve_bytes: gives what is left to a forward of which nothing is known.
        Raises:
            BudgetError: something holds their memory: a graph whose backward is still to come, a view. Nothing has changed then.
        """
        if torch.is_grad_enabled():
            is_unknown = expected.by_chance or self.binding.access.is_surprised
            self.kept = self.kept_in(None if is_unknown else expected.trace)
        if not self.why and expected.by_use:
            self._leave(expected.by_use, needed=0, room=0)
        if self.why or not self.budgets.bind:
            return not self.why
        beside, states, room = reserve_bytes(), self.known_sizes(self.kept)[0], self.budgets.room_bytes()
        if expected.trace is not None:
            beside = expected.trace.peak + expected.excess_beyond(self.budgets.machine.costs.set_aside_bytes)
        is_short = self.executor.room.is_short
        if self.budgets.hold(states, beside) and not is_short:
            return True
        takes = f"beside {format_bytes(states)} of model states a forward takes {'more than ' * is_short}{format_bytes(beside)}"
        why = f"{takes}, and there is room for {format_bytes(room)}"
        self._leave(why, needed=states + beside, room=room)
        return False

    def _leave(self, why: str, *, needed: int, room: int) -> None:
        store, weights = self.executor.store, [ref for ref in self.executor.store.state.home if ref.plane == WEIGHT]
        self.leaving()
        for bound in self.binding:
            self.binding.changes.look(bound)
        if store.works.is_queued:
            store.works.compute([Touch(ref) for ref in weights])  # what is queued on a device still reads them
        self.binding.let_go()
        held = [ref for ref in weights if ref in store.leases.held()]
        if held:
            self.binding.hold()
            raise BudgetError(
                f"{why}: parameters would have to move from now on, and {len(held)} of {len(weights)} chunks of weights are held, by the graph of "
                "a forward whose backward is still to come or by views of parameters (p.data, p.detach()). Do that backward, or let go of them, "
                "or give a larger budget",
                tier=store.state.compute.label,
                available_bytes=room,
                needed_bytes=needed,
                smallest_bytes=needed,
            )
        self.why = why
        self.binding.gradients.used.forget()
        self.left()
        _log.info("parameters are bound by use from now on: %s", why)

    def may_update(self, name: str) -> bool:
        """Tells whether a gradient that has just come is whole, and the value of before the update is needed no more.

        A use of the parameter through a view (`p.detach()`, `p.data`) may be, as long as anybody has one. See Note [Updates in backward].
        """
        is_foreseen = self.executor.pilot.stretch.gradient_bytes is not None and name not in self.kept
        return is_foreseen and not has_views(self.binding.by_name[name].tensor())
