"""Values for keys of the table, good and bad, found by what a key's kind takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patrickstar.config.engine.key import Key, Verdict
from patrickstar.config.engine.table import TABLE

POOL: tuple[Any, ...] = (
    *(True, False, 0, 1, 2, 3, 7, 1e3, 5e8, 0.5, 0.25, "", "some text", "step", "cpu", "none", "log", "linear"),
    *("fp32", "bf16", "mean", "sum", "Warn", "fixed", "bigbird", "bidirectional", "create", "value", "percentile"),
    *("schedule_based", [0.9, 0.99], (0.8, 0.95), [], [1, 2], ["a"], {}, {"x": 1}, None, -1, 10**12),
)


def good_values(key: Key) -> list[Any]:
    """Values that the key takes and that are not refused."""
    return [value for value in POOL if not key.kind.problem(value) and not key.refuses(value)]


def bad_values(key: Key) -> list[Any]:
    """Values of another kind."""
    return [value for value in (*POOL, object()) if key.kind.problem(value)]


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A config that has these keys; a name stands for `*`."""
    config: dict[str, Any] = {}
    for path, value in pairs:
        *within, name = path.replace("*", "mine").split(".")
        at = config
        for part in within:
            at = at.setdefault(part, {})
        at[name] = value
    return config


_TOGETHER = (
    "scheduler.",
    "train_",
    "zero_optimization.offload",
    "patrickstar.",
    "fp16.",
    "bf16.",
    "bfloat16.",
    "client.",
)


def goes_with_any(key: Key) -> bool:
    """Whether a key may be given whatever the others say."""
    parts = key.path.split(".")
    around = {".".join(parts[:depth]) for depth in range(1, len(parts))} & TABLE.keys()
    refused_whole = any(TABLE[path].verdict is Verdict.REFUSED for path in around)
    return key.path != "optimizer.type" and not key.path.startswith(_TOGETHER) and not refused_whole


FREE: tuple[Key, ...] = tuple(
    key
    for key in TABLE.values()
    # What is both a key and an object can be given in one form only.
    if goes_with_any(key) and not any(path.startswith(f"{key.path}.") for path in TABLE) and good_values(key)
)
