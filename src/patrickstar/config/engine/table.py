"""The table: every key of PatrickStar 0.4.6 and of DeepSpeed, and our own, each with its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from patrickstar.config.engine.key import Key
from patrickstar.config.engine.keys_memory import MEMORY
from patrickstar.config.engine.keys_models import MODELS
from patrickstar.config.engine.keys_patrickstar import OWN, PATRICKSTAR
from patrickstar.config.engine.keys_training import TRAINING
from patrickstar.config.engine.keys_watching import WATCHING

__all__ = ["CHILDREN", "SUBJECTS", "TABLE"]

SUBJECTS: Final[Mapping[str, tuple[Key, ...]]] = MappingProxyType(
    {
        "Training": TRAINING,
        "Memory": MEMORY,
        "PatrickStar 0.4.6": PATRICKSTAR,
        "Memory options without a key elsewhere": OWN,
        "Reports, measurements, checkpoints": WATCHING,
        "Models, data, parallelism": MODELS,
    }
)
"""The rows by subject, in the order in which they are shown."""

TABLE: Final[Mapping[str, Key]] = MappingProxyType({key.path: key for keys in SUBJECTS.values() for key in keys})
"""The rows by path."""


def _children() -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for path in TABLE:
        parts = path.split(".")
        for depth in range(len(parts)):
            found.setdefault(".".join(parts[:depth]), {})[parts[depth]] = None
    return {within: tuple(names) for within, names in found.items()}


CHILDREN: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(_children())
"""The names that an object may have, by its path; the config itself is `""`."""
