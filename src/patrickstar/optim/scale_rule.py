"""The rule by which a loss scale follows overflows. No tensors here."""

from __future__ import annotations

from typing import Any

from patrickstar.config.options import LossScale


class ScaleRule:
    """A loss scale that follows overflows.

    Source: DeepSpeed's `DynamicLossScaler.update_scale`. It grows by `factor` after every `window` updates without overflow in a row. An overflow
    uses up one of `hysteresis`; from the last one on each overflow divides by `factor`, down to `minimum`. All of them are there again after
    a growth, or after any update without overflow with `consecutive_hysteresis`.

    Attributes:
        scale: what the loss is multiplied with now. good_steps: updates since the last overflow. hysteresis_left: overflows, this one
            included, until the scale backs off.
    """

    def __init__(self, options: LossScale) -> None:
        self.options = options
        self.scale = float(options.initial)
        self.good_steps = 0
        self.hysteresis_left = options.hysteresis

    @property
    def is_exhausted(self) -> bool:
        """Tells whether another overflow could not be answered by a smaller scale."""
        options = self.options
        return options.dynamic and self.hysteresis_left == 1 and self.scale <= options.minimum

    def update(self, *, overflowed: bool) -> None:
        """Ends a step with gradients that had overflowed or had not."""
        options = self.options
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if not options.dynamic:
            return
        if overflowed:
            if self.hysteresis_left == 1:
                self.scale = max(self.scale / options.factor, float(options.minimum))
            else:
                self.hysteresis_left -= 1
            return
        grows = self.good_steps % options.window == 0
        if grows or options.consecutive_hysteresis:
            self.hysteresis_left = options.hysteresis
        if grows:
            self.scale *= options.factor

    def state_dict(self) -> dict[str, Any]:
        """The state that scaling goes on from: the keys of torch's GradScaler, and `hysteresis_left`."""
        options = self.options
        return {
            "scale": self.scale,
            "growth_factor": float(options.factor),
            "backoff_factor": 1.0 / options.factor,
            "growth_interval": options.window,
            "_growth_tracker": self.good_steps % options.window,
            "hysteresis_left": self.hysteresis_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state of this class or of torch's GradScaler, which has no `hysteresis_left`: all of that is then left."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["_growth_tracker"])
        self.hysteresis_left = min(int(state.get("hysteresis_left", self.options.hysteresis)), self.options.hysteresis)
