"""The optimizer that `initialize_engine` gives: the session's, at the boundaries of gradient accumulation."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from patrickstar.errors import StateError
from patrickstar.optim.managed import ManagedOptimizer
from patrickstar.session.session import Session

_log = logging.getLogger("patrickstar")


class EngineOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose `step()` counts micro-batches, and updates at every so manieth.

    Between these boundaries `step()` and `zero_grad()` do nothing. At a boundary the loss scaler of fp16 decides whether there is an
    update, and the schedule of the config goes on where there was one. `param_groups` are the session's own: changes of them
    take effect at the next update, and schedulers of torch may be built on this object. Its hooks run when there is an update.

    Attributes:
        global_steps: boundaries so far, skipped ones included. skipped_steps: those without an update, because gradients overflowed.
        lr_scheduler: that of the config, or None.
    """

    def __init__(
        self, session: Session, *, accumulate: int, lr_scheduler: LRScheduler | None, steps_per_print: int | None
    ) -> None:
        assert session.optimizer is not None, "a session that trains has one"
        self._managed: ManagedOptimizer = session.optimizer
        # Not Optimizer.__init__, which makes groups of its own: what unpickling calls sets up hooks and nothing else.
        self.__setstate__({"defaults": self._managed.defaults})
        self._session = session
        self._accumulate = accumulate
        self.lr_scheduler = lr_scheduler
        self._steps_per_print = steps_per_print

        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps: int = 0
        """Micro-batches since the last boundary."""
        self._updated = False
        self._managed.register_step_post_hook(self._on_update)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The session's list of groups, not a copy."""
        return self._managed.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The state of Adam by parameter, as `ManagedOptimizer.state` has it."""
        return self._managed.state

    @property
    def at_boundary(self) -> bool:
        """Tells whether the next `step()` ends a step."""
        return self.micro_steps + 1 >= self._accumulate

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Ends a micro-batch, and at a boundary the step: update, scale, schedule.

        Raises:
            StateError: a closure with fp16 or accumulation; gradients overflow at the smallest loss scale.
        """
        if closure is not None and (self._accumulate > 1 or self._session.scaler.is_enabled()):
            raise StateError("step(closure) with fp16 or gradient accumulation: compute the loss before step()")
        if not self.at_boundary:
            self.micro_steps += 1
            return None
        self.micro_steps, self._updated = 0, False
        scaler = self._session.scaler
        loss = scaler.step(self._managed) if closure is None else self._managed.step(closure)
        self.global_steps += 1
        if self._updated:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
        if scaler.is_enabled():
            scaler.update()
        if self._steps_per_print is not None and self.global_steps % self._steps_per_print == 0:
            rates, betas = ([group[name] for group in self.param_groups] for name in ("lr", "betas"))
            _log.info("step=%d, skipped=%d, lr=%s, mom=%s", self.global_steps, self.skipped_steps, rates, betas)
        return loss

    # As in ManagedOptimizer: torch would run the global hooks once more.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients at a boundary, as in torch; nothing between two, where gradients add up."""
        if self.micro_steps == 0:
            self._managed.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model."""
        self._managed.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer in the format of torch's class."""
        return self._managed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class or torch's saved."""
        self._managed.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Runs before every update."""
        return self._managed.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Runs after every update."""
        return self._managed.register_step_post_hook(hook)

    def restore_counts(self, *, global_steps: int, skipped_steps: int) -> None:
        """A checkpoint was loaded, which is at a boundary."""
        self.global_steps, self.skipped_steps, self.micro_steps = global_steps, skipped_steps, 0

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "the optimizer of an engine cannot be copied or pickled: use state_dict() and load_state_dict()"
        )

    def _on_update(self, *_: object) -> None:
        self._updated = True
