"""DeepSpeed's learning rates over a run, as functions of the number of steps so far.

DeepSpeed sets a rate when a scheduler is made, and another after every step that updates; its own count of iterations begins at -1.
The formulas give the rate after `done` such steps, in DeepSpeed's order of operations, so that rates have its bits.

Source: deepspeed/runtime/lr_schedules.py of 0.19; docs at deepspeed.readthedocs.io/en/latest/schedulers.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from patrickstar.config.settings import Schedule
from patrickstar.errors import ConfigError

Parameters = Mapping[str, Any]
Betas = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """A learning rate over a run: `lr` gives it after so many steps, from the optimizer's own; `betas` gives the betas, or None: they stay."""

    lr: Callable[[int, float], float]
    betas: Callable[[int], Betas | None] = lambda _: None


def rates_of(schedule: Schedule) -> Rates:
    """The rates of a schedule, and the betas of the one that has some: ConfigError where the first, which grows after the cycle, has come to 1."""
    formula, p = _FORMULAS[schedule.name], schedule.parameters
    rates = Rates(lambda done, base: formula(done, base, p))
    return replace(rates, betas=lambda done: (_first_beta(done, p), 0.99)) if p.get("cycle_momentum") else rates


def _range_test(done: int, _: float, p: Parameters) -> float:
    interval = done / p["lr_range_test_step_size"]
    if p["lr_range_test_staircase"]:
        interval = math.floor(interval)
    return float(p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * interval))


def _one_cycle(done: int, _: float, p: Parameters) -> float:
    low, high, height = p["cycle_min_lr"], p["cycle_max_lr"], _height(done, p)
    return float(low / (1 + p["decay_lr_rate"] * _decayed(done, p)) if height is None else low + (high - low) * height)


def _first_beta(done: int, p: Parameters) -> float:
    low, high, height = p["cycle_min_mom"], p["cycle_max_mom"], _height(done, p)
    if done == 0:  # DeepSpeed begins at the low end and jumps to the high one with the first step
        return float(low)
    beta = high * (1 + p["decay_mom_rate"] * _decayed(done, p)) if height is None else high - (high - low) * height
    if beta >= 1:
        raise ConfigError(
            f"scheduler.params.decay_mom_rate={p['decay_mom_rate']}: the first beta is {beta:g} after {done} steps, and must stay below 1; "
            "write a smaller rate, or a larger decay_step_size"
        )
    return float(beta)


def _sides(p: Parameters) -> tuple[float, float]:
    """Steps up and steps down."""
    return float(p["cycle_first_step_size"]), float(p["cycle_second_step_size"] or p["cycle_first_step_size"])


def _decayed(done: int, p: Parameters) -> float:
    """Decay intervals since the end of the cycle."""
    return (done - sum(_sides(p))) / p["decay_step_size"] if p["decay_step_size"] else 0.0


def _height(done: int, p: Parameters) -> float | None:
    """Height of a step on the cycle: 0 at the cycle's ends, 1 at its top; None after it."""
    up, down = _sides(p)
    cycle = up + down
    if done > cycle:
        return None
    top = up / cycle
    x = 1.0 + done / cycle - math.floor(1 + done / cycle)
    second = p["cycle_second_stair_count"]
    stairs = p["cycle_first_stair_count"] if x <= top or second is None else second
    if not stairs:
        return x / top if x <= top else (x - 1) / (top - 1)
    at = done % cycle
    return math.floor(at * stairs / up if at <= up else (cycle - at) * stairs / down) / stairs


def _warmup(done: int, base: float, p: Parameters) -> float:
    low, high = p["warmup_min_lr"], base if p["warmup_max_lr"] is None else p["warmup_max_lr"]
    if done == 0:
        return float(low)
    share, total = _risen(done - 1, p), p.get("total_num_steps")
    if share is None:
        share = 1.0 if total is None else max(0.0, (total - (done - 1)) / max(1.0, total - _rise(p)))
    return float(low + (high - low) * share)


def _cosine(done: int, base: float, p: Parameters) -> float:
    if done == 0:
        return 0.0
    share, lowest = _risen(done - 1, p), p["cos_min_ratio"]
    if share is not None:
        return float(base * (p["warmup_min_ratio"] + share * (1.0 - p["warmup_min_ratio"])))
    progress = min(1.0, (done - _rise(p)) / max(1, p["total_num_steps"] - _rise(p)))
    return float(base * max(0.0, lowest + (1.0 - lowest) * ((1 + math.cos(math.pi * progress)) / 2)))


def _rise(p: Parameters) -> int:
    return max(2, p["warmup_num_steps"])


def _risen(iteration: int, p: Parameters) -> float | None:
    """The share of the rise that is done at an iteration; None after the rise."""
    if iteration >= _rise(p):
        return None
    is_log = p["warmup_type"] == "log"
    return 1.0 / math.log(_rise(p)) * math.log(iteration + 1) if is_log else iteration / _rise(p)


_FORMULAS: Final[Mapping[str, Callable[[int, float, Parameters], float]]] = MappingProxyType(
    {
        "LRRangeTest": _range_test,
        "OneCycle": _one_cycle,
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup,
        "WarmupCosineLR": _cosine,
    }
)
