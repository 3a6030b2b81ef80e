"""`session.scaler`: loss scaling with the interface of `torch.amp.GradScaler`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from patrickstar.config.options import LossScale
from patrickstar.errors import StateError
from patrickstar.optim.scale_rule import ScaleRule
from patrickstar.step.overflow import OverflowFlag, names_of
from patrickstar.step.training_deferred import DeferredTraining
from patrickstar.torch_private import has_step_pre_hooks

_log = logging.getLogger("patrickstar")


class LossScaler(torch.amp.GradScaler):
    """Scales losses, and skips steps whose gradients overflow. The scale follows DeepSpeed's rule: see `patrickstar.LossScale`.

    Whether gradients have overflowed is found as they arrive. They are divided by the scale when they are next used, in fp32.

    Args:
        training: whose gradients they are, on other ranks another one; None: of a session without states yet. ours: the session's optimizers.
    """

    def __init__(self, options: LossScale, training: DeferredTraining | None, *ours: torch.optim.Optimizer) -> None:
        super().__init__(
            "cpu",
            init_scale=float(options.initial),
            growth_factor=float(options.factor),
            backoff_factor=1.0 / options.factor,
            growth_interval=options.window,
        )
        self._rule = ScaleRule(options)
        self.training: Any = training
        self._ours = ours

        self._overflowed: list[OverflowFlag] = []
        self._unscaled = False
        self._stepped = False

    def scale(self, outputs: Any) -> Any:
        """The loss, or each of an iterable of losses, multiplied with the scale (0-dim, fp32)."""
        self._scale = torch.tensor(self._rule.scale, dtype=torch.float32)
        self._growth_tracker = torch.tensor(self._rule.good_steps, dtype=torch.int32)
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, as `step` does where `unscale_` was not called.

        Raises:
            StateError: they are divided already, or the optimizer is not the session's.
        """
        self._expect_ours(optimizer)
        if self._unscaled or self._stepped:
            raise StateError("unscale_() has been called on this optimizer since the last update()")
        self._overflowed = self.training.overflowed()
        self.training.multiply(torch.tensor(1.0 / self._rule.scale, dtype=torch.float32))
        self._unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Calls `optimizer.step()`, unless gradients have overflowed: then nothing is updated, not even a count of steps.

        Raises:
            StateError: `update()` was not called after the last one, or the optimizer is not the session's.
        """
        self._expect_ours(optimizer)
        if "closure" in kwargs or args:
            raise StateError("scaler.step() takes no closure: compute the loss before it")
        if self._stepped:
            raise StateError("step() has been called since the last update()")
        if not self._unscaled:
            self.unscale_(optimizer)
        self._stepped = True
        # A hook may change gradients before the step.
        first = self.training.first_of(self._overflowed, before_step=not has_step_pre_hooks(optimizer))
        try:
            return None if first is not None else optimizer.step()
        finally:
            self.training.forget_norm()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Ends a step: the scale grows or backs off as the rule says, or is set.

        Raises:
            StateError: neither `step` nor `unscale_` came before; or gradients overflow at the smallest scale there may be.
        """
        if new_scale is None and not (self._stepped or self._unscaled):
            raise StateError("update() without step() or unscale_() before it: no gradients were looked at")
        names = names_of(self._overflowed)
        first, before, is_exhausted = names[0] if names else None, self._rule.scale, self._rule.is_exhausted
        self._overflowed, self._unscaled, self._stepped = [], False, False
        if new_scale is not None:
            self._rule.scale = float(new_scale)
            return
        self._rule.update(overflowed=first is not None)
        if first is None:
            return
        if is_exhausted:
            raise StateError(
                f"the gradients overflow although the loss scale is {before:g}, the smallest it may be; the first that did was that of {first}. "
                "Lower the learning rate, clip, look for NaN in the data, or train in bf16, which has the range of fp32"
            )
        _log.info(
            "a step was skipped: gradients overflowed at loss scale %g, the first was that of %s; the scale is %g now",
            before,
            first,
            self._rule.scale,
        )

    def get_scale(self) -> float:
        """The scale now."""
        return self._rule.scale

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state as torch's, with `hysteresis_left`; part of every checkpoint."""
        return self._rule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state of this class or of torch's."""
        self._rule.load_state_dict(state_dict)

    def _expect_ours(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._ours:
            raise StateError(
                "session.scaler steps session.optimizer alone: other optimizers need a scaler of their own"
            )
