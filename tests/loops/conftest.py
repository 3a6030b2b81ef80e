"""One thread for models of this size."""

from __future__ import annotations

from tests.parity.conftest import one_thread

__all__ = ["one_thread"]
