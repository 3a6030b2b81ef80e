"""The import path of the original's users: `from patrickstar.runtime import initialize_engine`."""

from patrickstar.engine import initialize_engine

__all__ = ["initialize_engine"]
