"""Train PyTorch models several times larger than memory, bit for bit equal to plain PyTorch.

    session = patrickstar.manage(model, optimizer, host_memory="6GiB", disk="/fast/disk")
    optimizer = session.optimizer

and the training loop stays as it is.
"""

from patrickstar.config.options import Options
from patrickstar.errors import BudgetError, CheckpointError, ConfigError, DeviceError, Error, LayoutError, StateError
from patrickstar.optim.adamw import Adam, AdamW
from patrickstar.runtime import Session, manage

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "Error",
    "LayoutError",
    "Options",
    "Session",
    "StateError",
    "manage",
]
