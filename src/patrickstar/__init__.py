"""Train PyTorch models several times larger than memory, bit for bit equal to plain PyTorch.

    session = patrickstar.manage(model, optimizer, host_memory="6GiB", disk="/fast/disk")
    optimizer = session.optimizer

and the training loop stays as it is. What needs torch is imported when it is first asked for.
"""

import importlib as _importlib
import types as _types
import typing as _typing

from patrickstar.config.options import LossScale, Options
from patrickstar.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DeviceError,
    Error,
    LayoutError,
    RankError,
    RankLost,
    StateError,
)

if _typing.TYPE_CHECKING:
    from patrickstar.deferred.deferred_init import deferred_init
    from patrickstar.optim.adamw import Adam, AdamW
    from patrickstar.session.manage import manage
    from patrickstar.session.session import Session

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "Error",
    "LayoutError",
    "LossScale",
    "Options",
    "RankError",
    "RankLost",
    "Session",
    "StateError",
    "deferred_init",
    "manage",
]

_WITH_TORCH = _types.MappingProxyType(
    {
        "Adam": "patrickstar.optim.adamw",
        "AdamW": "patrickstar.optim.adamw",
        "Session": "patrickstar.session.session",
        "deferred_init": "patrickstar.deferred.deferred_init",
        "manage": "patrickstar.session.manage",
    }
)


def __getattr__(name: str) -> _typing.Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_importlib.import_module(_WITH_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
