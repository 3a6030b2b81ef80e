"""A session and what it is made of: everything below meets here."""

from patrickstar.runtime.initialize import initialize_engine
from patrickstar.runtime.manage import manage
from patrickstar.runtime.session import Session

__all__ = ["Session", "initialize_engine", "manage"]
