"""Train PyTorch models several times larger than memory, bit for bit equal to plain PyTorch."""

from patrickstar.errors import BudgetError, CheckpointError, ConfigError, DeviceError, Error, LayoutError, StateError

__all__ = ["BudgetError", "CheckpointError", "ConfigError", "DeviceError", "Error", "LayoutError", "StateError"]
